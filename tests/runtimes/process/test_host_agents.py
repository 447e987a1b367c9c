"""Two agents on this machine train as two hosts: alike, stopped, resumed, killed and frozen."""

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
from host_agents import Agent, start_agents
from jobs import MakeJob, outputs
from safetensors.numpy import load_file

from runtimes.process.job import Events, TrainJob
from runtimes.process.launcher import Stop
from runtimes.registry import interpreter
from runtimes.train.checkpoints import Checkpoints
from runtimes.train.training_loop import train

pytestmark = pytest.mark.slow
StartJob = Callable[..., Any]  # of ../conftest.py: a Child
Start = Callable[..., list[Agent]]
SETTINGS: dict[str, Any] = {
    "global_batch_size": 8,
    "logging_steps": 1,
    "ema_decay": 0.9,
    # Adam divides by the root of a squared gradient: where that is rounding, so would be the step.
    "adam_epsilon": 1e-3,
}
#: It ends only when it is stopped.
ENDLESS: dict[str, Any] = {**SETTINGS, "steps": 50_000, "checkpointing_steps": 50_000}
#: Seconds in which a survivor must end, on a busy machine.
SOON = 60.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the agents of a job; no process of theirs is left behind."""
    agents: list[Agent] = []

    def agents_of(job: TrainJob, *options: str, **more: Any) -> list[Agent]:
        started = start_agents(job, tmp_path, *options, **more)
        agents.extend(started)
        return started

    yield agents_of
    for agent in agents:
        agent.close()


def assert_end_well(agents: list[Agent]) -> None:
    for agent in agents:
        assert agent.end() == 0, [line for line in agent.lines if line["event"] != "alive"][-20:]
        assert agent.lines[0]["event"] == "host" and agent.lines[-1]["event"] == "exit"


@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    [
        "mindspore",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("torch", "jax", "hpu-lazy", "npu")
        ),
    ],
)
def test_two_hosts_end_with_the_bytes_of_one_with_two_processes(
    name: str, make_job: MakeJob, start: Start, write_latents: Callable[..., str], tmp_path: Path
) -> None:
    chips.require(name)
    variant = chips.VARIANTS[name]
    settings = {**SETTINGS, **chips.MULTI_PROCESS[name], **variant.settings}
    settings |= {"runtime": variant.runtime, "device": variant.device, "steps": 4}
    settings["latents"] = write_latents(tmp_path / "one-shape", [{"train/8x8": 16}])
    python = interpreter(variant.runtime)
    one = make_job("one", **settings)
    two = make_job("two", **{**settings, "processes": 1})
    with chips.standing_in(name), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", chips.FAST_COMPILATION)  # one device per process
        assert_end_well(start(one, hosts=1, python=python))
        assert_end_well(start(two, python=python))
    assert outputs(two) == outputs(one)


def test_stopped_on_two_hosts_it_ends_on_one_with_the_undisturbed_bytes(
    make_job: MakeJob, start: Start, start_job: StartJob
) -> None:
    settings = {**SETTINGS, "steps": 120, "checkpointing_steps": 50}
    whole = make_job("whole", **settings, processes=2)
    assert start_job(whole).end() == 0
    agents = start(make_job("stopped", **settings))
    agents[0].wait_for("progress")
    for agent in agents:
        agent.process.terminate()
    assert [agent.end() for agent in agents] == [143, 143]
    assert agents[1].said("exit") == [{"host": 1, "event": "exit", "code": 143}]
    heard = {line["event"] for line in agents[1].lines}
    assert heard <= {"host", "alive", "line", "exit"}, "host 0 alone tells of the steps"
    resumed = make_job("stopped", **settings, processes=2)
    saved = Checkpoints(resumed.work, 9).latest()
    assert saved is not None and saved.step == agents[0].said("checkpoint")[-1]["step"] < 120
    child = start_job(resumed)
    assert child.step_of_first("start") == saved.step
    assert child.end() == 0
    assert outputs(resumed) == outputs(whole)


@pytest.mark.extended
@pytest.mark.parametrize("fsdp", [2, pytest.param("all", marks=pytest.mark.soak)])
def test_shard_groups_of_two_hosts_end_with_the_bytes_of_one_host(
    make_job: MakeJob, start: Start, start_job: StartJob, fsdp: Any
) -> None:
    """With two processes on each host; `all` gathers weights across hosts.

    The checkpoint of both hosts' files is resumed by one process.
    """
    settings = {**SETTINGS, "steps": 5, "checkpointing_steps": 4}
    whole = make_job("whole", **settings, processes=4, fsdp=fsdp)
    assert start_job(whole).end() == 0
    hosts = make_job("hosts", **settings, processes=2, fsdp=fsdp)
    assert_end_well(start(hosts))
    assert outputs(hosts) == outputs(whole)
    saved = Checkpoints(hosts.work, 9).latest()
    assert saved is not None and saved.step == 4 and saved.facts["processes"] == 4
    shutil.rmtree(hosts.out)
    assert train(make_job("hosts", **settings), Events(), Stop())
    weights = "unet/diffusion_pytorch_model.safetensors"
    expected = load_file(Path(whole.out) / weights)
    for name, array in load_file(Path(hosts.out) / weights).items():
        np.testing.assert_allclose(array, expected[name], atol=5e-6, err_msg=name)


@pytest.mark.extended
def test_the_survivor_of_a_killed_host_ends_by_itself(make_job: MakeJob, start: Start) -> None:
    agents = start(make_job(**ENDLESS))
    agents[0].wait_for("progress")
    agents[1].signal_all(signal.SIGKILL)
    assert agents[0].end(SOON) == 1
    (error,) = agents[0].said("error")
    assert error["host"] == 0 and not error["wrong_input"]


def test_the_survivor_of_a_frozen_host_is_killed_after_the_grace(
    make_job: MakeJob, start: Start
) -> None:
    agents = start(make_job(**ENDLESS), "--grace", "2")
    agents[0].wait_for("progress")
    agents[1].signal_all(signal.SIGSTOP)
    time.sleep(1.0)
    heard = len(agents[1].lines)
    count = len(agents[0].said("alive"))
    time.sleep(3.0)
    assert len(agents[1].lines) == heard, "a frozen machine says nothing"
    assert len(agents[0].said("alive")) >= count + 2
    asked = time.monotonic()
    agents[0].process.terminate()
    assert agents[0].end(SOON) == 128 + signal.SIGKILL
    assert time.monotonic() - asked >= 2.0
    assert agents[0].lines[-1] == {"host": 0, "event": "exit", "code": -signal.SIGKILL}
    assert agents[0].processes() == []


@pytest.mark.extended
def test_a_lost_rank_is_told_with_its_host(make_job: MakeJob, start: Start) -> None:
    """And the ranks of the other host end, too."""
    agents = start(make_job(**ENDLESS, processes=2))
    agents[0].wait_for("progress")
    os.kill(agents[1].rank(3), signal.SIGKILL)
    assert [agent.end(SOON) for agent in agents] == [1, 1]
    (error,) = agents[1].said("error")
    assert error["host"] == 1
    assert error["message"] == "process 3 of the run (from 0) was killed by SIGKILL"


def test_a_wrong_job_is_told_by_every_host(make_job: MakeJob, start: Start) -> None:
    agents = start(replace(make_job(global_batch_size=3), model="/"))
    assert [agent.end() for agent in agents] == [2, 2]
    assert all(agent.said("error")[0]["wrong_input"] for agent in agents)
