"""Batches hold what the shards hold, wherever these are; reading is bounded and damage is named."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from artifacts.filesystems import Clock
from artifacts.latent_shards import Latents, LatentScale, LatentShard, from_bfloat16, open_latents
from configs.errors import Refused
from configs.settings.train_parts import MaskedLoss
from runtimes.contract import StepBatch
from runtimes.data import shard_cache
from runtimes.data.loader import BatchReader, Holdout, Loader, Prefetch
from runtimes.data.sample_order import SampleIndex
from runtimes.families import FAMILIES
from runtimes.objective.noise_schedule import NoiseSchedule
from runtimes.objective.training_objective import Objective

WriteLatents = Callable[..., str]
SCHEDULE = NoiseSchedule.from_config({"beta_schedule": "scaled_linear"})


def objective(**settings: float) -> Objective:
    return Objective(SCHEDULE, LatentScale(0.5), seed=5, **settings)  # type: ignore[arg-type]


def make_loader(url: str, **more: object) -> Loader:
    settings = {"batch_size": 4, "seed": 5, "window": 2, **more}
    dropout = settings.pop("caption_dropout_rate", 0.0)
    objectives = objective(caption_dropout_rate=dropout)  # type: ignore[arg-type]
    names = ("text_encoders", "extras", "cache_bytes")
    given = {name: settings.pop(name) for name in names if name in settings}
    reader = BatchReader(open_latents(url), FAMILIES["sdxl"], objectives, **given)  # type: ignore[arg-type]
    return Loader(reader, **settings)  # type: ignore[arg-type]


def assert_same(one: StepBatch, other: StepBatch) -> None:
    for field in fields(StepBatch):
        a, b = getattr(one, field.name), getattr(other, field.name)
        np.testing.assert_equal(a, b)


def test_a_batch_holds_what_the_shards_hold(latents_url: str) -> None:
    loader = make_loader(latents_url)
    shards = [LatentShard(ref.url) for ref in open_latents(latents_url).shards]
    for step in range(8):
        batch, places = loader.batch(step), loader.order.batch(step)
        assert batch.timesteps.dtype == np.int32 and batch.denominator == 4
        for row, place in enumerate(places):
            shard = shards[place.shard]
            sample = shard.sample(place.group, place.row)
            choices = objective().choices([step * 4 + row])[0]
            caption = sample.caption_rows[int(choices.caption * len(sample.caption_rows))]
            noised = objective().noised(
                from_bfloat16(sample.mean)[None],
                from_bfloat16(sample.logvar)[None],
                batch.timesteps[row : row + 1],
                [step * 4 + row],
            )
            np.testing.assert_array_equal(batch.noisy_latents[row], noised.noisy_latents[0])
            np.testing.assert_array_equal(batch.target[row], noised.target[0])
            got = {name: array[row] for name, array in batch.conditioning.items()}
            for name in ("prompt_embeds", "pooled_prompt_embeds"):
                stored = getattr(shard, name)(caption)
                np.testing.assert_array_equal(got[name], from_bfloat16(stored))
            sizes = (*sample.original_size, *sample.crop_top_left, *sample.target_size)
            assert tuple(got["add_time_ids"]) == sizes
            assert got["add_time_ids"].dtype == np.float32


def test_every_caption_of_a_sample_is_chosen_sometimes(latents_url: str) -> None:
    loader = make_loader(latents_url)
    ref = open_latents(latents_url).shards[0]
    several = next(
        row
        for row in range(9)
        if len(LatentShard(ref.url).sample("train/8x8", row).caption_rows) == 2
    )
    seen = {
        batch.conditioning["prompt_embeds"][place].tobytes()
        for step in range(100)
        for place, at in enumerate(loader.order.batch(step))
        if at == (0, "train/8x8", several)
        for batch in [loader.batch(step)]
    }
    assert len(seen) == 2


@pytest.mark.parametrize("empty_prompt", ["zeros", "encoded"])
def test_a_dropped_caption_is_what_the_pipeline_takes_for_none(
    tmp_path: Path, empty_prompt: str, write_latents: WriteLatents
) -> None:
    url = write_latents(str(tmp_path), [{"train/8x8": 8}], empty_prompt=empty_prompt)
    batch = make_loader(url, caption_dropout_rate=1.0).batch(0)
    shard = LatentShard(open_latents(url).shards[0].url)
    prompt, pooled = map(from_bfloat16, (shard.prompt_embeds(0), shard.pooled_prompt_embeds(0)))
    if empty_prompt == "zeros":
        prompt, pooled = 0 * prompt, 0 * pooled
    for row in range(4):
        np.testing.assert_array_equal(batch.conditioning["prompt_embeds"][row], prompt)
        np.testing.assert_array_equal(batch.conditioning["pooled_prompt_embeds"][row], pooled)


@pytest.mark.parametrize("empty_prompt", ["zeros", "encoded"])
def test_with_text_encoders_batches_have_token_ids_in_place_of_embeddings(
    tmp_path: Path, empty_prompt: str, write_latents: WriteLatents
) -> None:
    url = write_latents(str(tmp_path), [{"train/8x8": 8}], empty_prompt=empty_prompt)
    loader = make_loader(url, caption_dropout_rate=0.5, text_encoders=True)
    plain = make_loader(url, caption_dropout_rate=0.5)
    shard = LatentShard(open_latents(url).shards[0].url)
    embeds = {from_bfloat16(shard.prompt_embeds(row)).tobytes(): row for row in range(6)}
    dropped = []
    for step in range(6):
        batch, embedded = loader.batch(step), plain.batch(step)
        assert set(batch.conditioning) == {"input_ids", "dropped", "add_time_ids"}
        assert batch.conditioning["input_ids"].dtype == np.int32
        np.testing.assert_array_equal(batch.noisy_latents, embedded.noisy_latents)
        rows = [embeds.get(e.tobytes(), 0) for e in embedded.conditioning["prompt_embeds"]]
        ids = np.stack([shard.input_ids(row) for row in rows])
        np.testing.assert_array_equal(batch.conditioning["input_ids"], ids)
        zeros = [not e.any() for e in embedded.conditioning["prompt_embeds"]]
        np.testing.assert_array_equal(batch.conditioning["dropped"], np.float32(zeros))
        dropped += [row == 0 for row in rows]
    assert 4 < sum(dropped) < 20
    assert batch.conditioning["dropped"].dtype == np.float32


SD3 = {"family": "sd3", "latent_channels": 8, "pooled_dim": 48, "empty_prompt": "encoded"}


def test_sd3_s_zeros_that_are_not_stored_are_added(
    tmp_path: Path, write_latents: WriteLatents
) -> None:
    url = write_latents(str(tmp_path), [{"train/8x8": 8}], **SD3)
    info = {**open_latents(url).info, "tokens": 10, "prompt_dim": 80}
    latents = Latents(info, open_latents(url).shards)
    shard = LatentShard(latents.shards[0].url)
    for text_encoders in (False, True):
        dropping = objective(caption_dropout_rate=1.0)
        reader = BatchReader(latents, FAMILIES["sd3"], dropping, text_encoders=text_encoders)
        loader = Loader(reader, batch_size=2, seed=0, window=1)
        found = loader.batch(0).conditioning
        if text_encoders:
            assert set(found) == {"input_ids", "dropped", "t5_prompt_embeds"}
            assert found["t5_prompt_embeds"].shape == (2, 4, 80)
            assert not found["t5_prompt_embeds"].any() and not found["dropped"].any()
            continue
        assert set(found) == {"prompt_embeds", "pooled_prompt_embeds"}
        whole = np.zeros((10, 80), np.float32)
        whole[:6, :64] = from_bfloat16(shard.prompt_embeds(0))
        np.testing.assert_array_equal(found["prompt_embeds"][0], whole)


def test_pictures_are_mirrored_half_of_the_time_anew_at_each_sight(
    tmp_path: Path, write_latents: WriteLatents
) -> None:
    groups = {"train/8x8": 8, "flipped/8x8": 8, "holdout/8x8": 2, "train/4x12": 4}
    url = write_latents(str(tmp_path), [groups])
    shard = LatentShard(open_latents(url).shards[0].url)
    loader, seen = make_loader(url), dict[int, list[bool]]()
    assert loader.order.total == 12, "a mirrored picture is no other picture"
    for step in range(150):
        batch = loader.batch(step)
        for row, place in enumerate(loader.order.batch(step)):
            counter = step * 4 + row
            sizes = {
                split: (*s.original_size, *s.crop_top_left, *s.target_size)
                for split in ("train", "flipped")
                if f"{split}/{place.group[6:]}" in shard.groups
                for s in [shard.sample(f"{split}/{place.group[6:]}", place.row)]
            }
            flipped = objective().choices([counter])[0].flip < 0.5 and "flipped" in sizes
            got = tuple(batch.conditioning["add_time_ids"][row])
            assert got == sizes["flipped" if flipped else "train"]
            if place.group == "train/8x8":
                seen.setdefault(place.row, []).append(flipped)
    assert all(0.25 < np.mean(flips) < 0.75 for flips in seen.values())
    reader = BatchReader(open_latents(url), FAMILIES["sdxl"], objective())
    holdout = Holdout(reader, samples=2, draws=9, batch_size=18)
    for _, batch in holdout.batches():
        held = {shard.sample("holdout/8x8", row).original_size for row in range(2)}
        assert {tuple(ids[:2]) for ids in batch.conditioning["add_time_ids"]} == held


def test_prefetched_batches_are_the_same(latents_url: str) -> None:
    loader = make_loader(latents_url)
    with loader.prefetch(3, 9, 2) as batches:
        fetched = list(batches)
    for step, batch in zip(range(3, 9), fetched, strict=True):
        assert_same(batch, loader.batch(step))


def test_waiting_for_batches_is_counted_and_the_time_between_is_not(latents_url: str) -> None:
    batch, seconds = make_loader(latents_url).batch(0), [0.0]
    asked, looks = threading.Semaphore(0), cycle([True, False])

    def now() -> float:
        """Looked at when a batch is asked for, and again when it is there."""
        if next(looks):
            asked.release()
        return seconds[0]

    def slow() -> Iterator[StepBatch]:
        for _ in range(3):
            assert asked.acquire(timeout=60)
            seconds[0] += 2.0
            yield batch

    with Prefetch(slow(), 1, lambda: False, Clock(now)) as batches:
        for _ in batches:
            seconds[0] += 5.0  # a step of the device
    assert batches.waited == 3 * 2.0


def test_it_ends_when_asked_to_even_while_a_batch_is_long_in_coming(
    latents_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, released = make_loader(latents_url), threading.Event()
    batch = loader.batch
    monkeypatch.setattr(loader, "batch", lambda step: (step and released.wait(60), batch(step))[1])
    monkeypatch.setattr("runtimes.data.loader.JOIN_SECONDS", 0.1)
    asked: list[int] = []
    with loader.prefetch(0, 6, 1, lambda: bool(asked)) as batches:
        for _ in batches:
            asked.append(1)
    assert batches._thread.is_alive(), "it waited for the batch"
    released.set()
    assert len(asked) == 1


def test_prefetching_stops_when_its_reader_does(latents_url: str) -> None:
    with make_loader(latents_url).prefetch(0, 10**6, 2) as batches:
        next(iter(batches))
    assert not batches._thread.is_alive()


@pytest.mark.parametrize("damage", ["cut", "header", "gone"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str, write_latents: WriteLatents) -> None:
    url = write_latents(str(tmp_path), [{"train/8x8": 8}])
    path = Path(open_latents(url).shards[0].url)
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-9] if damage == "cut" else b"\xff" * 64 + data[64:])
    with (
        pytest.raises(Refused, match=f"latent shard .*{path.name}"),
        make_loader(url).prefetch(0, 2, 1) as batches,
    ):
        list(batches)


def test_latents_of_another_family_are_refused(latents_url: str) -> None:
    with pytest.raises(Refused, match="family sdxl, this one is sd"):
        BatchReader(open_latents(latents_url), FAMILIES["sd"], objective())


def test_token_ids_are_refused_where_embeddings_are_read(latents_url: str) -> None:
    latents = open_latents(latents_url)
    tokens = Latents({**latents.info, "text_dtype": "float32"}, latents.shards)
    BatchReader(tokens, FAMILIES["sdxl"], objective(), text_encoders=True)
    with pytest.raises(Refused, match=r"token ids .*: encode again with encode\.text: embeddings$"):
        BatchReader(tokens, FAMILIES["sdxl"], objective())


def test_a_remote_store_is_read_through_a_bounded_cache(
    tmp_path: Path, own_cache: Path, write_latents: WriteLatents
) -> None:
    shards = [{"train/8x8": 6}] * 6
    local = write_latents(str(tmp_path / "store"), shards)
    remote = write_latents(f"memory://{tmp_path.name}", shards)
    sizes = [ref.size for ref in open_latents(remote).shards]
    bounded = make_loader(remote, cache_bytes=3 * max(sizes))
    for step in range(18):
        assert_same(bounded.batch(step), make_loader(local).batch(step))
        kept = list((tmp_path / "cache/kilnworks/shards").iterdir())
        assert sum(path.stat().st_size for path in kept) <= 3 * max(sizes)


def test_shards_of_past_windows_are_not_mapped(tmp_path: Path, write_latents: WriteLatents) -> None:
    """The disk of an evicted copy is free only once the copy is closed."""
    shards = [{f"train/{n}x8": 8 for n in range(4, 12)}] * 24
    loader = make_loader(url := write_latents(str(tmp_path), shards), window=2)
    refs, most = open_latents(url).shards, 0
    for step in range(loader.order.steps_before(1)):
        loader.batch(step)
        maps = Path("/proc/self/maps").read_text()
        most = max(most, sum(ref.url in maps for ref in refs))
    assert most <= 10, "the windows of 8 buckets, which are at about the same place, and the next"


def test_held_out_samples_come_with_fixed_noise(latents_url: str) -> None:
    def drawn(batch_size: int) -> dict[int, list[bytes]]:
        rows: dict[int, list[bytes]] = {}
        reader = BatchReader(open_latents(latents_url), FAMILIES["sdxl"], objective())
        holdout = Holdout(reader, samples=10, draws=3, batch_size=batch_size)
        for numbers, batch in holdout.batches():
            for number, row in zip(numbers, batch.noisy_latents, strict=True):
                rows.setdefault(number, []).append(row.tobytes())
        return rows

    assert sorted(drawn(4)) == list(range(5)), "five were held out"
    assert all(len(set(rows)) == 3 for rows in drawn(4).values())
    assert drawn(4) == drawn(7)


@pytest.mark.parametrize("text_encoders", [False, True])
def test_held_out_samples_are_downloaded_once(
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_latents: WriteLatents,
    text_encoders: bool,
) -> None:
    """A validation reads few samples of many shards, which would evict those of the training."""
    url = write_latents(f"memory://{tmp_path.name}", [{"train/8x8": 6, "holdout/8x8": 2}] * 12)
    latents, downloaded = open_latents(url), list[str]()
    fetch = shard_cache._download

    def counted(*given: Any) -> None:
        downloaded.append(given[2].url)
        fetch(*given)

    monkeypatch.setattr(shard_cache, "_download", counted)

    def holdout(**given: int) -> Holdout:
        limit = 2 * max(ref.size for ref in latents.shards)
        family = FAMILIES["sdxl"]
        more = {"text_encoders": text_encoders, "cache_bytes": limit, **given}
        reader = BatchReader(latents, family, objective(), **more)  # type: ignore[arg-type]
        return Holdout(reader, samples=24, draws=3, batch_size=5)

    again = [batch for _, batch in holdout().batches()]
    for kept, downloads in ((2**20, [12]), (3000, range(13, 25))):  # all rows; few rows
        downloaded.clear()
        measured = holdout(keep_bytes=kept)
        for _ in range(2):
            for one, (_, other) in zip(again, measured.batches(), strict=True):
                assert_same(one, other)
        assert len(downloaded) in downloads


PEAK = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_loader import make_loader
loader = make_loader(sys.argv[2], batch_size=16, window=2)
for step in range(40 * 60 // 16):
    loader.batch(step)
# not ru_maxrss, which a child inherits from whoever started it
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.extended
@pytest.mark.slow
def test_memory_does_not_grow_with_the_dataset(tmp_path: Path, write_latents: WriteLatents) -> None:
    one = {"train/64x64": 60}  # 4 MB; all 40 of them are read once, and kept, they would show
    peaks = []
    for count in (4, 40):
        url = write_latents(str(tmp_path / str(count)), [one] * count)
        command = [sys.executable, "-c", PEAK, str(Path(__file__).parent), url]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
        peaks.append(int(done.stdout))
        shutil.rmtree(tmp_path / str(count))
    assert peaks[1] < 1.15 * peaks[0], f"peak KiB: {peaks}"


def test_masks_weight_the_loss_of_each_latent_position(
    tmp_path: Path, write_latents: WriteLatents
) -> None:
    """Samples have a mask, one that shows nothing, and none."""
    mask = np.random.default_rng(0).integers(0, 256, (8, 8), np.uint8)
    masks = [mask, np.zeros_like(mask)]
    url = write_latents(tmp_path / "store", [{"train/8x8": 3, "holdout/8x8": 1}], loss_masks=masks)
    samples = [SampleIndex(0, "train/8x8", row) for row in range(3)]

    def loss_mask(masked_loss: MaskedLoss | None) -> Any:
        reader = BatchReader(
            open_latents(url), FAMILIES["sdxl"], objective(), masked_loss=masked_loss
        )
        return reader.batch(0, samples, [0, 1, 2], 3).loss_mask

    assert loss_mask(None) is None
    shown = np.stack([mask / 255, np.zeros((8, 8)), np.ones((8, 8))])
    plain = loss_mask(MaskedLoss())
    assert plain.dtype == np.float32
    np.testing.assert_allclose(plain, shown, rtol=1e-6)
    np.testing.assert_allclose(
        loss_mask(MaskedLoss(unmasked_weight=0.1)), np.maximum(shown, 0.1), rtol=1e-6
    )
    normalised = loss_mask(MaskedLoss(area_normalised=True))
    np.testing.assert_allclose(normalised.mean((1, 2)), [1, 0, 1], rtol=1e-5)
    np.testing.assert_allclose(normalised[0], shown[0] / shown[0].mean(), rtol=1e-5)
