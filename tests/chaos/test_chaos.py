"""Nothing is lost, wrong or hangs, whatever happens to processes that share a store."""

import os
from pathlib import Path
from random import Random

import pytest
from chaos.damage import damage, restore
from chaos.faults import STORES, Fault, schedule
from chaos.report import run_all

from artifacts.store import KeyParts, Store

SEED = os.environ.get("KILN_TEST_SEED", "0")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stores", "faults"), [(["local"], 6), pytest.param([*STORES], 36, marks=pytest.mark.soak)]
)
def test_a_store_survives_faults(stores: list[str], faults: int) -> None:
    assert run_all(stores, faults, SEED) == []


@pytest.mark.parametrize("store", STORES)
def test_the_schedule_is_a_function_of_the_seed(store: str) -> None:
    first, again, other = (schedule(store, 3, 57, Random(seed)) for seed in ("0", "0", "1"))
    assert first == again != other
    assert {fault.kind for dealt in first for fault in dealt} == set(STORES[store])
    assert sum(map(len, first)) == 57


@pytest.mark.parametrize("kind", ["file truncated", "file flipped"])
def test_damage_is_found_and_restored(kind: str, tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    draft = store.draft(KeyParts("train", 1, {}, {}))
    draft.write("weights", bytes(1000))
    artifact = draft.commit({}, {})
    found = damage(store, Fault(kind, 0, 0.0, 0.99))
    assert found is not None and found.path.endswith("/weights")
    assert store.fault(artifact, deep=True) is not None
    restore(store, found)
    assert store.fault(artifact, deep=True) is None
