"""What the download stage stores of a picture, and which pictures it shows."""

import hashlib
import json
import os
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from download_stage import PICTURES, build, make_recipe, rows, rows_of, samples_of
from encoder_inputs import SQUARE
from kiln_command import python
from picture_bytes import encode_picture
from picture_server import Web, picture, rotated_picture
from PIL import Image

from artifacts.image_shards import Sample, read_tar, write_tar
from artifacts.records import digest_bytes
from artifacts.store import KeyParts, Store
from configs.settings.recipe import Recipe
from tasks import download
from tasks.download import DownloadStage
from tasks.download.data_quality import DownloadStatistics
from tasks.download.decode import img2dataset_resizer
from tasks.encode.crop_to_bucket import bucket_sizes, decode, transform
from tasks.panels import PicturePanel

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def test_further_columns_are_in_each_picture_and_each_row(tmp_path: Path, web: Web) -> None:
    listed = [{**row, "likes": n, "licence": "cc0"} for n, row in enumerate(rows("gone/1"))]
    recipe = make_recipe(tmp_path, web, listed)
    source = recipe.source.model_copy(update={"additional_columns": ("likes", "licence")})
    artifact = build(recipe.model_copy(update={"source": source}))
    kept = {row["url"]: {"licence": "cc0", "likes": row["likes"]} for row in listed}
    tars = [artifact.url(e.path) for e in artifact.files if e.path.endswith(".tar")]
    samples = [sample for tar in tars for sample in read_tar(tar)]
    assert len(samples) == PICTURES
    for sample in samples:
        assert kept[sample.meta["url"]].items() <= sample.meta.items()
    found = {url: json.loads(row["additional"]) for url, row in rows_of(artifact).items()}
    assert found == kept


ODD = ("sized/4000x2", "sized/1x1", "sized/31x64", "sized/200x40", "sized/40x161")


def test_small_and_thin_pictures_are_dropped_by_default_and_counted(
    tmp_path: Path, web: Web
) -> None:
    recipe = make_recipe(tmp_path, web, rows(*ODD, "sized/160x40", "sized/32x32"))
    expected = {"success": PICTURES + 2, "too small": 3, "too thin": 2}
    assert build(recipe).summary["outcomes"] == expected


def test_small_and_thin_pictures_are_shown_if_the_recipe_allows_them(
    tmp_path: Path, web: Web
) -> None:
    listed = [{"url": url, "caption": ""} for url in ODD]
    recipe = make_recipe(tmp_path, web, listed, min_image_size=0, max_aspect_ratio=10_000)
    artifact = build(recipe)
    assert artifact.summary["outcomes"] == {"success": len(ODD)}
    assert [panel.title for panel in DownloadStage.show(artifact)][-1] == "Some of the pictures"


def test_pictures_of_later_shards_are_shown_where_the_first_has_none(tmp_path: Path) -> None:
    red = encode_picture(Image.new("RGB", (40, 20), "red"))
    store = Store(str(tmp_path / "store"))
    draft = store.draft(KeyParts("download", download.VERSION, {}, {}))
    write_tar(tmp_path / "a.tar", [])
    write_tar(tmp_path / "b.tar", [Sample("0", red, "png", ("red",))])
    for name in ("a.tar", "b.tar"):
        draft.write(name, (tmp_path / name).read_bytes())
    counts = {"rows": 2, "images": 1, "outcomes": {"success": 1}, "shards": 1}
    artifact = draft.commit({**counts, "data": DownloadStatistics().summary()}, {})
    panel = DownloadStage.show(artifact)[-1]
    assert isinstance(panel, PicturePanel)
    with Image.open(BytesIO(panel.png)) as grid:
        assert grid.getpixel((grid.width // 2, grid.height // 2)) == (255, 0, 0)


def test_a_picture_with_an_exif_orientation_is_stored_upright(tmp_path: Path, web: Web) -> None:
    listed = [{"url": "rotated", "caption": "", "sha256": digest_bytes(rotated_picture())}]
    (sample,) = samples_of(build(make_recipe(tmp_path, web, listed)))
    assert [sample.meta[name] for name in ("width", "height")] == [20, 16]
    assert [sample.meta[f"original_{name}"] for name in ("width", "height")] == [40, 32]
    square = replace(SQUARE, resolution=16, bucket_step=8, holdout=0.0, max_pixels=10_000)
    sha256 = hashlib.sha256(sample.image).digest()
    (seen,) = transform(
        decode(sample.image, 2**26), sha256, sample.meta, square, bucket_sizes(square, 4)
    )
    assert seen.original_size == (32, 40)
    red, _, blue = seen.pixels
    assert (red[:6] > 0.5).all() and (red[-6:] < -0.5).all() and (blue[-6:] > 0.5).all()


def test_a_pictures_identity_is_its_download_whatever_the_url_and_the_stored_size(
    tmp_path: Path, web: Web
) -> None:
    listed = rows(*(f"good/{n}?signature=again" for n in range(PICTURES)))
    found = []
    for number, size in enumerate((16, 24)):
        recipe = make_recipe(tmp_path, web, listed, store=f"store{number}", image_size=size)
        samples = samples_of(build(recipe))
        found.append({s.captions: (s.source_sha256, digest_bytes(s.image)) for s in samples})
    assert found[0].keys() == found[1].keys() and len(found[0]) == 2 * PICTURES
    for caption, (identity, stored) in found[0].items():
        assert found[1][caption][0] == identity
        assert found[1][caption][1] != stored
    assert len({identity for identity, _ in found[0].values()}) == PICTURES


def test_decoding_does_not_redirect_the_output_of_other_threads(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Talking(BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            os.write(1, b"another thread's line\n")
            return super().read(size)

    resizer = img2dataset_resizer()
    assert resizer(16, "keep_ratio", True)(Talking(picture(0)))[1:3] == (20, 16)
    assert "another thread's line" in capfd.readouterr().out


def test_the_decoder_writes_nothing_about_a_broken_picture() -> None:
    """Otherwise OpenCV prints lines of C++ for each of them, between those of the run."""
    gif = encode_picture(Image.effect_noise((40, 40), 50), "GIF")
    code = f"""if True:
        from configs.settings.data import Download
        from tasks.download.decode import PictureResizer
        assert PictureResizer(Download()).resize({gif[:-300]!r}) == "not an image"
    """
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_embedded_pictures_have_the_outcomes_of_fetched_ones(tmp_path: Path, web: Web) -> None:
    inside = [{"image": {"bytes": picture(n), "path": ""}, "text": f"{n}"} for n in range(6)]
    inside.append({"image": {"bytes": b"broken", "path": ""}, "text": "broken"})
    pq.write_table(pa.Table.from_pylist(inside), tmp_path / "inside.parquet")
    recipe = make_recipe(tmp_path, web, rows())
    source = {"kind": "dataset", "path": str(tmp_path / "inside.parquet")}
    recipe = Recipe.model_validate({**recipe.model_dump(), "source": source})
    artifact = build(recipe)
    assert artifact.summary["outcomes"] == {"not an image": 1, "success": 6}
    assert not web.requests
