"""All rounds on all stores, and the table of what happened."""

from __future__ import annotations

import logging
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from chaos.faults import STORES
from chaos.round import Outcome, Reference, Round, StoreLocation, Undisturbed, processes
from chaos.worker import Given
from fsspec import get_filesystem_class
from gcs_server import GcsServer
from store_servers import BUCKET, serving_s3

SLOTS, FAULTS_PER_ROUND = 3, 85


def run_all(stores: Sequence[str], count: int, seed: str) -> list[str]:
    """Let `count` faults happen on `stores`; print the table and return all findings."""
    print(f"KILN_TEST_SEED={seed}", flush=True)
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where a sync is quick
    with (
        tempfile.TemporaryDirectory(prefix="kiln-chaos-", dir=memory) as folder,
        patch.dict(os.environ),
    ):
        # Processes are forked from one that has imported everything.
        tests = Path(__file__).parents[1]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(tests), str(tests.parent)])
        return _report(_outcomes(stores, count, seed, Path(folder)))


def _outcomes(
    stores: Sequence[str], count: int, seed: str, folder: Path
) -> dict[str, list[Outcome]]:
    (base := folder / "base").mkdir()
    (base / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    outcomes: dict[str, list[Outcome]] = {}
    with Undisturbed(Given(str(folder / "reference"), base, {})) as undisturbed:
        reference = Reference(undisturbed)
        for number, kind in enumerate(stores):
            share = count // len(stores) + (number < count % len(stores))
            with _place(kind, folder) as place:
                outcomes[kind] = list(_rounds(place, share, seed, base, reference))
    return outcomes


def _rounds(
    place: StoreLocation, count: int, seed: str, base: Path, reference: Reference
) -> Iterator[Outcome]:
    number = 0
    while count > 0:
        faults = min(count, FAULTS_PER_ROUND)
        outcome = Round(place, f"{seed} {place.kind} {number}", base, reference).run(SLOTS, faults)
        done = ", ".join(f"{n} {what}" for what, n in sorted(outcome.commands.items()))
        happened = outcome.faults.total()
        print(
            f"{place.kind} round {number}: {happened} faults, commands: {done},"
            f" {outcome.seconds:.0f} s ({outcome.seconds - outcome.checked_after:.0f} s of checks)",
            flush=True,
        )
        if "KILN_CHAOS_VERBOSE" in os.environ:
            for said, times in outcome.refusals.most_common():
                print(f"  {times} x {said}")
        for finding in outcome.findings:
            print(f"  {finding}", flush=True)
        yield outcome
        number, count = number + 1, count - faults


@contextmanager
def _place(kind: str, folder: Path) -> Iterator[StoreLocation]:
    if kind == "local":
        yield StoreLocation(kind, str(folder / "store"))
        return
    variable = {"s3": "AWS_ENDPOINT_URL", "gcs": "STORAGE_EMULATOR_HOST"}[kind]
    ours, theirs = processes.Pipe()
    server = processes.Process(target=_serve, args=(kind, theirs), daemon=True)
    server.start()
    url = os.environ[variable] = ours.recv()
    protocol = {"s3": "s3", "gcs": "gs"}[kind]
    client = get_filesystem_class(protocol)
    client.clear_instance_cache()  # clients of another test's server
    yield StoreLocation(kind, f"{protocol}://{BUCKET}/{uuid4()}", url, variable)
    client.clear_instance_cache()
    server.kill()


def _serve(kind: str, pipe: Any) -> None:
    logging.getLogger("werkzeug").addHandler(logging.NullHandler())  # otherwise it prints
    with (serving_s3 if kind == "s3" else GcsServer)() as server:
        pipe.send(server.url)
        with suppress(EOFError):
            pipe.recv()  # until the driver has ended, however


def _report(outcomes: dict[str, list[Outcome]]) -> list[str]:
    happened = {
        kind: sum((o.faults for o in rounds), Counter()) for kind, rounds in outcomes.items()
    }
    rows = [
        (name, *(happened[kind][name] for kind in outcomes))
        for name in dict.fromkeys(name for kind in outcomes for name in STORES[kind])
    ]
    rows.append(("faults", *(happened[kind].total() for kind in outcomes)))
    for name in ("done", "refused"):
        counts = (sum(o.commands[name] for o in rounds) for rounds in outcomes.values())
        rows.append((f"commands {name}", *counts))
    for name in ("lost", "wrong", "hangs"):
        counts = (sum(len(getattr(o.findings, name)) for o in r) for r in outcomes.values())
        rows.append((name, *counts))
    seconds = (round(sum(o.seconds for o in rounds)) for rounds in outcomes.values())
    rows.append(("seconds", *seconds))
    print(f"{'':18}" + "".join(f"{kind:>8}" for kind in (*outcomes, "sum")))
    for name, *counts in rows:
        print(f"{name:18}" + "".join(f"{n:8}" for n in (*counts, sum(counts))), flush=True)
    return [finding for rounds in outcomes.values() for o in rounds for finding in o.findings]
