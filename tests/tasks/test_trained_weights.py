"""Trained weights are read as they were committed, or not at all."""

import os

import pytest
from store_servers import REMOTE, UrlOf

from artifacts.records import Damaged
from artifacts.store import KeyParts, Store
from tasks.trained_weights import local_weights

WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("kind", ["local", "memory", *REMOTE])
def test_damaged_weights_are_neither_measured_nor_published(kind: str, url_of: UrlOf) -> None:
    store = Store(url_of(kind))
    draft = store.draft(KeyParts("train", 1, {}, {}))
    draft.write("unet/config.json", b"{}")
    draft.write(WEIGHTS, bytes(100))
    trained = draft.commit({}, {})
    with local_weights(trained) as tuned:
        assert (tuned.parts["unet"] / WEIGHTS.rpartition("/")[2]).read_bytes() == bytes(100)
    path = f"{trained.path}/{WEIGHTS}"
    stat = os.stat(path) if store.is_local else None
    store.fs.pipe_file(path, bytes(99) + b"x")
    if stat is not None:  # as if the disk had changed it
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(Damaged), local_weights(trained):
        pass
    assert store.find("train", trained.key) is None  # a run trains again
