"""Latent shards: what is written is read back, by us and by safetensors, byte for byte the same."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from store_servers import REMOTE, UrlOf

from artifacts.latent_shards import (
    Latents,
    LatentSample,
    LatentShard,
    ShardRef,
    Texts,
    flipped_group,
    from_bfloat16,
    open_latents,
    to_bfloat16,
    write_latent_shard,
)
from artifacts.records import Damaged, digest_bytes, write_record
from artifacts.store import KeyParts, Store


def _sample(
    rng: np.random.Generator, height: int, width: int, rows: tuple[int, ...]
) -> LatentSample:
    return LatentSample(
        mean=rng.normal(size=(4, height, width)).astype(np.float32),
        logvar=rng.normal(size=(4, height, width)).astype(np.float32),
        id=rng.bytes(32),
        original_size=(height * 9, width * 11),
        crop_top_left=(3, 5),
        target_size=(height * 4, width * 4),
        flip=bool(rng.integers(2)),
        caption_rows=rows,
    )


@pytest.fixture
def content() -> tuple[dict[str, list[LatentSample]], Texts]:
    rng = np.random.default_rng(0)
    groups = {
        "train/8x8": [_sample(rng, 8, 8, rows) for rows in [(1,), (0,), (2, 1, 3)]],
        "train/6x10": [_sample(rng, 6, 10, (2,))],
        "holdout/8x8": [_sample(rng, 8, 8, (3,))],
    }
    texts = Texts(
        rng.normal(size=(4, 77, 16)).astype(np.float32),
        rng.normal(size=(4, 12)).astype(np.float32),
        rng.integers(49408, size=(4, 2, 77)),
    )
    return groups, texts


def test_a_sample_comes_back_as_it_was_written_up_to_bf16(content, tmp_path: Path) -> None:
    groups, texts = content
    write_latent_shard(tmp_path / "a.safetensors", groups, texts)
    shard = LatentShard(tmp_path / "a.safetensors")
    assert shard.groups == {"holdout/8x8": 1, "train/6x10": 1, "train/8x8": 3}
    for group, samples in groups.items():
        for index, wrote in enumerate(samples):
            read = shard.sample(group, index)
            bf16 = torch.from_numpy(wrote.mean).bfloat16().float().numpy()
            np.testing.assert_array_equal(from_bfloat16(read.mean), bf16)
            assert read.logvar.shape == wrote.logvar.shape
            assert replace(read, mean=0, logvar=0) == replace(wrote, mean=0, logvar=0)
    prompt, pooled = shard.prompt_embeds(2), shard.pooled_prompt_embeds(3)
    assert pooled is not None
    np.testing.assert_allclose(from_bfloat16(prompt), texts.prompt_embeds[2], rtol=2**-8)
    np.testing.assert_allclose(from_bfloat16(pooled), texts.pooled_prompt_embeds[3], rtol=2**-8)
    np.testing.assert_array_equal(shard.input_ids(1), texts.input_ids[1])
    assert shard.input_ids(1).dtype == np.int32


def test_safetensors_itself_reads_the_file(content, tmp_path: Path) -> None:
    groups, texts = content
    write_latent_shard(tmp_path / "a.safetensors", groups, texts)
    tensors = load_file(tmp_path / "a.safetensors")
    assert tensors["train/8x8/mean"].dtype == torch.bfloat16
    assert tensors["train/8x8/caption_offsets"].tolist() == [0, 1, 2, 5]
    assert tensors["train/8x8/caption_rows"].tolist() == [1, 0, 2, 1, 3]
    expected = torch.from_numpy(np.stack([s.logvar for s in groups["train/8x8"]])).bfloat16()
    assert torch.equal(tensors["train/8x8/logvar"], expected)


def test_order_of_groups_does_not_change_the_bytes(content, tmp_path: Path) -> None:
    groups, texts = content
    write_latent_shard(tmp_path / "a", groups, texts)
    write_latent_shard(tmp_path / "b", dict(reversed(groups.items())), texts)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_shard_without_pooled_embeddings_says_none(content, tmp_path: Path) -> None:
    groups, texts = content
    write_latent_shard(tmp_path / "a", groups, replace(texts, pooled_prompt_embeds=None))
    assert LatentShard(tmp_path / "a").pooled_prompt_embeds(0) is None


def test_mirrored_variants_are_a_group_of_their_own(content, tmp_path: Path) -> None:
    groups, texts = content
    mirrored = flipped_group("train/8x8")
    assert mirrored == "flipped/8x8" and flipped_group("holdout/8x8") == "holdout/8x8"
    write_latent_shard(tmp_path / "a", {**groups, mirrored: groups["train/8x8"][::-1]}, texts)
    shard = LatentShard(tmp_path / "a")
    assert shard.groups[mirrored] == 3
    ref = ShardRef(str(tmp_path / "a"), 0, "", shard.groups)
    latents = Latents({}, [ref, ref])
    assert (latents.training, latents.held_out) == (8, 2)
    assert shard.sample(mirrored, 0).id == groups["train/8x8"][2].id


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.random.default_rng(1).normal(scale=100, size=100_000).astype(np.float32)
    values[:4] = [0.0, -0.0, 3e38, np.inf]
    ours = from_bfloat16(to_bfloat16(values))
    np.testing.assert_array_equal(ours, torch.from_numpy(values).bfloat16().float().numpy())


def test_a_damaged_shard_is_refused_in_one_line(content, tmp_path: Path) -> None:
    write_latent_shard(tmp_path / "a", *content)
    data = (tmp_path / "a").read_bytes()
    for broken in (data[:-1], data[:30], b"", data[:8] + b"x" * 100 + data[108:]):
        (tmp_path / "b").write_bytes(broken)
        with pytest.raises(ValueError, match="not a readable latent shard"):
            LatentShard(tmp_path / "b")
    shard = LatentShard(tmp_path / "a")
    with pytest.raises(IndexError, match="has 3 rows, asked for 3"):
        shard.sample("train/8x8", 3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": [3, 4, 8, 9]},
        {"shape": [-3, -4, 8, 8]},
        {"shape": [3.0, 4, 8, 8]},
        {"data_offsets": [-2, 1534]},
        {"data_offsets": [0]},
        {"dtype": "F64"},
    ],
)
def test_a_header_that_lies_about_a_tensor_is_refused_in_one_line(
    content, tmp_path: Path, wrong: dict[str, object]
) -> None:
    write_latent_shard(tmp_path / "a", *content)
    data = (tmp_path / "a").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["train/8x8/mean"] |= wrong
    text = json.dumps(header).encode()
    (tmp_path / "b").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ValueError, match="not a readable latent shard"):
        LatentShard(tmp_path / "b")


@pytest.mark.parametrize("kind", ["local", "memory", *REMOTE])
def test_open_latents_reads_only_the_manifest(
    content, tmp_path: Path, kind: str, url_of: UrlOf
) -> None:
    store = Store(url_of(kind))
    draft = store.draft(KeyParts("encode", 1, {}, {}))
    write_latent_shard(tmp_path / "a", *content)
    meta = {"groups": {"train/8x8": 3, "train/6x10": 1, "holdout/8x8": 1}}
    shards = {}
    for name in ("b" * 64, "a" * 64):
        shards[name] = shard = store.commit_shard(
            "encode", name, {".safetensors": str(tmp_path / "a")}, meta
        )
        draft.add_shard(shard)
    draft.write("latents.json", json.dumps({"family": "sdxl"}).encode())
    artifact = draft.commit({}, {})
    store.fs.rm_file(f"{store.shards_path('encode')}/{shards['b' * 64].files[0].path}")

    latents = open_latents(artifact.uri)

    assert latents.info == {"family": "sdxl"}
    names = [ref.url.rpartition("/")[2].partition(".")[0] for ref in latents.shards]
    assert names == ["a" * 64, "b" * 64]
    assert latents.groups()["train/8x8"] == 6
    data = store.fs.cat_file(latents.shards[0].url)
    assert digest_bytes(data) == latents.shards[0].sha256
    assert len(data) == latents.shards[0].size


def test_open_latents_refuses_another_artifact(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    write_record(store.fs, f"{tmp_path}/x/manifest.json", {"files": []})
    with pytest.raises(ValueError, match="no latents artifact"):
        open_latents(f"{tmp_path}/x")
    with pytest.raises(ValueError, match="no latents artifact"):
        open_latents(f"{tmp_path}/y")


def test_damaged_facts_of_latents_are_not_read(tmp_path: Path) -> None:
    """A digit of the scaling factor that flipped would train on other latents."""
    store = Store(str(tmp_path))
    draft = store.draft(KeyParts("encode", 1, {}, {}))
    draft.write("latents.json", b'{"scaling_factor": 0.18215}')
    artifact = draft.commit({}, {})
    assert open_latents(artifact.uri).info == {"scaling_factor": 0.18215}
    path, at = Path(artifact.path, "latents.json"), os.stat(f"{artifact.path}/latents.json")
    path.write_bytes(b'{"scaling_factor": 0.98215}')
    os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    with pytest.raises(Damaged, match=r"latents\.json is damaged.*run again"):
        open_latents(artifact.uri)
    assert store.find("encode", artifact.key) is None, "the next run builds it again"
