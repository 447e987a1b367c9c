"""A process for each accelerator of a machine, its client, and the pool of them.

`python -P -m tasks.devices.processes` is a process that computes shards on one device. Requests
and answers are JSON on a socket: paths of shards, never pixels or latents. So the process may run
in another Python environment, and several processes share no interpreter lock.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, Protocol, Self, cast

from pydantic import TypeAdapter

from artifacts.records import Damaged
from artifacts.store import Store
from configs.errors import Away, Failed, Refused
from runtimes.registry import devices_of, interpreter, needs_subprocess
from tasks.build_or_reuse import storing
from tasks.child_process import ConnectedProcess, ProcessLost

#: Shards that a device process works on: one on the device, others being read and written.
SHARDS_PER_DEVICE = 2
#: Errors that the client raises again.
KNOWN = {kind.__name__: kind for kind in (Refused, Damaged, Away, Failed)}
#: Facts of the committed shards by their keys.
Facts = dict[str, dict[str, Any]]
#: Computes the shards of a request (JSON, with the URL `tar` of an image shard) into the files
#: FOLDER/KEY.SUFFIX, and returns their facts. Thread-safe; raises Refused or Damaged.
Worker = Callable[[dict[str, Any], str], Facts]


class Plan(Protocol):
    """What a device process needs to know before its first shard; a frozen dataclass of JSON."""

    @property
    def stage(self) -> str:
        """Name of the stage, whose setting `processes` counts the processes."""
        ...

    @property
    def runtime(self) -> str:
        """Name of the runtime, in whose environment the processes run."""
        ...

    @property
    def device(self) -> str:
        """A device, or a kind of devices such as `cuda`."""
        ...

    def fetched(self) -> Self:
        """The plan with the models of this machine; remote workers fetch them. Raises Refused."""
        ...

    def on(self, device: str, processes: int) -> Self:
        """The plan of one of several processes of this machine."""
        ...

    def open(self) -> Worker:
        """Load the models in this process. Raises Refused."""
        ...


def written_plan(plan: Plan) -> dict[str, Any]:
    """A plan as JSON: its class's `module` and `name`, and its fields as `plan`."""
    kind = type(plan)
    fields = asdict(plan)  # type: ignore[call-overload]
    return {"module": kind.__module__, "name": kind.__qualname__, "plan": fields}


def read_plan(written: dict[str, Any]) -> Plan:
    """The plan of `written_plan`."""
    kind = getattr(import_module(written["module"]), written["name"])
    return cast(Plan, TypeAdapter(kind).validate_python(written["plan"]))


def devices(plan: Plan, processes: int | None) -> list[str]:
    """The devices of a plan on this machine, see devices_of. Raises Refused."""
    return devices_of(plan.runtime, plan.device, processes, f"{plan.stage}.processes")


def compute(worker: Worker, request: dict[str, Any], folder: str) -> Facts:
    """The worker's facts.

    Raises:
        Damaged: the tar has another sha256.
        Failed: its store refuses requests; Away if that may pass.
    """
    with storing(Store(request["tar"].rpartition("/")[0])):
        return worker(request, folder)


def send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Raises EOFError when the peer has closed the socket."""
    return dict(json.loads(connection.recv_bytes()))


def serve(descriptors: Sequence[int]) -> None:
    """Open the models of the first message (a Plan), then compute shard after shard.

    The process ends when the peer closes a socket, even while it computes.

    Args:
        descriptors: file descriptors of connected sockets, one per shard in progress. The first
            receives the plan.
    """
    connections = [Connection(descriptor) for descriptor in descriptors]
    message = receive(connections[0])
    try:
        worker = read_plan(message).open()
    except Refused as error:
        send(connections[0], _described(error))
        return
    send(connections[0], {})
    with ThreadPoolExecutor(len(connections)) as threads:
        while True:
            for connection in wait(connections):
                assert isinstance(connection, Connection)
                try:
                    request = receive(connection)
                except (EOFError, OSError):
                    os._exit(0)  # nobody wants the shards in progress
                threads.submit(_answer, connection, worker, request)


def _answer(connection: Connection, worker: Worker, request: dict[str, Any]) -> None:
    try:
        answer = {"facts": compute(worker, **request)}
    except Exception as error:  # the client raises it
        answer = _described(error)
    send(connection, answer)


def _described(error: Exception) -> dict[str, Any]:
    known = type(error).__name__
    if known in KNOWN:
        return {"error": known, "message": str(error)}
    traceback.print_exception(error)
    return {"error": None, "message": f"{type(error).__name__}: {error}"}


class DeviceProcess:
    """A process that computes shards on its device.

    The process loads its models while the caller goes on; `wait` returns when it is ready.

    Args:
        plan: models, device and settings.
        module: entry point of the process.

    Attributes:
        slots: workers. One thread may call a slot at a time. They raise Failed if the shard could
            not be computed, and ProcessLost if the process has ended.
    """

    def __init__(self, plan: Plan, *, module: str = __name__) -> None:
        what = f"the {plan.stage} process"
        python = interpreter(plan.runtime)
        self.process = process = ConnectedProcess(
            what, module, python=python, sockets=SHARDS_PER_DEVICE
        )
        self.slots = [partial(_ask, process, n) for n in range(SHARDS_PER_DEVICE)]
        process.send(json.dumps(written_plan(plan)).encode())

    def wait(self) -> None:
        """Return when the models are loaded. Raises Refused or ProcessLost."""
        answer = json.loads(self.process.receive())
        if "error" in answer:
            raise Refused(answer["message"])


def _ask(process: ConnectedProcess, number: int, request: dict[str, Any], folder: str) -> Facts:
    message = {"request": request, "folder": folder}
    answer = json.loads(process.ask(json.dumps(message).encode(), number))
    if "facts" in answer:
        return dict(answer["facts"])
    raise KNOWN.get(answer["error"], Failed)(answer["message"])


class DevicePool:
    """Computes shards on all devices of this machine; thread-safe.

    One device needs no process of its own, unless its runtime has another environment or locks it.
    The processes end with this object: the next stage needs their devices.

    Args:
        plan: models and settings.
        processes: see devices_of.
        start: starts a device process.

    Attributes:
        devices: their number.

    Raises:
        Refused: the model or a device is unusable.
    """

    def __init__(
        self,
        plan: Plan,
        processes: int | None = None,
        start: Callable[..., DeviceProcess] = DeviceProcess,
    ) -> None:
        names = devices(plan, processes)
        self.devices = count = len(names)
        if count == 1 and not needs_subprocess(plan.runtime, plan.device):
            worker = plan.on(names[0], count).open()
            slots = [partial(compute, worker)] * SHARDS_PER_DEVICE
        else:
            processes_of_devices = [start(plan.on(name, count)) for name in names]
            for process in processes_of_devices:
                process.wait()
            of_devices = (process.slots for process in processes_of_devices)
            # First one slot of each device: few shards use all devices.
            slots = [slot for row in zip(*of_devices, strict=True) for slot in row]
        self._free: SimpleQueue[Worker] = SimpleQueue()
        for slot in slots:
            self._free.put(slot)
        self._slots = len(slots)
        self._lock = threading.Lock()

    def compute(self, request: dict[str, Any], folder: str) -> Facts:
        """Compute the shards of a request on a free device, as `compute`.

        Raises:
            Failed: a shard could not be computed.
            ProcessLost: the device's process has ended.
        """
        slot = self._free.get()
        stays = True
        try:
            return slot(request, folder)
        except ProcessLost:
            with self._lock:
                self._slots -= 1
                stays = self._slots <= 0  # the last slot: a thread that waits for it gets its error
            raise
        finally:
            if stays:
                self._free.put(slot)


if __name__ == "__main__":
    serve([int(number) for number in sys.argv[1:]])
