"""One process that works on a store: it does commands from a pipe, and reports what came of each.

An error that `kiln` shows in a line is an outcome like another; any other error is wrong.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import logging
import os
import signal
import threading
import time
import traceback
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import gcsfs.retry
import s3fs  # noqa: F401 (loaded once, before processes are forked)
from chaos import toy_flow
from chaos.faults import DAY, EXPIRY, HEARTBEAT, Fault
from chaos.local_faults import LocalFaults
from fsspec.exceptions import FSTimeoutError

from artifacts import gc, lock
from artifacts.errors import is_of_client
from artifacts.filesystems import Clock, present_time
from artifacts.gc import RUNS
from artifacts.lock import LockLost
from artifacts.records import Damaged
from artifacts.store import Store
from configs.errors import Away, Failed, Refused
from flows.store_commands import collect_garbage, verify_store
from runtimes.pipeline_folder.folder import Base
from tasks import code_version
from tasks.publish.champion_alias import AliasNotWritten
from tasks.publish.registry import Registry

#: Errors after which a user runs the command again, or restores what the message names.
EXPECTED = (
    *(Failed, Away, LockLost, Damaged),
    Refused,
    AliasNotWritten,
    *(OSError, FSTimeoutError),
)


class Jump(Protocol):
    """How far this process' clocks have jumped, in seconds; shared with the driver."""

    value: float


@dataclass(frozen=True)
class Given:
    """What a process starts with.

    Attributes:
        environment: variables, such as where the store's server is.
        root: folder of a local store, whose faults happen in this process.
    """

    url: str
    base: Path
    environment: dict[str, str]
    root: str | None = None
    faults: list[Fault] = field(default_factory=list)


@dataclass(frozen=True)
class Command:
    """What a process does next."""

    what: str  # run | generate | gc | promote | rollback | verify
    run_id: str
    toy: toy_flow.ToyRecipe
    choice: float
    forget: tuple[str, ...] = ()  # runs that are no longer needed


def work(given: Given, pipe: Connection, jump: Jump) -> None:
    """Do what comes over `pipe`, until None comes."""
    os.environ.update(given.environment)
    faulthandler.register(signal.SIGUSR1)
    prepare(jump)
    alone = threading.Lock()

    def say(*words: Any) -> None:
        with alone, suppress(OSError):
            pipe.send(words)

    def jumps(fault: Fault) -> None:
        jump.value = fault.seconds

    if given.root is not None:
        LocalFaults(given.root, given.faults, lambda f: say("fault", f), jumps).install()
    while (command := pipe.recv()) is not None:
        try:
            say("ended", "done", perform(given, command))
        except Exception as error:
            if isinstance(error, EXPECTED) or is_of_client(error):
                say("ended", "refused", f"{type(error).__name__}: {error}"[:300])
            else:
                say("ended", "wrong", traceback.format_exc())


def prepare(jump: Jump) -> None:
    """Shorten waits, let clocks jump, and leave out models."""
    logging.disable()
    lock.EXPIRY_SECONDS, lock.HEARTBEAT_SECONDS = EXPIRY, HEARTBEAT
    lock.REAL = Clock(now=lambda: time.monotonic() + jump.value)
    hold = lock.hold.__wrapped__  # type: ignore[attr-defined]
    hold.__kwdefaults__.update(expiry=EXPIRY, heartbeat=HEARTBEAT, clock=lock.REAL)

    def present(fs: Any, folder: str) -> float:
        days = (jump.value > 0) - (jump.value < 0)
        return present_time(fs, folder) + 1.1 * DAY * days

    gc.filesystems.present_time = present  # type: ignore[attr-defined]
    quick = SimpleNamespace(sleep=lambda seconds: asyncio.sleep(seconds / 20))
    gcsfs.retry.asyncio = quick  # which waits up to 32 seconds between attempts
    code_version.git_commit = lambda: None
    code_version.package_versions = lambda *_: {}
    toy_flow.without_models()


def perform(given: Given, command: Command) -> Any:
    """Do one command."""
    registry = Registry(f"{given.url}/registry", toy_flow.NAME)
    match command.what:
        case "run":
            results = toy_flow.run(given.url, command.toy, command.run_id, Base.open(given.base))
            return {name: (one.key, one.digest) for name, one in results.items()}
        case "generate":
            toy_flow.generate(given.url, command.toy.seed, command.run_id)
        case "gc":
            store = Store(given.url)
            for run in command.forget:
                with suppress(FileNotFoundError):
                    store.fs.rm_file(f"{store.root}/{RUNS}/{run}.json")
            with redirect_stdout(io.StringIO()):
                collect_garbage(given.url, days=30, hours=0, delete=True)
        case "promote":
            versions = registry.versions()
            if versions:
                registry.promote(versions[int(command.choice * len(versions))].name)
        case "rollback":
            registry.rollback()
        case "verify":
            with redirect_stdout(io.StringIO()):
                verify_store(given.url, None)
    return None
