"""A process knows its place from whoever has started it."""

import pytest

from configs.errors import Refused
from runtimes.process.launcher import Hosts, Ranks, adopt_mpi, is_msrun_scheduler, launched

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
HOSTS = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
MSRUN = ("MS_ROLE", "RANK_ID", "MS_WORKER_NUM", "DEVICE_ID")


@pytest.fixture(autouse=True)
def _nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = (f"OMPI_COMM_WORLD_{name}" for name in MPI)
    for name in (*NAMES, *MSRUN, *mpi, *HOSTS):
        monkeypatch.delenv(name, raising=False)


def place(monkeypatch: pytest.MonkeyPatch, **variables: object) -> Ranks:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return Ranks.here()


def test_one_started_by_nobody_is_alone() -> None:
    assert Ranks.here() == Ranks() and not launched()


def test_torchrun_tells_ranks_and_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = place(monkeypatch, RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2)
    assert found == Ranks(3, 4, 1, 2) and launched()


def test_mpirun_tells_ranks_once_its_names_are_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "MASTER_ADDR", "MASTER_PORT"):  # what is set below goes with the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in zip(MPI, (3, 4, 1, 2), strict=True):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    monkeypatch.setenv("MASTER_ADDR", "first")
    assert not launched()
    adopt_mpi()
    assert Ranks.here() == Ranks(3, 4, 1, 2) and launched()


def test_one_process_of_mpirun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may start others itself, as `kiln run` does."""
    for name, value in zip(MPI, (0, 1, 0, 1), strict=True):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    adopt_mpi()
    assert Ranks.here() == Ranks() and not launched()


def test_mpirun_on_several_hosts_must_say_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(MPI, (3, 4, 1, 2), strict=True):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    with pytest.raises(Refused, match="MASTER_ADDR"):
        adopt_mpi()
    assert not launched()


def test_msrun_tells_ranks_and_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    found = place(monkeypatch, MS_ROLE="MS_WORKER", RANK_ID=9, MS_WORKER_NUM=16, DEVICE_ID=1)
    assert (found.rank, found.world, found.local_rank) == (9, 16, 1) and launched()


def test_msrun_on_several_hosts_must_number_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="--node_rank"):
        place(monkeypatch, MS_ROLE="MS_WORKER", MS_WORKER_NUM=16, DEVICE_ID=1)
    assert launched()


def test_what_an_ascend_host_sets_for_all_is_not_msrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert place(monkeypatch, RANK_ID=1, DEVICE_ID=1) == Ranks() and not launched()


def test_msruns_scheduler_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, MS_ROLE="MS_SCHED", MS_WORKER_NUM=2)
    assert is_msrun_scheduler() and not launched()


def test_one_of_several_hosts_knows_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Hosts.here() == Hosts(1, 0)
    place(monkeypatch, NNODES=3, NODE_RANK=2, MASTER_ADDR="first", MASTER_PORT=29500)
    assert Hosts.here() == Hosts(3, 2) and not launched()
    place(monkeypatch, NNODES=1)
    assert Hosts.here() == Hosts(1, 0), "a single host needs no other's address"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"NODE_RANK": "3"}, "NODE_RANK=3 with NNODES=3: set 0 to 2"),
        ({"NODE_RANK": ""}, "NODE_RANK='' in the environment"),
        ({"NNODES": "1:3"}, "NNODES='1:3' in the environment"),
        ({"MASTER_ADDR": ""}, "needs MASTER_ADDR, of host 0"),
        ({"MASTER_PORT": ""}, "needs MASTER_PORT, of host 0"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' in the environment"),
    ],
)
def test_a_wrong_place_among_hosts_is_refused(
    wrong: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = {"NNODES": 3, "NODE_RANK": 2, "MASTER_ADDR": "first", "MASTER_PORT": 29500}
    place(monkeypatch, **{**right, **wrong})
    with pytest.raises(Refused, match=says):
        Hosts.here()
