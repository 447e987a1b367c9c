"""Programs that runs of earlier sessions have compiled, for the stores of new ones."""

import os
from pathlib import Path


def keep(store: Path) -> None:
    """Have a new store's compiled programs be in the folder that outlives the session.

    A store keeps its own, before the cache that tests/conftest.py names: each new one starts cold.
    """
    kept = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).with_name("of-stores")
    kept.mkdir(parents=True, exist_ok=True)
    store.mkdir()
    (store / "compiled").symlink_to(kept)
