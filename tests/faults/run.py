"""Plant one fault after another in a copy of the tree: the tests named beside it must fail.

    python tests/faults/run.py                    all of faults.yaml
    python tests/faults/run.py --only gate lock   those whose sentence or file has one of the words
    python tests/faults/run.py --shard 3/8        every eighth, from the fourth on
    python tests/faults/run.py --changed          those that the last change concerns, and an
                                                  eighth of the others, by the commit's digest

The tests first run without a fault, and must pass. Then each fault has a process of its own, forked
from one that has imported what takes long: PyTorch, diffusers, transformers, Beam, Prefect.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from planted import ROOT, Fault, NotThere, faults_of_change, read_faults

#: What takes long to import, and is none of ours.
SLOW_TO_IMPORT = (
    "pytest",
    "xdist.plugin",
    "numpy",
    "pyarrow.parquet",
    "PIL.Image",
    "scipy.ndimage",
    "scipy.stats",
    "pandas",
    "matplotlib.figure",
    "aiohttp",
    "duckdb",
    "hypothesis",
    "apache_beam",
    "prefect.flows",
    "moto.server",
    "gcsfs",
    "s3fs",
    "torch",
    "peft",
    "transformers.models.clip.modeling_clip",
    "transformers.models.t5.modeling_t5",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
)
OURS = ("artifacts", "configs", "demo", "flows", "runtimes", "tasks", "bench")
#: Seconds that the tests of a fault, or of a file without one, may take.
MOST_SECONDS = 240.0
#: And for their process to end after them.
END_SECONDS = 10.0
FORK = multiprocessing.get_context("forkserver")


@dataclass
class Outcome:
    """How a run of tests ended."""

    code: int | None  # pytest's exit code; None where it did not get to the end
    tests: dict[str, str] = field(default_factory=dict)  # id -> passed, failed or skipped
    words: str = ""  # on the first that failed
    seconds: float = 0.0  # of processor time

    def of(self, wanted: str) -> list[str]:
        """Outcomes of a test, or with all its parameters."""
        names = {test: {test, test.partition("[")[0]} for test in self.tests}
        return [outcome for test, outcome in self.tests.items() if wanted in names[test]]


class _Recorder:
    """A pytest plugin that keeps the outcome of each test."""

    def __init__(self) -> None:
        self.tests: dict[str, str] = {}
        self.words = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed" or report.when == "call":
            self.tests[report.nodeid] = report.outcome
        if report.failed and not self.words:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.words = str(crash.message if crash else report.longrepr).partition("\n")[0]


def run_tests(copy: Path, arguments: Sequence[str], log: str, answer: Connection) -> None:
    """In a forked process: run tests of the copy."""
    import pytest

    os.setsid()
    with open(log, "w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    faulthandler.dump_traceback_later(MOST_SECONDS, exit=True, file=os.dup(2))  # 2 is pytest's
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    here = {"", str(ROOT), str(Path(__file__).parent)}
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in here)]
    recorder = _Recorder()
    gc.freeze()  # what was imported before the fork is there to stay
    settings = ["-q", "-p", "no:cacheprovider", f"--basetemp={copy.parent / 'tests'}"]
    settings += ["-p", "xdist.plugin"]  # whose marker the tests have; others cost time alone
    code = int(pytest.main([*settings, *arguments], plugins=[recorder]))
    faulthandler.cancel_dump_traceback_later()
    for name in OURS:
        place = getattr(sys.modules.get(name), "__file__", None)
        assert place is None or Path(place).is_relative_to(copy), f"{name} is not of the copy"
    answer.send((code, recorder.tests, recorder.words, sum(os.times()[:4])))


class Copy:
    """A copy of the tree in which faults are planted, one at a time."""

    def __init__(self, folder: Path) -> None:
        self.root, self._log, self._planted = folder / "tree", folder / "log", 0
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, self.root / name)

    def run(self, arguments: Sequence[str]) -> Outcome:
        """Run pytest on the copy as it is, and a second time if its process hung or died."""
        outcome = self._run(arguments)
        if outcome.code is None:  # nothing is known of the tests, be it by the fork or the fault
            print(f"{' '.join(arguments)}: {outcome.words}; trying again", file=sys.stderr)
            print(self.last_words(80), file=sys.stderr, flush=True)  # with each thread's stack
            outcome = self._run(arguments)
        return outcome

    def _run(self, arguments: Sequence[str]) -> Outcome:
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(
            target=run_tests, args=(self.root, arguments, str(self._log), theirs)
        )
        process.start()
        theirs.close()
        outcome = Outcome(None, words=f"no end within {MOST_SECONDS:g} s")
        with suppress(EOFError):
            if ours.poll(MOST_SECONDS + END_SECONDS):
                outcome.words = f"the process died, or did not end within {MOST_SECONDS:g} s"
                outcome = Outcome(*ours.recv())
                process.join(END_SECONDS)
        ours.close()
        with suppress(ProcessLookupError):  # with what the tests have left running
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
        return outcome

    def run_with(self, fault: Fault) -> Outcome:
        """Run a fault's tests with the fault planted."""
        path = self.root / fault.file
        whole, at = path.read_text(encoding="utf-8"), int(path.stat().st_mtime)
        self._planted += 1
        # Bytecode is of a time stamp in seconds, so no two texts of a file may have the same.
        _write(path, fault.planted(whole), at + self._planted)
        try:
            return self.run(["-x", *fault.caught_by])
        finally:
            _write(path, whole, at)

    def last_words(self, lines: int = 15) -> str:
        """The end of the last run's log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


def _write(path: Path, text: str, seconds: int) -> None:
    path.write_text(text, encoding="utf-8")
    os.utime(path, (seconds, seconds))


class Copies:
    """As many copies as there are processes."""

    def __init__(self, folder: Path, count: int) -> None:
        self._free: queue.Queue[Copy] = queue.Queue()
        for number in range(count):
            place = folder / str(number)
            place.mkdir()
            self._free.put(Copy(place))

    @contextmanager
    def one(self) -> Iterator[Copy]:
        """One that nobody else is at."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)


def passing(copies: Copies, pool: ThreadPoolExecutor, faults: Iterable[Fault]) -> Outcome:
    """The outcomes without any fault of all tests that they name."""
    by_file: dict[str, list[str]] = {}
    for test in dict.fromkeys(test for fault in faults for test in fault.caught_by):
        by_file.setdefault(test.partition("::")[0], []).append(test)

    def run(tests: Sequence[str]) -> Outcome:
        with copies.one() as copy:
            outcome = copy.run(tests)
            if outcome.code != 0:  # a test with a time limit may fail once on a busy machine
                print(copy.last_words(), file=sys.stderr)
                outcome = copy.run(tests)
            return outcome

    found: dict[str, str] = {}
    for outcome in pool.map(run, by_file.values()):
        found |= outcome.tests
    return Outcome(0, found)


def judge(fault: Fault, without: Outcome, copies: Copies) -> tuple[bool, Outcome]:
    """Whether a fault is caught: its tests pass without it, and one fails with it."""
    for test in fault.caught_by:
        if set(without.of(test)) != {"passed"}:
            return False, Outcome(None, words=f"{test} does not pass without the fault")
    with copies.one() as copy:
        try:
            outcome = copy.run_with(fault)
        except NotThere as error:
            return False, Outcome(None, words=str(error))
        caught = outcome.code == 1 and "failed" in outcome.tests.values()
        if not caught and outcome.code != 0:
            print(copy.last_words(), file=sys.stderr)
    return caught, outcome


def _line(fault: Fault, caught: bool, outcome: Outcome) -> str:
    failed = [test for test, how in outcome.tests.items() if how == "failed"]
    by = failed[0].partition("tests/")[2] if failed else outcome.words or "no test fails"
    words = f"{'caught' if caught else 'MISSED'} {outcome.seconds:6.1f} s  {fault.file}: "
    return f"{words}{fault.fault}\n{'':17}by {by}" + (f": {outcome.words[:70]}" if failed else "")


def _chosen(only: Sequence[str], shard: str | None, changed: bool) -> list[Fault]:
    faults = read_faults()
    if changed:
        faults = faults_of_change(faults)
    if only:
        faults = [f for f in faults if any(word in f"{f.file} {f.fault}" for word in only)]
    if shard is not None:
        number, _, count = shard.partition("/")
        faults = faults[int(number) % int(count) :: int(count)]
    return faults


def main() -> int:
    """Print a line for each fault and how many were caught; 1 if one was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument(
        "--shard",
        metavar="NUMBER/COUNT",
        help="a part of them; NUMBER counts from 0, and round again from COUNT on",
    )
    parser.add_argument(
        "--changed", action="store_true", help="those that the last change concerns, and an eighth"
    )
    # More than cores, because many tests wait for servers and child processes.
    parser.add_argument("--processes", type=int, default=min(4, 1 + (os.cpu_count() or 1)))
    given = parser.parse_args()
    faults = _chosen(given.only, given.shard, given.changed)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # reading bytecode is faster than compiling
    os.environ |= {"OMP_NUM_THREADS": "1"}
    os.environ |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TRANSFORMERS_VERBOSITY": "error"}
    FORK.set_forkserver_preload(list(SLOW_TO_IMPORT))
    missed: list[str] = []
    seconds = 0.0
    with (
        tempfile.TemporaryDirectory(prefix="kiln-faults-") as folder,
        ThreadPoolExecutor(given.processes) as pool,
    ):
        copies = Copies(Path(folder), given.processes)
        without = passing(copies, pool, faults)
        print(f"{len(without.tests)} tests without a fault", flush=True)
        running = {pool.submit(judge, fault, without, copies): fault for fault in faults}
        try:
            for done in as_completed(running):
                caught, outcome = done.result()
                line = _line(running[done], caught, outcome)
                seconds += outcome.seconds
                missed += [] if caught else [line]
                print(line, flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    print(*missed, sep="\n", end="\n" if missed else "")  # again, beside how many there are
    counts = f"{len(faults) - len(missed)} caught, {len(missed)} missed"
    print(f"{counts}, in {seconds:.0f} s of processor time")
    return int(bool(missed) or not faults)


if __name__ == "__main__":
    sys.exit(main())
