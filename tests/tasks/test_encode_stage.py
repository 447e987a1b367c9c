"""The encode stage: rebuilds, reuse and byte-identical shards."""

import io
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from encode_stage import (
    Pictures,
    digests_of,
    encode_images,
    encode_recipe,
    images_of,
    picture_of,
    pictures_of,
    samples_of,
)
from PIL import Image

from artifacts.image_shards import Sample, write_tar
from artifacts.latent_shards import LatentShard, from_bfloat16, open_latents
from artifacts.records import Damaged, digest_bytes
from artifacts.store import Artifact, Store
from configs.errors import Failed, Refused
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import EncodeJob
from runtimes.torch_models.vae_text_encoders import Encoder
from tasks.devices.commit_shards import CommitShards
from tasks.devices.processes import DevicePool, Facts
from tasks.devices.shards import ShardTask
from tasks.encode import encoders as encode_encoders
from tasks.encode import stage as encode
from tasks.encode.crop_to_bucket import TransformSettings
from tasks.encode.encoders import EncodingPlan, encode_request
from tasks.encode.shard import ShardEncoder
from tasks.pictures import PictureShard
from tasks.plan.plan import caption_bytes

pytestmark = pytest.mark.slow


@pytest.fixture
def make(tiny_sdxl: Path, tmp_path: Path) -> Callable[..., Artifact]:
    def make(
        shards: list[Pictures], store: str = "store", vae: Path | None = None, **settings: object
    ) -> Artifact:
        url = store if "://" in store else str(tmp_path / store)
        recipe = encode_recipe(url, tiny_sdxl, **settings)
        return encode_images(recipe, images_of(Store(url), shards, tmp_path), vae)

    return make


def test_every_sample_has_its_moments_captions_and_split(
    make: Callable[..., Artifact], tiny_sdxl: Path
) -> None:
    shards = pictures_of()
    shards[0]["00000"] = (shards[0]["00000"][0], ("one", "two"))
    shards[0]["00001"] = (shards[0]["00001"][0], ("",))
    latents = open_latents(make(shards).uri)
    encoder = Encoder(Base.open(tiny_sdxl), device="cpu")

    expected = {digest_bytes(data): texts for shard in shards for data, texts in shard.values()}
    found = {}
    for ref in latents.shards:
        shard = LatentShard(ref.url)
        assert shard.groups == ref.groups
        empty = from_bfloat16(shard.prompt_embeds(0))
        np.testing.assert_allclose(empty, encoder.texts([""])[0][0], rtol=0.01, atol=1e-3)
        for group, count in shard.groups.items():
            for sample in (shard.sample(group, i) for i in range(count)):
                texts = expected[sample.id.hex()]
                embeds, pooled = encoder.texts(list(texts))
                for row, embed, pool in zip(sample.caption_rows, embeds, pooled, strict=True):
                    for bits, made in (
                        (shard.prompt_embeds(row), embed),
                        (shard.pooled_prompt_embeds(row), pool),
                    ):
                        np.testing.assert_allclose(from_bfloat16(bits), made, rtol=0.01, atol=1e-3)
                    assert (row == 0) == (texts == ("",))
                ids = np.stack([shard.input_ids(row) for row in sample.caption_rows])
                np.testing.assert_array_equal(ids, encoder.input_ids(list(texts)))
                assert sample.original_size == (32, 40) and sample.target_size == (32, 32)
                assert sample.crop_top_left == (0, 4)
                is_held_out = int(sample.id.hex()[:16], 16) / 2**64 < 0.25
                assert group == f"{'holdout' if is_held_out else 'train'}/8x8"
                found[sample.id.hex()] = True
    assert found.keys() == expected.keys()
    assert latents.info == encoder.info | {"masks": 0, "scored": False}


def test_token_ids_are_stored_without_a_text_encoder(
    make: Callable[..., Artifact], tiny_sdxl: Path, tmp_path: Path
) -> None:
    """The base of the second artifact has no weights of text encoders."""
    shards = pictures_of(2)
    shards[0]["00000"] = (shards[0]["00000"][0], ("one", "two"))
    embedded = open_latents(make(shards).uri)
    model = shutil.copytree(tiny_sdxl, tmp_path / "base")
    for path in model.glob("text_encoder*/*.safetensors"):
        path.unlink()
    recipe = encode_recipe(tmp_path / "ids", model, text="token_ids", dtype="bfloat16")
    artifact = encode_images(recipe, images_of(Store(recipe.store), shards, tmp_path))
    latents = open_latents(artifact.uri)
    assert latents.text_dtype == "bfloat16" and embedded.text_dtype is None
    encoder, names = Encoder(Base.open(tiny_sdxl), device="cpu"), set[str]()
    expected = {digest_bytes(data): texts for shard in shards for data, texts in shard.values()}
    for shard in (LatentShard(ref.url) for ref in latents.shards):
        names |= {name for name in shard._tensors if name.startswith("text/")}
        np.testing.assert_array_equal(shard.input_ids(0), encoder.input_ids([""])[0])
        assert shard.input_ids(0).nbytes == caption_bytes(recipe.encode, encoder.info)
        for group, count in shard.groups.items():
            for sample in (shard.sample(group, i) for i in range(count)):
                ids = np.stack([shard.input_ids(row) for row in sample.caption_rows])
                texts = list(expected.pop(sample.id.hex()))
                np.testing.assert_array_equal(ids, encoder.input_ids(texts))
                assert ids.dtype == np.int32
    assert names == {"text/input_ids"} and not expected
    assert artifact.summary["captions"] == make(shards).summary["captions"]


def test_the_downloaded_bytes_alone_select_the_split(tiny_sdxl: Path, tmp_path: Path) -> None:
    """Neither another stored size nor another URL or caption of a file moves a picture."""
    settings = TransformSettings.of(encode_recipe("s", tiny_sdxl))
    held_out = []
    for width in (40, 80):  # pixels, of another download.image_size
        samples = [
            Sample(
                f"{number:03}",
                picture_of(number, width),
                "png",
                (f"caption {number}",),
                {"sha256": digest_bytes(b"download %d" % (number % 12))},  # each is listed twice
            )
            for number in range(24)
        ]
        path = tmp_path / f"{width}.safetensors"
        ShardEncoder(Encoder(Base.open(tiny_sdxl), device="cpu"), settings, 4).encode(samples, path)
        shard = LatentShard(path)
        groups = {
            name: [shard.sample(name, i) for i in range(n)] for name, n in shard.groups.items()
        }
        held_out.append(sorted(sample.id for sample in groups["holdout/8x8"]))
        assert not {s.id for s in groups["train/8x8"]} & set(held_out[-1])
    assert held_out[0] == held_out[1]
    assert 0 < len(held_out[0]) == 2 * len(set(held_out[0])) < 24


def test_rebuilt_shards_have_equal_bytes(make: Callable[..., Artifact]) -> None:
    first, again = make(pictures_of(), "one"), make(pictures_of(), "two")
    assert digests_of(first) == digests_of(again) and first.digest == again.digest
    assert first.summary == again.summary
    # a shard's batches do not depend on what else is in the dataset
    assert digests_of(make(pictures_of(shards=1), "three")).items() <= digests_of(first).items()


@pytest.mark.extended
def test_bytes_do_not_depend_on_the_number_of_processes(make: Callable[..., Artifact]) -> None:
    one = make(pictures_of(4), "one")
    two = make(pictures_of(4), "two", processes=2)
    assert digests_of(two) == digests_of(one) and two.digest == one.digest


def task_of(key: str, tar: str, sha256: str) -> ShardTask:
    return ShardTask((key,), encode_request(key, PictureShard(tar, tar, sha256, 7)), 7)


class _Counted(DevicePool):
    """Records the shards that it encodes, and waits for another pool with its first."""

    def __init__(self, plan: EncodingPlan, counted: list[str], together: threading.Barrier) -> None:
        super().__init__(plan)
        self._counted, self._together = counted, together

    def compute(self, request: dict, folder: str) -> Facts:
        if not self._counted:
            self._together.wait(60)
        self._counted.append(request["key"])
        return super().compute(request, folder)


def test_two_hosts_share_the_shards_and_encode_each_once(
    make: Callable[..., Artifact], tiny_sdxl: Path, tmp_path: Path
) -> None:
    expected = make(pictures_of(6), "one")
    recipe = encode_recipe(tmp_path / "store", tiny_sdxl)
    images = images_of(Store(recipe.store), pictures_of(6), tmp_path)
    plan = EncodingPlan(
        EncodeJob("torch", str(tiny_sdxl), batch_size=4, device="cpu"), TransformSettings.of(recipe)
    )
    together, counts = threading.Barrier(2), ([], [])
    tasks = [
        task_of(f"{number:064}", images.url(entry.path), entry.sha256)
        for number, entry in enumerate(images.files)
    ]

    def host(pool: _Counted) -> None:
        for waits in (False, True):
            dofn = CommitShards(recipe.store, f"{recipe.store}/reports", plan, waits=waits)
            dofn.open = lambda: pool
            for task in tasks:
                list(dofn.process(task))

    with ThreadPoolExecutor(2) as hosts:
        pools = [_Counted(plan, counted, together) for counted in counts]
        for done in [hosts.submit(host, pool) for pool in pools]:
            done.result()
    assert sorted(counts[0] + counts[1]) == sorted(task.key for task in tasks)
    assert all(counts), "one host encoded every shard"
    found = [Store(recipe.store).shard("encode", task.key).files[0].sha256 for task in tasks]
    assert sorted(found) == sorted(digests_of(expected).values())


def test_a_shard_that_another_host_encodes_is_left_to_the_end(
    make: Callable[..., Artifact], tiny_sdxl: Path, tmp_path: Path
) -> None:
    recipe = encode_recipe(tmp_path / "store", tiny_sdxl)
    images = images_of(Store(recipe.store), pictures_of(1), tmp_path)
    (entry,) = images.files
    plan = EncodingPlan(
        EncodeJob("torch", str(tiny_sdxl), batch_size=4, device="cpu"), TransformSettings.of(recipe)
    )
    dofn = CommitShards(recipe.store, f"{recipe.store}/reports", plan, waits=False)
    task = task_of("k" * 64, images.url(entry.path), entry.sha256)
    store = Store(recipe.store)
    with store.shard_lock("encode", task.key):
        assert list(dofn.process(task)) == [] and store.shard("encode", task.key) is None
    assert list(dofn.process(task)) == [task.key] and store.shard("encode", task.key) is not None


def test_a_changed_caption_or_picture_rebuilds_one_shard(make: Callable[..., Artifact]) -> None:
    before = digests_of(make(pictures_of()))
    captioned = pictures_of()
    captioned[1]["01003"] = (captioned[1]["01003"][0], ("another",))
    pictured = pictures_of()
    pictured[2]["02006"] = (picture_of(999), pictured[2]["02006"][1])
    for changed in (captioned, pictured):
        assert len(digests_of(make(changed)).keys() & before.keys()) == 2


def test_another_vae_transform_or_batch_size_changes_every_shard(
    make: Callable[..., Artifact], tiny_vae: Path
) -> None:
    before = digests_of(make(pictures_of()))
    for changed in ({"vae": tiny_vae}, {"flip": True}, {"batch_size": 2}):
        assert not digests_of(make(pictures_of(), **changed)).keys() & before.keys()


def test_flip_stores_both_variants_and_counts_them_once(
    make: Callable[..., Artifact], tiny_sdxl: Path
) -> None:
    shards = pictures_of(2, 9)
    shards[0]["00004"] = (picture_of(77), ("one", "two"))
    plain, artifact = make(shards), make(shards, flip=True)
    latents = open_latents(artifact.uri)
    assert latents.groups() == open_latents(plain.uri).groups()
    assert artifact.summary["samples"] == plain.summary["samples"] == 18
    encoder, pictures = Encoder(Base.open(tiny_sdxl), device="cpu"), {}
    for data, _ in (item for shard in shards for item in shard.values()):
        pixels = np.asarray(Image.open(io.BytesIO(data)), np.float32)[:, ::-1][:, 4:36]
        pictures[digest_bytes(data)] = pixels.transpose(2, 0, 1) / 127.5 - 1
    unflipped = {str(ref.groups): ref for ref in open_latents(plain.uri).shards}
    for ref in latents.shards:
        shard, before = LatentShard(ref.url), unflipped[str(ref.groups)]
        count = ref.groups["train/8x8"]
        assert shard.groups == {**ref.groups, "flipped/8x8": count}
        assert before.size < ref.size < 2 * before.size
        for index in range(count):
            sample, mirrored = (shard.sample(f"{s}/8x8", index) for s in ("train", "flipped"))
            assert not sample.flip and mirrored.flip
            same = {"mean": 0, "logvar": 0, "flip": None}
            assert replace(sample, **same) == replace(mirrored, **same)
            mean, _ = encoder.images(pictures[mirrored.id.hex()][None])
            np.testing.assert_allclose(from_bfloat16(mirrored.mean), mean[0], rtol=0.01, atol=1e-3)


def test_sd3_shards_hold_what_its_pipeline_would_encode(
    tiny_sd3: Path, tiny_sd3_without_t5: Path, tmp_path: Path
) -> None:
    for model, shape in ((tiny_sd3, (97, 80)), (tiny_sd3_without_t5, (77, 64))):
        images = images_of(Store(str(tmp_path / "s")), pictures_of(1), tmp_path)
        latents = open_latents(encode_images(encode_recipe(tmp_path / "s", model), images).uri)
        assert latents.info.items() >= Encoder(Base.open(model), device="cpu").info.items()
        shard = LatentShard(latents.shards[0].url)
        assert shard.prompt_embeds(1).shape == shape
        assert shard.sample("train/8x8", 0).mean.shape == (8, 8, 8)
        assert (shard.pooled_prompt_embeds(1).shape, shard.input_ids(1).shape) == ((48,), (2, 77))


def test_settings_without_effect_on_latents_are_not_in_the_key(tiny_sdxl: Path) -> None:
    settings = [
        encode.crop_to_bucket.settings_for_key(encode_recipe("s", tiny_sdxl, **settings))
        for settings in ({}, {"max_bad": 0.9}, {"device": "cuda"}, {"processes": 2})
    ]
    assert all(s == settings[0] for s in settings)
    for changed in ({"seed": 3}, {"batch_size": 2}):
        assert (
            encode.crop_to_bucket.settings_for_key(encode_recipe("s", tiny_sdxl, **changed))
            != settings[0]
        )


def test_committed_shards_are_reused_and_a_flipped_byte_is_not(
    make: Callable[..., Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = make(pictures_of())
    load, loads = encode_encoders.open_encoder, []
    monkeypatch.setattr(encode_encoders, "open_encoder", lambda job: loads.append(1) or load(job))
    assert make(pictures_of()).digest == artifact.digest and not loads

    damaged = sorted((tmp_path / "store/encode/shards").glob("*.safetensors"))[1]
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert make(pictures_of()).digest == artifact.digest
    assert len(loads) == 1


def test_bad_pictures_are_counted_and_only_too_many_are_fatal(
    make: Callable[..., Artifact],
) -> None:
    shards = pictures_of(each=10)
    shards[0]["00004"] = (b"not a picture", ("x",))
    assert make(shards).summary["bad"] == {"undecodable": 1}
    shards[2] |= {f"02{i:03}": (b"no", ("x",)) for i in range(5)}
    with pytest.raises(Failed, match=r"6 of 30 .*undecodable: 6.*encode\.max_bad \(0\.05"):
        make(shards)
    assert make(shards, max_bad=0.5).summary["samples"] == 24


def test_an_empty_result_is_an_error(make: Callable[..., Artifact]) -> None:
    nothing = [{"00000": (b"no", ("x",))}]
    with pytest.raises(Failed, match=r"no sample is left .undecodable: 1"):
        make(nothing, max_bad=1.0)
    with pytest.raises(Failed, match="no image shard"):
        make([])
    with pytest.raises(Failed, match="held-out"):
        make(pictures_of(1), holdout=0.999)


def test_a_size_is_a_multiple_of_the_models_factor_and_of_a_transformers_patches(
    tiny_sdxl: Path, tiny_sd3: Path, tmp_path: Path
) -> None:
    images = images_of(Store(str(tmp_path / "s")), pictures_of(1), tmp_path)
    for model, size, factor in ((tiny_sdxl, 34, 4), (tiny_sd3, 36, 8)):
        with pytest.raises(Refused, match=f"no multiple of the model's {factor}"):
            encode_images(encode_recipe(tmp_path / "s", model, resolution=size), images)


def test_shards_are_encoded_by_threads_too_and_unknown_options_refused(
    make: Callable[..., Artifact], tiny_sdxl: Path, tmp_path: Path
) -> None:
    images = images_of(Store(str(tmp_path / "s")), pictures_of(), tmp_path)
    recipe = encode_recipe(tmp_path / "s", tiny_sdxl)
    threads = {"direct_running_mode": "multi_threading", "direct_num_workers": 2}
    artifact = encode_images(recipe.model_copy(update={"beam": threads}), images)
    assert digests_of(artifact).keys() == digests_of(make(pictures_of())).keys()
    with pytest.raises(ValueError, match=r"did you mean beam\.direct_num_workers"):
        encode_images(recipe.model_copy(update={"beam": {"direct_num_worker": 2}}), images)


class _Diverging(Encoder):
    """A VAE that overflows on bright pictures, as SDXL's does in float16."""

    def images(self, pixels):
        mean, logvar = super().images(pixels)
        mean[pixels[:, 0, 0, 0] > 0] = np.inf
        return mean, logvar

    def texts(self, captions):
        embeds, pooled = super().texts(captions)
        embeds[[caption == "picture 2" for caption in captions]] = np.nan
        return embeds, pooled


def test_nan_latents_and_embeddings_are_left_out(tiny_sdxl: Path, tmp_path: Path) -> None:
    samples = samples_of(pictures_of(1, 24)[0])
    settings = TransformSettings.of(encode_recipe("s", tiny_sdxl))
    path = tmp_path / "a.safetensors"
    facts = ShardEncoder(_Diverging(Base.open(tiny_sdxl), device="cpu"), settings, 5).encode(
        samples, path
    )
    assert set(facts["bad_reasons"]) == {"NaN latent", "NaN embedding"}
    shard = LatentShard(path)
    assert sum(shard.groups.values()) + facts["bad"] == 24
    for group, count in shard.groups.items():
        for index in range(count):
            sample = shard.sample(group, index)
            assert np.isfinite(from_bfloat16(sample.mean)).all()
            assert np.isfinite(from_bfloat16(shard.prompt_embeds(sample.caption_rows[0]))).all()
    assert facts["captions"] == 2


def test_summary_counts_buckets_and_caption_lengths(make: Callable[..., Artifact]) -> None:
    shards = [
        {
            "0": (picture_of(0, 64, 64), ("ab",)),
            "1": (picture_of(1, 100, 50), ("a" * 100,)),
            "2": (picture_of(2, 50, 100), ("ab",)),
        }
    ]
    settings = {"resolution": 64, "aspect_buckets": True, "bucket_step": 16, "holdout": 0.0}
    summary = make(shards, **settings).summary
    assert summary["buckets"] == {"64x64": 1, "48x80": 1, "80x48": 1}
    assert summary["groups"] == {"train/12x20": 1, "train/16x16": 1, "train/20x12": 1}
    assert summary["caption_tokens"] == {"0": 2, "96": 1} and summary["truncated"] == 1
    assert summary["captions"] == 2 and summary["shards"] == 1
    rows = encode.EncodeStage.show(make(shards, **settings))[1].rows
    assert {"height x width": "64x64", "samples": 1} in rows


def test_a_warning_counts_pictures_without_a_caption(
    make: Callable[..., Artifact], caplog: pytest.LogCaptureFixture
) -> None:
    def told(*captions: tuple[str, ...]) -> list[str]:
        caplog.clear()
        pictures = {f"{n}": (picture_of(n), given) for n, given in enumerate(captions)}
        make([pictures], holdout=0.0)
        return [record.message for record in caplog.records if "no caption" in record.message]

    (line,) = told(("",), ("a",), ("",))
    assert line.startswith("encode: 2 of 3 pictures have no caption and train unconditionally")
    assert told(("a",), ("", "c")) == []


def test_cut_captions_are_summed_over_shards_reused_ones_too(
    make: Callable[..., Artifact], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = {"0": (picture_of(0), ("x" * 76,)), "1": (picture_of(1), ("a cat",))}
    second = {"2": (picture_of(2), ("y" * 76, "y" * 75))}
    make([first], holdout=0.0)
    (shard,) = (tmp_path / "store/encode/shards").glob("*.json")
    written = shard.stat().st_mtime_ns
    summary = make([first, second], holdout=0.0).summary
    assert shard.stat().st_mtime_ns == written, "it was reused"
    encoders = ("text_encoder", "text_encoder_2")
    assert summary["cut"] == {name: {"tokens": 77, "cut": 2} for name in encoders}
    encode.EncodeStage(encode_recipe(tmp_path, tmp_path), None, None).check(summary)
    (line,) = (one.message for one in caplog.records if " cut at " in one.message)
    assert line.startswith("encode: 2 of 4 captions are cut at 77 tokens, the limit of text_enc")


@pytest.mark.parametrize(("count", "warns"), [(0, False), (19, True), (20, False)])
def test_few_held_out_pictures_are_told(
    caplog: pytest.LogCaptureFixture, count: int, warns: bool
) -> None:
    summary = {
        "samples": 100,
        "holdout": count,
        "copies_left_out": 0,
        "bad": {},
        "caption_tokens": {},
        "cut": {},
    }
    encode.EncodeStage(encode_recipe("s", Path("base")), None, None).check(summary)
    expected = ["encode: fewer than 20 held-out pictures (19): a gate on them can hardly tell "]
    found = [record.message[: len(expected[0])] for record in caplog.records]
    assert found == (expected if warns else [])


def test_a_remote_store_has_the_same_artifact(make: Callable[..., Artifact]) -> None:
    assert make(pictures_of(), "memory://encode-store").digest == make(pictures_of()).digest


def test_progress_ends_with_every_picture(tiny_sdxl: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    images = images_of(Store(str(tmp_path / "s")), pictures_of(), tmp_path)
    encode_images(encode_recipe(tmp_path / "s", tiny_sdxl), images, seen=seen)
    assert (21, 21) in seen and seen[-1] == (3, 3), "pictures, then shards are searched"


def test_a_replaced_image_shard_is_not_encoded(
    make: Callable[..., Artifact], tiny_sdxl: Path, tmp_path: Path
) -> None:
    """A replaced tar would otherwise count as encoded."""
    recipe = encode_recipe(tmp_path / "store", tiny_sdxl)
    store = Store(recipe.store)
    images = images_of(store, pictures_of(1), tmp_path)
    (entry,) = (entry for entry in images.files if entry.path.endswith(".tar"))
    other = tmp_path / "other.tar"
    write_tar(other, samples_of({"00000": (picture_of(99), ("another",))}))
    shutil.copyfile(other, images.url(entry.path))
    with pytest.raises(Damaged, match=r"\.tar is damaged: .* run again"):
        encode_images(recipe, images)
    assert not list((tmp_path / "store/encode").glob("shards/*.json"))
    assert store.find("download", images.key) is None
