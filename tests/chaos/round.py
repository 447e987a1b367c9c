"""A round: processes work on one store while faults happen to them, then the store is checked."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from chaos import checks
from chaos.checks import Digests, Findings
from chaos.damage import Damage, damage, restore
from chaos.faults import Fault, schedule
from chaos.proxy import Proxy
from chaos.toy_flow import ToyRecipe
from chaos.worker import Command, Given, work

from artifacts.gc import RUNS
from artifacts.store import Store

#: Seconds in which each command must end.
BOUND = 240.0
#: Commands of one process, at the most.
COMMANDS = 400
#: Seconds between a command that was refused and the next.
REST = 0.3
WHAT = {"run": 12, "gc": 3, "generate": 2, "promote": 1, "rollback": 1, "verify": 1}
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["chaos.worker"])


@dataclass
class StoreLocation:
    """A store under test, and what is known of it from one round to the next.

    Attributes:
        server: URL of its server; None for a local folder.
        variable: the environment variable that names the server to the store's client.
    """

    kind: str
    url: str
    server: str | None = None
    variable: str = ""
    history: list[Any] = field(default_factory=list)
    runs: dict[str, Digests] = field(default_factory=dict)  # ended and still needed
    harmed: set[str] = field(default_factory=set)  # folders of models of which a file was damaged


class Worker:
    """One process at a time, the next after a kill, and the faults that happen to them."""

    def __init__(self, given: Given, faults: list[Fault], place: StoreLocation) -> None:
        self._given, self.faults, self._place = given, faults, place
        self.store = Store(place.url)
        self.fired: list[Fault] = []
        self.damaged: list[Damage] = []
        self.command: Command | None = None
        self.outcome: tuple[str, Any] | None = None
        self.jump = processes.RawValue("d", 0.0)
        self._happening, self._ended = threading.Lock(), False
        self._proxy = None
        if place.server is not None:
            self._proxy = Proxy(place.server, self.happen)
            self._proxy.faults = list(faults)
            environment = {**given.environment, place.variable: self._proxy.url}
            self._given = replace(given, environment=environment)
        self._rested: tuple[float, Command] | None = None
        self._start()

    def _start(self) -> None:
        self.jump.value = 0.0
        self.pipe, theirs = processes.Pipe()
        given = self._given
        if self._proxy is None:
            given = replace(given, faults=self.faults[len(self.fired) :])
        self.process = processes.Process(target=work, args=(given, theirs, self.jump), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, command: Command | None) -> None:
        """Let the process do the next command."""
        self.command, self.since, self._rested = command, time.monotonic(), None
        with suppress(OSError):  # it was killed: `listen` starts another
            self.pipe.send(command)

    def rest(self, command: Command) -> None:
        """Let the process do a command after REST seconds."""
        self._rested = time.monotonic() + REST, command

    def go_on(self) -> None:
        """Send the command of `rest` when its time has come."""
        if self._rested is not None and time.monotonic() > self._rested[0]:
            self.send(self._rested[1])

    def listen(self) -> tuple[str, Any] | None:
        """What came of the command, if it has ended; a killed process is replaced."""
        try:
            while self.pipe.poll():
                what, *said = self.pipe.recv()
                if what == "fault":
                    self.happen(*said)
                else:
                    return said[0], said[1]
        except (EOFError, OSError):
            self.process.join()
            self._start()
            self.send(self.command)  # the user runs it again
        return None

    def happen(self, fault: Fault) -> None:
        """Make a fault happen, as far as it happens outside the process."""
        with self._happening:
            if self._ended:
                return
            self.fired.append(fault)
            match fault.kind:
                case "killed" if self._proxy is not None:
                    self._signal(signal.SIGKILL)
                case "paused":
                    if self._proxy is not None:
                        self._signal(signal.SIGSTOP)
                    process = self.process
                    threading.Timer(fault.seconds, _wake, (process,)).start()
                case "clock jumps":
                    self.jump.value = fault.seconds
                case "file truncated" | "file flipped":
                    if (found := damage(self.store, fault)) is not None:
                        self.damaged.append(found)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.process.pid is not None and self.process.is_alive():
                os.kill(self.process.pid, number)

    def end(self, *, hung: bool = False) -> None:
        """End the process, and its proxy."""
        if hung:
            self._signal(signal.SIGUSR1)  # it prints where each thread is
            time.sleep(1)
            self.process.kill()
        else:
            self.send(None)
        self.process.join(10)
        self.process.kill()
        if self._proxy is not None:
            self._proxy.shutdown()
            self._proxy.server_close()
        with self._happening:  # a thread of the proxy may be about to damage a file
            self._ended = True


def _wake(process: Any) -> None:
    with suppress(ProcessLookupError, ValueError):
        if process.is_alive():
            os.kill(process.pid, signal.SIGCONT)


@dataclass
class Outcome:
    """What came of a round."""

    faults: Counter[str] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)  # done and refused
    refusals: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)
    seconds: float = 0.0
    checked_after: float = 0.0  # seconds


class Round:
    """A round on a store.

    Args:
        name: seeds the schedule of faults and the choice of commands.
        reference: runs undisturbed, elsewhere: recipe -> digests.
    """

    def __init__(
        self, place: StoreLocation, name: str, scratch: Path, reference: Reference
    ) -> None:
        self._place, self._name, self._reference = place, name, reference
        environment = {} if place.server is None else {place.variable: place.server}
        self._given = Given(place.url, scratch, environment)
        self._number = int(name.split()[-1])
        self._recipes: dict[ToyRecipe, None] = {}
        self._mine: dict[int, list[str]] = {}
        self._issued = 0
        self._results: list[tuple[ToyRecipe, Digests]] = []
        self._outcome = Outcome()

    def run(self, slots: int, count: int) -> Outcome:
        """Let `count` faults happen to `slots` processes, then check the store."""
        began, place, store = time.monotonic(), self._place, Store(self._place.url)
        faults = schedule(place.kind, slots, count, Random(self._name))
        root = None if place.server else place.url
        place.runs.clear()  # those of earlier rounds are no longer needed
        for path in store.fs.glob(f"{store.root}/{RUNS}/*.json"):
            store.fs.rm_file(path)
        workers = [Worker(replace(self._given, root=root), dealt, place) for dealt in faults]
        self._work(workers)
        self._outcome.checked_after = time.monotonic() - began
        for worker in workers:
            self._outcome.faults.update(fault.kind for fault in worker.fired)
        if not self._outcome.findings.hangs:
            damaged = [found for worker in workers for found in worker.damaged]
            self._check(sorted(damaged, key=lambda one: one.when))
        self._outcome.seconds = time.monotonic() - began
        return self._outcome

    def _work(self, workers: list[Worker]) -> None:
        busy = dict(enumerate(workers))
        commands = {slot: self._commands(slot) for slot in busy}
        for slot, worker in busy.items():
            worker.send(next(commands[slot]))
        while busy:
            multiprocessing.connection.wait([one.pipe for one in busy.values()], 0.2)
            for slot, worker in list(busy.items()):
                worker.go_on()
                ended = worker.listen()
                if ended is not None:
                    self._note(worker.command, *ended)
                    after = next(commands[slot], None)
                    if len(worker.fired) == len(worker.faults) or after is None:
                        worker.end()
                        del busy[slot]
                    elif ended[0] == "refused":  # a user waits, then runs a command again
                        worker.rest(after)
                    else:
                        worker.send(after)
                elif time.monotonic() - worker.since > BOUND:
                    self._outcome.findings.hangs.append(f"{self._name}: {worker.command}")
                    worker.end(hung=True)
                    del busy[slot]

    def _commands(self, slot: int) -> Iterator[Command]:
        mine = self._mine[slot] = []
        for number in range(COMMANDS):
            chance = Random(f"{self._name} {slot} {number}")
            (what,) = chance.choices(list(WHAT), list(WHAT.values()))
            toy = ToyRecipe(0, chance.randrange(2), chance.randrange(2))  # it may be garbage by now
            if chance.random() < 0.6:  # all processes build the same new recipe
                new = self._issued // (2 * len(self._mine))
                toy = ToyRecipe(100 * self._number + 10 + new // 4, new // 2 % 2, new % 2)
            self._issued += what == "run"
            run = f"{self._name.replace(' ', '-')}-{slot}-{number}"
            forget: tuple[str, ...] = ()
            if what == "run":
                mine.append(run)
                self._recipes[toy] = None
            elif what == "gc":
                forget, mine[:-1] = tuple(mine[:-1]), []
                for one in forget:
                    self._place.runs.pop(one, None)
            yield Command(what, run, toy, chance.random(), forget)

    def _note(self, command: Command | None, outcome: str, said: Any) -> None:
        assert command is not None
        self._outcome.commands[outcome] += 1
        if outcome == "refused":
            reason = re.sub(r"/\S*|[0-9a-f]{8,}", "…", said)
            self._outcome.refusals[f"{command.what}: {reason}"] += 1
        if outcome == "wrong":
            self._outcome.findings.wrong.append(f"{self._name}: {command}: {said}")
        elif outcome == "done" and command.what == "run":
            self._place.runs[command.run_id] = said
            self._results.append((command.toy, said))

    def _check(self, damaged: list[Damage]) -> None:
        """Check the store, and mend it. `damaged` is in the order of time."""
        found, store = self._outcome.findings, Store(self._place.url)
        paths = {one.path for one in damaged}
        for toy, got in self._results:
            checks.check_equal(got, self._reference.of(toy), found)
        checks.check_files(store, paths, found)
        checks.check_wanted(store, self._place.runs, paths, self._reference.store, found)
        for one in reversed(damaged):  # a file can be damaged twice
            if not one.path.removeprefix(f"{store.root}/").startswith(checks.STAGES):
                restore(store, one)
        with Undisturbed(self._given) as mending:  # what is damaged is built again
            for toy in self._recipes:
                outcome, said = mending.do(Command("run", f"{self._name}-mended", toy, 0.0))
                if outcome != "done":
                    found.wrong.append(f"{self._name}: afterwards {toy}: {said}")
                else:
                    checks.check_equal(said, self._reference.of(toy), found)
            for one in reversed(damaged):
                restore(store, one)
            outcome, said = mending.do(Command("gc", "", ToyRecipe(0, 0, 0), 0.0))
            if outcome != "done":
                found.wrong.append(f"{self._name}: afterwards gc: {said}")
        checks.check_files(store, (), found)
        # The champion is another by now: what is published now has another key.
        gone = [path for path in paths if path.startswith(f"{store.root}/publish/")]
        checks.check_wanted(store, self._place.runs, gone, self._reference.store, found)
        place = self._place
        registry = f"{store.root}/registry/"
        inside = [path.removeprefix(registry) for path in paths if path.startswith(registry)]
        place.harmed |= {path.split("/")[1] for path in inside}
        place.history = checks.check_registry(store, place.history, place.harmed, found)


class Undisturbed:
    """A process to which nothing happens."""

    def __init__(self, given: Given) -> None:
        self._given, self.url = given, given.url

    def __enter__(self) -> Undisturbed:
        self._pipe, theirs = processes.Pipe()
        arguments = self._given, theirs, processes.RawValue("d", 0.0)
        self._process = processes.Process(target=work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()

    def do(self, command: Command) -> tuple[str, Any]:
        """What comes of a command, within BOUND."""
        self._pipe.send(command)
        if not self._pipe.poll(BOUND):
            return "hang", f"no answer in {BOUND} s"
        _, outcome, said = self._pipe.recv()
        return outcome, said


class Reference:
    """What each recipe gives in a store of its own, undisturbed."""

    def __init__(self, undisturbed: Undisturbed) -> None:
        self._undisturbed, self._known = undisturbed, dict[ToyRecipe, Digests]()
        self.store = Store(undisturbed.url)

    def of(self, toy: ToyRecipe) -> Digests:
        """Digests by stage."""
        if toy not in self._known:
            outcome, said = self._undisturbed.do(Command("run", "reference", toy, 0.0))
            assert outcome == "done", said
            self._known[toy] = said
        return self._known[toy]
