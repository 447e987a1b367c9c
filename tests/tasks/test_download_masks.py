"""Masks of the loss: from every kind of source into the image shards, resized as their pictures."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from download_stage import build, rows_of, samples_of
from picture_bytes import encode_picture
from picture_server import Web
from PIL import Image
from shortest_recipe import shortest_recipe
from source_rows import write_list
from tar_sources import packed

from artifacts.image_shards import Sample
from artifacts.store import Artifact
from configs.errors import Refused
from configs.settings.data import Download
from configs.settings.recipe import Recipe
from tasks import download
from tasks.download.decode import PictureResizer
from tasks.download.folders import serve_folder
from tasks.download.http import FetchFailed
from tasks.download.lists import ServedAt

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

COUNT = 6
UNMASKED = 4  # this picture has no mask


def shown(number: int) -> np.ndarray:
    """The mask [32, 48] u8 of a picture: a block at a place of its own."""
    mask = np.zeros((32, 48), np.uint8)
    mask[8:24, 4 * number : 4 * number + 16] = 255
    return mask


def picture(number: int, alpha: bool = False) -> bytes:
    """A PNG of 48 x 32 pixels whose red is the mask."""
    levels = np.full((32, 48, 4), 255, np.uint8)
    levels[..., 0] = shown(number)
    levels[..., 1] = 30 * number
    levels[..., 3] = shown(number) if alpha else 255
    return encode_picture(Image.fromarray(levels if alpha else levels[..., :3]))


def mask_file(number: int) -> bytes:
    return encode_picture(Image.fromarray(shown(number)))


def recipe_of(source: dict[str, Any], tmp_path: Path, **settings: Any) -> Recipe:
    (tmp_path / "store").mkdir(exist_ok=True)
    return shortest_recipe(
        store=str(tmp_path / "store"),
        source=source,
        train={"masked_loss": {}},
        download={
            "image_size": 16,
            "min_image_size": 1,
            "allow_hosts": ["127.0.0.1"],
            "max_requests_per_host": None,
            "retries": 0,
            **settings,
        },
        beam={"direct_running_mode": "in_memory", "direct_num_workers": 1},
    )


def by_number(samples: list[Sample]) -> dict[int, Sample]:
    return {int(sample.captions[0]): sample for sample in samples}


def check_masks(artifact: Artifact, without: set[int]) -> None:
    """Each mask in the shards is the red channel of its picture, which was resized alike."""
    assert artifact.summary["outcomes"] == {"success": COUNT}
    samples = by_number(samples_of(artifact))
    assert samples.keys() == set(range(COUNT))
    for number, sample in samples.items():
        assert (sample.mask is None) == (number in without), number
        if sample.mask is not None:
            mask = np.asarray(Image.open(io.BytesIO(sample.mask)))
            red = shown(number).reshape(16, 2, 24, 2).mean((1, 3))
            assert mask.shape == (16, 24) and np.abs(mask - red).max() <= 1


def folder_with(tmp_path: Path, mask: str = "", *, alpha: bool = False) -> Path:
    """A folder of pictures, whose masks are in files of such names."""
    folder = tmp_path / "photos"
    for number in range(COUNT):
        files = {f"a/{number}.png": picture(number, alpha), f"a/{number}.txt": b"%d" % number}
        if mask and number != UNMASKED:
            files[mask.format(number)] = mask_file(number)
        for path, data in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    ("name", "mask_folder"),
    [("a/{}.mask.png", None), ("a/{}-masklabel.png", None), ("masks/a/{}.PNG", "masks")],
)
def test_masks_of_a_folder_are_files_and_no_pictures(
    tmp_path: Path, name: str, mask_folder: str | None
) -> None:
    folder = folder_with(tmp_path, name)
    where = {} if mask_folder is None else {"mask_folder": str(folder / mask_folder)}
    source = {"kind": "folder", "path": str(folder), "mask": "files", **where}
    artifact = build(recipe_of(source, tmp_path))
    check_masks(artifact, {UNMASKED})
    changed = folder / name.format(1)
    changed.write_bytes(encode_picture(Image.new("L", (48, 32), 7)))
    again = by_number(samples_of(build(recipe_of(source, tmp_path))))
    mask = np.asarray(Image.open(io.BytesIO(again[1].mask or b"")))
    assert np.unique(mask).tolist() == [7]


def test_the_alpha_channel_is_a_mask_also_of_pictures_that_are_stored_as_jpg(
    tmp_path: Path,
) -> None:
    folder = folder_with(tmp_path, alpha=True)
    (folder / f"a/{UNMASKED}.png").write_bytes(picture(UNMASKED))
    source = {"kind": "folder", "path": str(folder)}
    masked = build(recipe_of({**source, "mask": "alpha"}, tmp_path))
    check_masks(masked, {UNMASKED})
    assert {sample.extension for sample in samples_of(masked)} == {"jpg"}


def test_a_dataset_has_masks_in_a_column(tmp_path: Path) -> None:
    rows = [
        {
            "image": {"bytes": picture(number), "path": None},
            "text": str(number),
            "seg": {"bytes": None if number == UNMASKED else mask_file(number), "path": None},
        }
        for number in range(COUNT)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    source = {"kind": "dataset", "path": str(tmp_path), "mask": "column", "mask_column": "seg"}
    check_masks(build(recipe_of(source, tmp_path)), {UNMASKED})


def test_tars_have_masks_in_files(tmp_path: Path) -> None:
    files = {}
    for number in range(COUNT):
        files[f"{number}.jpg"] = picture(number)
        files[f"{number}.txt"] = str(number).encode()
        if number != UNMASKED:
            files[f"{number}.mask.png"] = mask_file(number)
    packed(tmp_path / "0.tar", files.items())
    source = {"kind": "tars", "path": str(tmp_path / "0.tar"), "mask": "files"}
    first = build(recipe_of(source, tmp_path))
    check_masks(first, {UNMASKED})
    tars = [first.url(file.path) for file in first.files if file.path.endswith(".tar")]
    (tmp_path / "again").mkdir()
    own = recipe_of({**source, "path": tars[0]}, tmp_path / "again")
    check_masks(build(own), {UNMASKED})  # our own download is a source


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_masks_of_a_list_are_fetched_and_a_lost_one_fails_its_row(
    tmp_path: Path, kind: str
) -> None:
    folder = folder_with(tmp_path, "masks/{}.png")
    rows = [
        {
            "url": f"a/{number}.png",
            "caption": str(number),
            "mask": "" if number == UNMASKED else f"masks/{number}.png?signature=sesame",
        }
        for number in range(COUNT)
    ]
    path = write_list(tmp_path / f"list.{kind}", rows)
    with serve_folder(folder, 0, ServedAt) as served:
        base = {"kind": "urls", "path": path, "format": kind, "base_url": served.base_url}
        source = {**base, "mask": "column"}
        recipe = recipe_of(source, tmp_path)
        artifact = build(recipe)
        check_masks(artifact, {UNMASKED})
        for file in (tmp_path / "store").rglob("*"):
            assert not file.is_file() or b"sesame" not in file.read_bytes()
        (folder / "masks/1.png").unlink()
        (folder / "masks/2.png").write_bytes(encode_picture(Image.new("L", (32, 32))))
        (folder / "masks/3.png").write_bytes(b"no mask")
        lost = build(recipe_of(source, tmp_path, image_size=17))
    failed = {r["url"]: r["error_message"] for r in rows_of(lost).values() if r["error_message"]}
    assert failed == {
        "a/1.png": "mask: http 404",
        "a/2.png": "mask: other aspect ratio than the picture's",
        "a/3.png": "mask: not an image",
    }


def test_a_retry_of_failed_rows_keeps_the_masks_of_the_others(tmp_path: Path) -> None:
    with Web() as web:
        rows = [{"url": f"good/{n}", "caption": str(n), "mask": f"good/{n}"} for n in range(COUNT)]
        rows += [{"url": "good/50", "caption": "50", "mask": "good/51"}]
        web.broken.add("51")
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "list.parquet")
        source = {"kind": "urls", "path": str(tmp_path / "list.parquet"), "mask": "column"}
        recipe = recipe_of({**source, "base_url": f"http://{web.host}"}, tmp_path, backoff=0.01)
        first = build(recipe)
        assert first.summary["outcomes"] == {"success": COUNT, "mask: http 503": 1}
        web.broken.clear()
        second = build(recipe, retry_failed=True)
    masks = {s.captions[0]: s.mask for s in samples_of(first)}
    again = {s.captions[0]: s.mask for s in samples_of(second)}
    assert again.pop("50") is not None and again == masks and None not in masks.values()


@pytest.mark.parametrize("mode", ["no", "keep_ratio", "keep_ratio_largest", "center_crop"])
@pytest.mark.parametrize("only_if_bigger", [True, False])
def test_a_mask_is_resized_as_its_picture(mode: str, only_if_bigger: bool) -> None:
    settings = Download(
        image_size=40, resize_mode=mode, only_if_bigger=only_if_bigger, encode_format="png",
        encode_quality=1, min_image_size=1,
    )  # fmt: skip
    resizer = PictureResizer(settings)
    for width, height in (100, 60), (60, 100), (30, 20):
        grey = Image.fromarray(np.linspace(0, 255, width * height).reshape(height, width)).convert(
            "L"
        )
        resized = resizer.resize(encode_picture(grey))
        assert not isinstance(resized, str)
        alike = np.asarray(Image.open(io.BytesIO(resized.picture)).convert("L"), int)
        for size in (width, height), (2 * width, 2 * height):
            body = encode_picture(grey.resize(size, Image.Resampling.NEAREST))
            mask = resizer.resize_mask(body, width, height)
            found = np.asarray(Image.open(io.BytesIO(mask)), int)
            assert found.shape == alike.shape and np.abs(found - alike).max() <= 1
    with pytest.raises(FetchFailed, match="other aspect ratio"):
        resizer.resize_mask(encode_picture(grey.resize((31, 20))), 30, 20)


def test_what_a_download_pads_is_not_trained_on() -> None:
    settings = Download(image_size=40, resize_mode="border", min_image_size=1)
    white = encode_picture(Image.new("L", (80, 40), 255))
    mask = PictureResizer(settings).resize_mask(white, 80, 40)
    found = np.asarray(Image.open(io.BytesIO(mask)))
    assert found[10:30].min() == 255 and found[:10].max() == found[30:].max() == 0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"kind": "folder", "mask": "files"}, r"no file with NAME\.mask\.png"),
        ({"kind": "folder", "mask": "files", "mask_folder": "{}/a"}, "no file with the name"),
        ({"kind": "folder", "mask": "column"}, r"source\.folder\.mask|source\.mask"),
    ],
)
def test_a_source_without_the_masks_that_it_names_is_refused(
    tmp_path: Path, source: dict[str, str], words: str
) -> None:
    folder = folder_with(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/other.png").write_bytes(mask_file(0))
    chosen = {name: value.format(tmp_path) for name, value in source.items()}
    with pytest.raises((Refused, ValueError), match=words):
        download.check(recipe_of({**chosen, "path": str(folder)}, tmp_path))
