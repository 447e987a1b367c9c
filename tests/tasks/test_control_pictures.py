"""Control pictures: from every kind of source through crop, mirror and bucket to latent shards."""

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from download_stage import build, rows_of, samples_of
from encode_stage import encode_images, encode_recipe
from encoder_inputs import BUCKETS, SQUARE
from picture_bytes import encode_picture
from PIL import Image
from shortest_recipe import shortest_recipe
from source_rows import write_list
from tar_sources import packed

from artifacts.image_shards import Sample, write_tar
from artifacts.latent_shards import LatentShard, open_latents
from artifacts.records import digest_bytes
from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Refused
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.folder import Base
from runtimes.sample.control_pictures import read_controls
from tasks import control_pictures
from tasks.control_pictures import ControlPictures, local_files
from tasks.download.folders import serve_folder
from tasks.download.lists import ServedAt
from tasks.encode.crop_to_bucket import TransformSettings, bucket_sizes, transform
from tasks.pictures import Pictures

COUNT = 4


def levels(number: int) -> np.ndarray:
    """The control picture [32, 48, 3] u8 of a picture: a block at a place of its own."""
    control = np.zeros((32, 48, 3), np.uint8)
    control[8:24, 4 * number : 4 * number + 16] = (255, 128, 0)
    return control


def picture(number: int) -> bytes:
    """A PNG whose red and green are those of its control picture."""
    own = levels(number)
    own[..., 2] = 20 * number
    return encode_picture(Image.fromarray(own))


def control_file(number: int) -> bytes:
    return encode_picture(Image.fromarray(levels(number)))


def recipe_of(source: dict[str, Any], tmp_path: Path) -> Recipe:
    (tmp_path / "store").mkdir(exist_ok=True)
    return shortest_recipe(
        store=str(tmp_path / "store"),
        source=source,
        train={"method": "controlnet"},
        download={
            **{"image_size": 16, "min_image_size": 1, "allow_hosts": ["127.0.0.1"]},
            **{"max_requests_per_host": None, "retries": 0},
            **{"encode_format": "png", "encode_quality": 1},
        },
        beam={"direct_running_mode": "in_memory", "direct_num_workers": 1},
    )


def folder_with(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / "photos"
    for number in range(COUNT):
        files = {f"{number}.png": picture(number), f"{number}.txt": b"%d" % number}
        files[name.format(number)] = control_file(number)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    return folder


def source_of(kind: str, tmp_path: Path) -> dict[str, Any]:
    """A source of COUNT pictures, each with its control picture."""
    if kind == "files beside":
        folder = folder_with(tmp_path, "{}.control.png")
        return {"kind": "folder", "path": str(folder), "control": "files"}
    if kind == "folder":
        folder = folder_with(tmp_path, "edges/{}.PNG")
        own = {"control_folder": str(folder / "edges")}
        return {"kind": "folder", "path": str(folder), "control": "files", **own}
    if kind == "dataset":
        rows = [
            {"image": picture(n), "text": str(n), "edges": control_file(n)} for n in range(COUNT)
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
        own = {"control": "column", "control_column": "edges"}
        return {"kind": "dataset", "path": str(tmp_path), **own}
    files = {}
    for n in range(COUNT):
        files |= {f"{n}.png": picture(n), f"{n}.txt": b"%d" % n}
        files[f"{n}.control.png"] = control_file(n)
    packed(tmp_path / "0.tar", files.items())
    extension = {"image_extension": "png", "control": "files"}
    return {"kind": "tars", "path": str(tmp_path / "0.tar"), **extension}


def check_controls(artifact: Artifact) -> None:
    """Each control picture in the shards has the red and green of its picture."""
    assert artifact.summary["outcomes"] == {"success": COUNT}
    samples = samples_of(artifact)
    assert sorted(sample.captions[0] for sample in samples) == [str(n) for n in range(COUNT)]
    for sample in samples:
        assert sample.control is not None and sample.mask is None
        control = np.asarray(Image.open(io.BytesIO(sample.control))).astype(int)
        image = np.asarray(Image.open(io.BytesIO(sample.image))).astype(int)
        assert control.shape == image.shape == (16, 24, 3)
        assert np.abs(control - image)[..., :2].max() <= 1
        assert not control[..., 2].any()


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("kind", ["files beside", "folder", "dataset", "tars"])
def test_sources_have_control_pictures_beside_their_pictures(kind: str, tmp_path: Path) -> None:
    check_controls(build(recipe_of(source_of(kind, tmp_path), tmp_path)))


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_control_pictures_of_a_list_are_fetched_and_a_lost_one_fails_its_row(
    tmp_path: Path,
) -> None:
    folder = folder_with(tmp_path, "edges/{}.png")
    rows = [
        {"url": f"{n}.png", "caption": str(n), "control": f"edges/{n}.png"} for n in range(COUNT)
    ]
    path = write_list(tmp_path / "list.parquet", rows)
    with serve_folder(folder, 0, ServedAt) as served:
        source = {"kind": "urls", "path": path, "base_url": served.base_url, "control": "column"}
        check_controls(build(recipe_of(source, tmp_path)))
        (folder / "edges/1.png").unlink()
        (tmp_path / "again").mkdir()
        lost = build(recipe_of(source, tmp_path / "again"))
    failed = {r["url"]: r["error_message"] for r in rows_of(lost).values() if r["error_message"]}
    assert failed == {"1.png": "control picture: http 404"}


def test_a_source_without_any_control_picture_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "{}.edges.png")
    recipe = recipe_of({"kind": "folder", "path": str(folder), "control": "files"}, tmp_path)
    with pytest.raises(Refused, match=r"NAME\.control\.png"):
        build(recipe)


@pytest.mark.parametrize("settings", [SQUARE, BUCKETS], ids=["square", "buckets"])
@pytest.mark.parametrize("crop", ["center", "random"])
@pytest.mark.parametrize("size", [(191, 128), (50, 33)])
def test_a_control_picture_is_cropped_and_mirrored_as_its_picture(
    settings: TransformSettings, crop: str, size: tuple[int, int]
) -> None:
    y, x = np.mgrid[: size[1], : size[0]]
    waves = np.sin(5 * x / size[0]) + np.cos(3 * y / size[1] + x / size[0])
    image = Image.fromarray(np.rint(255 * (waves + 2) / 4).astype(np.uint8)).convert("RGB")
    settings = replace(settings, crop=crop, flip=True, seed=1)
    variants = transform(
        *(image, bytes([200] * 32), {}, settings, bucket_sizes(settings, 4)), control=image
    )
    assert [variant.flip for variant in variants] == [False, True]
    for variant in variants:
        assert variant.control is not None and variant.control.shape == variant.pixels.shape
        seen = (variant.pixels + 1) * 127.5
        assert np.abs(variant.control - seen).max() < 12  # Lanczos and bilinear differ


def images_of(store: Store, tmp_path: Path, without: int | None = None) -> Artifact:
    samples = []
    for n in range(12):
        data = picture(n)
        control = None if n == without else control_file(n)
        meta = {"sha256": digest_bytes(data)}
        samples.append(Sample(f"{n:03}", data, "png", (str(n),), meta, control=control))
    write_tar(tmp_path / "shard.tar", samples)
    key = digest_bytes((tmp_path / "shard.tar").read_bytes())
    draft = store.draft(KeyParts("download", 1, {}, {"pictures": key}))
    local = {".tar": str(tmp_path / "shard.tar")}
    draft.add_shard(store.commit_shard("download", key, local, {"samples": len(samples)}))
    return draft.commit({}, {})


def controlled_recipe(tmp_path: Path, model: Path) -> Recipe:
    recipe = encode_recipe(tmp_path / "store", model, flip=True, holdout=0.3, max_bad=0.2)
    source = {"kind": "folder", "path": str(tmp_path), "control": "files"}
    settings = recipe.model_dump() | {"source": source, "train": {"method": "controlnet"}}
    return Recipe.model_validate(settings)


@pytest.mark.slow
def test_latent_shards_have_pixels_for_sdxl_and_evaluations_follow_the_same(
    tiny_sdxl: Path, tmp_path: Path, own_cache: Path
) -> None:
    recipe = controlled_recipe(tmp_path, tiny_sdxl)
    images = images_of(Store(recipe.store), tmp_path, without=5)
    artifact = encode_images(recipe, images)
    assert artifact.summary["bad"] == {"no control picture": 1}
    latents = open_latents(artifact.uri)
    assert latents.info["control"] == "pixels"
    (ref,) = latents.shards
    shard = LatentShard(ref.url)
    rows = [shard.sample(g, n) for g, count in shard.groups.items() for n in range(count)]
    assert len(rows) > 11
    by_id = {digest_bytes(picture(n)): levels(n) for n in range(12)}
    held_out = []
    for row in rows:
        whole = by_id[row.id.hex()][:, 8:40].transpose(2, 0, 1)
        assert row.control is not None and row.control.dtype == np.uint8
        np.testing.assert_array_equal(row.control, whole[..., ::-1] if row.flip else whole)
    for group, count in shard.groups.items():
        if group.startswith("holdout/"):
            held_out += [shard.sample(group, n).control for n in range(count)]
    assert held_out
    drawn = ControlPictures.read(
        {"": Pictures(images)}, recipe, Base.open(tiny_sdxl).encoders["size_step"]
    )
    assert len(drawn.pictures) == len(held_out)
    chosen = read_controls(local_files(drawn.of(["?", "?"])), (32, 32))
    known = [control for control in held_out if control is not None]
    assert all(any(np.array_equal(np.rint(c * 255), k) for k in known) for c in chosen)
    (caption, own), *_ = drawn.by_caption.items()
    assert drawn.of([caption]) == list(own[:1])


@pytest.mark.parametrize(
    ("holdout", "read"),
    [
        (0.0, 1),  # two training pictures suffice, since none is held out
        (0.999, 1),
        (1e-9, 3),  # the bound
    ],
)
def test_no_more_tars_are_read_for_control_pictures_than_needed(
    holdout: float, read: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_pictures, "MOST", 2)
    monkeypatch.setattr(control_pictures, "MOST_TARS", 3)
    opened = []

    class Tar:
        def read(self) -> list[Sample]:
            opened.append(self)
            datas = map(picture, range(COUNT))
            return [
                Sample("0", d, "png", ("",), {"sha256": digest_bytes(d)}, control=control_file(0))
                for d in datas
            ]

    recipe = encode_recipe(tmp_path, tmp_path, holdout=holdout)
    tars = SimpleNamespace(shards=[Tar() for _ in range(5)])
    drawn = ControlPictures.read({"": cast("Pictures", tars)}, recipe, 8)
    assert len(drawn.pictures) == 2 and len(opened) == read


@pytest.mark.slow
def test_latent_shards_have_means_for_flux(tiny_flux: Path, tmp_path: Path) -> None:
    recipe = controlled_recipe(tmp_path, tiny_flux)
    artifact = encode_images(recipe, images_of(Store(recipe.store), tmp_path))
    assert open_latents(artifact.uri).info["control"] == "latents"
    (ref,) = open_latents(artifact.uri).shards
    shard = LatentShard(ref.url)
    (group, *_) = shard.groups
    row = shard.sample(group, 0)
    assert row.control is not None
    assert row.control.shape == row.mean.shape and row.control.dtype == np.uint16
