"""The one retry logic of clusters, with an engine whose agents say what a test lists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from artifacts.lock import LockLost
from artifacts.store import Store
from configs.errors import Away, Refused
from configs.settings.clusters import Cluster
from runtimes.process.job import TrainJob
from tasks.child_process import JobFailed
from tasks.hosts import attempts
from tasks.hosts.engine import Agents

#: What a host says once each second.
Said = list[Any] | BaseException
DONE = {"event": "exit", "code": 0}
RESULT = {"event": "result", "files": []}


@dataclass
class ListedEngine:
    """Each attempt is a list of seconds, each of which has the lines of all hosts."""

    seconds: list[list[Said]]
    why: str | None = None
    queue: float = 0.0  # seconds that a start waits
    away: tuple[str, ...] = ()  # calls that the cluster does not answer
    name: str = "listed"
    calls: list[str] = field(default_factory=list)
    _now: Iterator[Said] = field(default_factory=lambda: iter(()))
    clock: float = 0.0
    jobs: list[str] = field(default_factory=list)

    def reserve(self) -> bool:
        self.calls.append("reserve")
        return True

    def start(self, agents: Agents) -> None:
        self.jobs.append(json.loads(Path(agents.job).read_text())["work"])
        self._now = iter(self.seconds.pop(0))
        self.clock += self.queue

    def read(self, seconds: float) -> list[str] | None:
        said = next(self._now, None)
        self.clock += 1.0
        if isinstance(said, BaseException):
            raise said
        return None if said is None else [json.dumps(line) for line in said]

    def stop(self) -> None:
        self._call("stop")

    def kill(self) -> None:
        self._call("kill")

    def lost(self) -> str | None:
        return self.why

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.away:
            raise Away("no answer")

    def end(self) -> None:
        self._call("end")


def of(host: int, *events: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"host": host, **event} for event in events]


def both(*events: dict[str, Any]) -> list[dict[str, Any]]:
    return of(0, *events) + of(1, *events)


NAMED = [*of(0, {"event": "host", "name": "n1"}), *of(1, {"event": "host", "name": "n2"})]
ENDED = [*of(0, RESULT, DONE), *of(1, DONE)]
ALIVE = {"event": "alive"}


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tmp_path / "model"
    model.mkdir()
    (model / "model_index.json").write_text("{}")

    def run(
        engine: ListedEngine, restarts: int = 3, events: list[Any] | None = None, grace: float = 5.0
    ) -> Any:
        monkeypatch.setattr(attempts.time, "monotonic", lambda: engine.clock)
        work = tmp_path / "work"
        job = TrainJob("torch", str(model), "latents", {}, str(work), str(work))
        return attempts.run_on_hosts(
            engine,
            job,
            (events if events is not None else []).append,
            agents=Agents(2, "", grace, "python"),
            store=Store(str(tmp_path / "store")),
            cluster=Cluster(restarts=restarts, silence_seconds=60),
        )

    return run


def test_the_result_is_that_of_the_first_host(train) -> None:
    engine = ListedEngine([[NAMED, of(0, {"event": "progress", "step": 1}), both(ALIVE), ENDED]])
    events: list[Any] = []
    assert train(engine, events=events) == RESULT
    assert [event["event"] for event in events] == ["progress", "result"]
    assert engine.calls == ["reserve", "end"]


def test_the_hosts_that_train_are_told(train, caplog) -> None:
    caplog.set_level("INFO", "kiln")
    train(ListedEngine([[NAMED, ENDED]]))
    assert caplog.text.count("listed: started on host 0 (n1), 1 (n2)") == 1


def test_an_error_of_the_job_names_its_host_and_is_not_repeated(train) -> None:
    said = {"event": "line", "text": "ValueError: shape of conv_in"}
    failing = [NAMED, of(1, said, {"event": "exit", "code": 1}), *[of(0, ALIVE)] * 30]
    engine = ListedEngine([failing])
    with pytest.raises(
        JobFailed, match=r"host 1 \(n2\): .*exited with 1: ValueError: shape of conv"
    ):
        train(engine)
    assert engine.calls == ["reserve", "kill", "end"]
    assert engine.clock < 20  # a survivor in a collective is not waited for


def test_wrong_input_is_refused_with_the_words_of_the_rank(train) -> None:
    error = {"event": "error", "message": "train.x: too large", "wrong_input": True, "time": 1.0}
    engine = ListedEngine([[both(error, {"event": "exit", "code": 2})]])
    with pytest.raises(Refused, match=r"^train.x: too large$"):
        train(engine)


def test_the_root_cause_is_the_earliest_error(train) -> None:
    first = {"event": "error", "message": "disk of n2 is broken", "time": 5.0}
    later = {"event": "error", "message": "connection closed by peer", "time": 5.2}
    ended = {"event": "exit", "code": 1}
    engine = ListedEngine([[NAMED, [*of(0, later, ended), *of(1, first, ended)]]])
    with pytest.raises(JobFailed, match=r"host 1 \(n2\).*disk of n2"):
        train(engine)


def test_a_lost_host_is_known_soon_after_its_peer_fails(train, caplog) -> None:
    lost = {"event": "error", "message": "connection closed by peer", "time": 5.2}
    engine = ListedEngine(
        [[NAMED, of(0, lost, {"event": "exit", "code": 1}), *[[]] * 30], [NAMED, ENDED]]
    )
    assert train(engine) == RESULT
    assert "nothing is heard of host 1 (n2)" in caplog.text
    assert engine.clock < 12
    assert engine.calls == ["reserve", "kill", "reserve", "end"]


def test_a_frozen_host_is_lost_after_the_silence(train, caplog) -> None:
    engine = ListedEngine([[NAMED, *[of(0, ALIVE)] * 100], [NAMED, ENDED]])
    assert train(engine) == RESULT
    assert "nothing is heard of host 1 (n2)" in caplog.text
    assert 60 < engine.clock < 66


def test_a_start_may_wait_for_hours_in_a_queue(train) -> None:
    assert train(ListedEngine([[[], NAMED, ENDED]], queue=7200.0)) == RESULT


def test_hosts_that_are_stopped_after_an_error_hide_it_not(train) -> None:
    error = {"event": "error", "message": "disk of n2 is broken", "time": 5.0}
    failing = of(1, error, {"event": "exit", "code": 1})
    engine = ListedEngine([[NAMED, failing, of(0, {"event": "exit", "code": 143})]])
    with pytest.raises(JobFailed, match=r"host 1 \(n2\).*disk of n2"):
        train(engine)


def test_an_error_before_another_host_speaks_is_no_loss(train) -> None:
    error = {"event": "error", "message": "no module torch", "time": 5.0}
    engine = ListedEngine([[of(0, error, {"event": "exit", "code": 1}), *[[]] * 30]])
    with pytest.raises(JobFailed, match="no module torch"):
        train(engine)


def test_the_first_host_has_the_grace_for_the_checkpoint_of_a_stop(train) -> None:
    stopped = of(1, {"event": "exit", "code": 143})
    writes = [*[of(0, ALIVE)] * 100, of(0, {"event": "exit", "code": 143})]
    engine = ListedEngine([[NAMED, stopped, *writes], [NAMED, ENDED]])
    assert train(engine, grace=120.0) == RESULT
    assert engine.clock > 100


def test_hosts_that_never_end_do_not_keep_the_result(train) -> None:
    engine = ListedEngine([[NAMED, of(0, RESULT, DONE), *[of(1, ALIVE)] * 100]])
    assert train(engine) == RESULT
    assert engine.calls == ["reserve", "kill", "end"]


def test_json_that_no_agent_wrote_is_noise(train) -> None:
    engine = ListedEngine([[[8, "module loaded", *NAMED], ENDED]])
    assert train(engine) == RESULT


def test_a_cluster_that_is_away_hides_neither_result_nor_interruption(train) -> None:
    assert train(ListedEngine([[NAMED, ENDED]], away=("end",))) == RESULT
    engine = ListedEngine([[NAMED, KeyboardInterrupt()]], away=("stop", "kill", "end"))
    with pytest.raises(KeyboardInterrupt):
        train(engine)


def test_an_event_that_takes_long_to_display_loses_no_host(train) -> None:
    drawn = of(0, {"event": "sample", "step": 3})
    engine = ListedEngine([[NAMED, drawn, both(ALIVE), ENDED]])

    class Slow(list[Any]):
        def append(self, event: Any) -> None:
            engine.clock += 100

    assert train(engine, events=Slow()) == RESULT
    assert engine.calls == ["reserve", "end"]


def test_ranks_that_were_stopped_go_on_in_the_next_attempt(train, caplog) -> None:
    engine = ListedEngine([[NAMED, both({"event": "exit", "code": 143})], [NAMED, ENDED]])
    assert train(engine) == RESULT
    assert "host 0 (n1), 1 (n2) was stopped" in caplog.text


def test_agents_that_vanish_are_lost_hosts(train) -> None:
    engine = ListedEngine([[NAMED, both(ALIVE)], [NAMED, ENDED]])
    assert train(engine) == RESULT


def test_restarts_are_counted_from_the_last_new_checkpoint(train) -> None:
    def until(step: int) -> list[Said]:
        return [NAMED, of(0, {"event": "checkpoint", "step": step}), both(ALIVE)]

    engine = ListedEngine([until(n) for n in (1, 2, 3, 4, 4, 4)], why="n2 is down")
    with pytest.raises(Away, match=r"listed: n2 is down, in 2 attempts without a new checkpoint"):
        train(engine, restarts=1)
    assert engine.calls.count("reserve") == 6


def test_an_interruption_stops_all_hosts_with_a_checkpoint(train) -> None:
    engine = ListedEngine(
        [[NAMED, both(ALIVE), KeyboardInterrupt(), both({"event": "exit", "code": 143})]]
    )
    with pytest.raises(KeyboardInterrupt):
        train(engine)
    assert engine.calls == ["reserve", "stop", "kill", "end"]


def test_a_stop_kills_what_does_not_end_within_the_grace(train) -> None:
    engine = ListedEngine([[NAMED, KeyboardInterrupt(), *[both(ALIVE)] * 100]])
    with pytest.raises(KeyboardInterrupt):
        train(engine)
    assert engine.calls == ["reserve", "stop", "kill", "end"]
    assert engine.clock < 20


def test_a_lost_lock_kills_at_once(train) -> None:
    engine = ListedEngine([[NAMED, LockLost("lost"), *[both(ALIVE)] * 100]])
    with pytest.raises(LockLost):
        train(engine)
    assert engine.calls == ["reserve", "kill", "end"]


def test_the_job_file_is_deleted_after_the_attempt(train, tmp_path: Path) -> None:
    train(ListedEngine([[NAMED, ENDED]]))
    assert list((tmp_path / "work/jobs").iterdir()) == []


def apart(engine: ListedEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **job: Any) -> Any:
    """Run a job whose two hosts go on without each other."""
    monkeypatch.setattr(attempts.time, "monotonic", lambda: engine.clock)
    given = {"together": False, "kept": "shard", "count": lambda: 0} | job
    return attempts.run_hosts_job(
        engine,
        attempts.HostsJob(str(tmp_path), {"work": ""}, **given),
        lambda event: None,
        agents=Agents(2, "", 5.0, "python"),
        cluster=Cluster(restarts=1, silence_seconds=60),
    )


def test_a_host_apart_goes_on_without_a_lost_one(monkeypatch, tmp_path: Path, caplog) -> None:
    """It works for longer than the silence; what the lost one left is made next."""
    alone = [NAMED, *[of(0, ALIVE)] * 200, of(0, RESULT, DONE), *[[]] * 5]
    engine = ListedEngine([alone, [NAMED, ENDED]])
    assert apart(engine, monkeypatch, tmp_path) == RESULT
    assert engine.clock > 200
    assert "nothing is heard of host 1 (n2); the next attempt makes what is" in caplog.text


def test_one_host_that_has_waited_for_all_ends_the_job(monkeypatch, tmp_path: Path) -> None:
    alone = [NAMED, *[of(0, ALIVE)] * 3, of(0, RESULT, DONE), *[[]] * 100]
    engine = ListedEngine([alone])
    assert apart(engine, monkeypatch, tmp_path, any_ends=True) == {"event": "result"}
    assert engine.clock < 20
    assert engine.calls == ["reserve", "kill", "end"]  # the lost one


def test_a_host_apart_that_is_taken_away_stops_no_other(monkeypatch, tmp_path: Path) -> None:
    taken = [NAMED, of(1, {"event": "exit", "code": 143}), *[of(0, ALIVE)] * 200, of(0, DONE)]
    engine = ListedEngine([taken])
    assert apart(engine, monkeypatch, tmp_path, any_ends=True) == {"event": "result"}


def test_an_error_of_a_host_apart_ends_the_job(monkeypatch, tmp_path: Path) -> None:
    error = {"event": "error", "message": "encode.device: no such device", "wrong_input": True}
    engine = ListedEngine(
        [[NAMED, of(1, error, {"event": "exit", "code": 2}), *[of(0, ALIVE)] * 99]]
    )
    with pytest.raises(Refused, match="no such device"):
        apart(engine, monkeypatch, tmp_path, any_ends=True)
    assert engine.clock < 20


def test_restarts_are_counted_from_the_last_new_shard(monkeypatch, tmp_path: Path) -> None:
    counts = iter([0, 1, 2, 2, 2])
    engine = ListedEngine([[NAMED]] * 4, why="n2 is down")
    with pytest.raises(Away, match=r"n2 is down, in 2 attempts without a new shard"):
        apart(engine, monkeypatch, tmp_path, count=lambda: next(counts))
    assert engine.calls.count("reserve") == 4
