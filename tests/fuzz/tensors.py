"""Files of tensors: latent shards, checkpoints' arrays, adapters. They are safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fuzz.mutations import encode, mutate, mutate_tree
from fuzz.reader import Reader

from artifacts.latent_shards import LatentSample, LatentShard, ShardRef, Texts, write_latent_shard
from artifacts.records import digest_bytes
from artifacts.safetensors import read_arrays, write_arrays
from configs.errors import Refused
from configs.settings.train_parts import Lora
from runtimes.adapters.lora_files import metadata, read_adapters
from runtimes.data.shard_cache import ShardFiles

GROUP = "train/2x2"


def readers(folder: Path) -> list[Reader]:
    path = folder / "shard.safetensors"
    return [
        *_of_shards(path),
        *_of_arrays(folder / "arrays.safetensors"),
        _of_adapters(folder / "adapter.safetensors"),
    ]


def _of_shards(path: Path) -> list[Reader]:
    _write_shard(path)
    valid = path.read_bytes()
    ref = ShardRef(str(path), len(valid), digest_bytes(valid), {GROUP: 3})

    def shard(rng: Random) -> bool:
        path.write_bytes(_changed(valid, rng))
        try:
            opened = LatentShard(path)
        except ValueError:
            return False
        try:
            return _read_samples(opened)
        finally:
            opened.close()

    def checked(rng: Random) -> bool:
        """As training reads it: the sha256 is recorded, so only the same bytes are accepted."""
        data = _changed(valid, rng)
        path.write_bytes(data)
        files = ShardFiles([ref], open_limit=1, cache_bytes=2**20)
        try:
            files[0]
        except Refused:
            return False
        finally:
            files.close()
        assert data == valid, "a damaged shard was accepted"
        return True

    return [Reader("latent shard", 10, shard), Reader("latent shard, sha256", 5, checked)]


def _write_shard(path: Path) -> None:
    rng = np.random.default_rng(0)
    samples = [
        LatentSample(
            mean=rng.normal(size=(4, 2, 2)).astype(np.float32),
            logvar=rng.normal(size=(4, 2, 2)).astype(np.float32),
            id=rng.bytes(32),
            original_size=(64, 48),
            crop_top_left=(0, 1),
            target_size=(8, 8),
            flip=False,
            caption_rows=(1, 2)[: 1 + number % 2],
        )
        for number in range(3)
    ]
    embeds = rng.normal(size=(3, 2, 4)).astype(np.float32)
    texts = Texts(embeds, embeds[:, 0], rng.integers(9, size=(3, 1, 2)))
    write_latent_shard(path, {GROUP: samples}, texts)


def _read_samples(shard: LatentShard) -> bool:
    """The errors are those that the loader reports as damage."""
    try:
        for group, count in shard.groups.items():
            for index in range(min(count, 3)):
                sample = shard.sample(group, index)
                assert sample.mean.dtype == np.uint16
                for row in sample.caption_rows or (0,):
                    shard.prompt_embeds(row)
                    shard.pooled_prompt_embeds(row)
                    shard.input_ids(row)
    except (ValueError, IndexError, KeyError):
        return False
    return True


def _of_arrays(path: Path) -> list[Reader]:
    fs, memory = LocalFileSystem(), MemoryFileSystem()
    arrays = {"a.bias": np.ones(3, np.float32), "b.weight": np.eye(4, dtype=np.float32)}
    with path.open("wb") as stream:
        write_arrays(stream, arrays)
    valid = path.read_bytes()

    def read(rng: Random) -> bool:
        data = _changed(valid, rng)
        path.write_bytes(data)
        memory.pipe_file("/arrays", data)
        try:
            found = {name: array[...] for name, array in read_arrays(fs, str(path)).items()}
        except ValueError:
            found = None
        try:
            stored = read_arrays(memory, "/arrays")
            remote = {name: array[...] for name, array in stored.items()}
        except ValueError:
            remote = None
        np.testing.assert_equal(remote, found)  # a local file is read as a remote one
        return found is not None and all(a.dtype == np.float32 for a in found.values())

    return [Reader("arrays", 8, read)]


def _of_adapters(path: Path) -> Reader:
    down = {"unet.mid.to_q.lora_A.weight": np.ones((2, 4), np.float32)}
    up = {"unet.mid.to_q.lora_B.weight": np.ones((4, 2), np.float32)}
    with path.open("wb") as stream:
        write_arrays(stream, down | up, metadata(down | up, Lora(rank=2)))
    valid = path.read_bytes()

    def read(rng: Random) -> bool:
        path.write_bytes(_changed(valid, rng))
        try:
            found = read_adapters(path)
        except Refused:
            return False
        for adapter in (a for layers in found.values() for a in layers.values()):
            assert np.isfinite(adapter.scale), "a scale that is no number"
            assert adapter.down.dtype == np.float32
        return True

    return Reader("adapter", 6, read)


def _changed(valid: bytes, rng: Random) -> bytes:
    """Other bytes, or another header with the same tensors' bytes."""
    if rng.randrange(2):
        return mutate(valid, rng)
    length = int.from_bytes(valid[:8], "little")
    header: Any = json.loads(valid[8 : 8 + length])
    text = encode(mutate_tree(header, rng), rng)
    stated = rng.choice((len(text), len(text), len(text), len(text) + 8, 0, 2**40, 2**63))
    return stated.to_bytes(8, "little") + text + valid[8 + length :]
