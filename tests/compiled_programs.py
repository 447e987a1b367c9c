"""Keep compiled programs of stores from one test session to the next."""

import os
from pathlib import Path


def keep(store: Path) -> None:
    """Create a store whose folder of compiled programs is a link to a persistent one.

    A store's own folder precedes the cache of tests/conftest.py, so a new store would start cold.
    """
    kept = Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).with_name("of-stores")
    kept.mkdir(parents=True, exist_ok=True)
    store.mkdir()
    (store / "compiled").symlink_to(kept)
