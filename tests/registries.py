"""Models of a few bytes for a registry, and the swaps of its records."""

from typing import Any

import pytest

from artifacts import compare_and_swap as cas
from artifacts.store import Artifact, KeyParts, Store
from tasks.publish.registry import Registry


def model(store: Store, n: int) -> Artifact:
    draft = store.draft(KeyParts("publish", 1, {"n": n}, {}))
    draft.write("model_index.json", f"{n}".encode())
    draft.write("unet/weights.safetensors", bytes(n))
    return draft.commit({}, {})


def crown(store: Store, registry: Registry, *numbers: int) -> None:
    """Publish and promote models, one after another."""
    for n in numbers:
        registry.promote(registry.publish(model(store, n)).name)


def recorded_swaps(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    """The arguments of all later calls of a `swap`, which still swaps."""
    requests: list[tuple[Any, ...]] = []

    def recorded(*request: Any) -> Any:
        requests.append(request)
        return cas.swap(*request)

    monkeypatch.setattr(name, recorded)
    return requests
