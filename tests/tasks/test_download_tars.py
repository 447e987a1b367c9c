"""Tars of others: each picture has its own caption, and no tar is trusted or read again."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
import source_rows
from download_stage import build, samples_of
from PIL import Image
from store_servers import REMOTE, RequestsTo, UrlOf
from tar_sources import add_files, jpg, make_recipe, packed, rows_of, written

from artifacts.image_shards import read_rows
from artifacts.store import Store
from configs.errors import Refused
from configs.settings.recipe import Recipe
from tasks import download
from tasks.download import source_files, tars
from tasks.download.folders import serve_folder
from tasks.download.lists import ServedAt

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def test_samples_of_webdataset_s_writer_are_downloaded_with_their_captions(tmp_path: Path) -> None:
    for number in range(3):
        written(tmp_path / f"{number:05}.tar", range(10 * number, 10 * number + 10))
    more = {"aesthetic_column": "score", "additional_columns": ["licence"]}
    path = tmp_path / "{00000..00002}.tar"
    for source, caption in ({}, "caption"), ({"caption_column": "caption"}, "from json"):
        artifact = build(make_recipe(path, tmp_path / "store", **source, **more))
        assert artifact.summary["outcomes"] == {"success": 30}
        digests = {hashlib.sha256(jpg(n)).hexdigest(): n for n in range(30)}
        found = {}
        for sample in samples_of(artifact):
            n = digests[sample.meta["sha256"]]
            found[n] = (sample.captions, sample.meta["aesthetic_score"], sample.meta["licence"])
            with Image.open(io.BytesIO(sample.image)) as image:
                assert image.size == (20, 16)
        assert found == {n: ((f"{caption} {n}",), n / 2, f"cc {n}") for n in range(30)}
    assert len(download.plan(make_recipe(path)).shards) > 4


def test_our_own_download_is_a_source(tmp_path: Path) -> None:
    written(tmp_path / "0.tar", range(12), captions=["one", "two"])
    first = build(make_recipe(tmp_path / "0.tar", tmp_path / "a", caption_column="captions"))
    again = make_recipe(tmp_path / "a/download/shards", tmp_path / "b", caption_column="captions")
    second = build(again)
    assert second.summary["outcomes"] == {"success": 12}
    assert {sample.captions for sample in samples_of(second)} == {("one", "two")}
    stored = {hashlib.sha256(sample.image).hexdigest() for sample in samples_of(first)}
    assert {sample.meta["sha256"] for sample in samples_of(second)} == stored


@pytest.mark.extended
@pytest.mark.slow
def test_tars_of_img2dataset_are_a_source(tmp_path: Path) -> None:
    from img2dataset import download as img2dataset

    (tmp_path / "web").mkdir()
    for n in range(10):
        (tmp_path / f"web/{n}.jpg").write_bytes(jpg(25 * n))
    with serve_folder(tmp_path / "web", 0, ServedAt) as served:
        lines = [{"url": f"{served.base_url}/{n}.jpg", "caption": f"c {n}"} for n in range(11)]
        (tmp_path / "list.json").write_text(json.dumps(lines))
        img2dataset(
            url_list=str(tmp_path / "list.json"),
            input_format="json",
            url_col="url",
            caption_col="caption",
            output_folder=str(tmp_path / "out"),
            output_format="webdataset",
            processes_count=1,
            thread_count=2,
            image_size=16,
            number_sample_per_shard=4,
            enable_wandb=False,
        )
    rows = rows_of(make_recipe(tmp_path / "out", tmp_path / "store"), tmp_path)
    assert sorted(caption for caption, _ in rows) == [f"c {n}" for n in range(10)]
    for caption, picture in rows:
        with Image.open(io.BytesIO(picture or b"")) as image:
            red = image.convert("RGB").getpixel((8, 8))[0]  # type: ignore[index]
        assert abs(red - 25 * int(caption[2:])) < 4, caption


@pytest.mark.parametrize("kind", REMOTE)
def test_of_tars_in_a_bucket_only_new_ones_are_read(
    kind: str, url_of: UrlOf, requests_to: RequestsTo, tmp_path: Path
) -> None:
    url = url_of(kind)
    for number in range(3):
        written(f"{url}/{number}.tar", range(10 * number, 10 * number + 10))
    recipe = make_recipe(f"{url}/{{0..2}}.tar", tmp_path / "store")
    asked = requests_to(kind)

    def plan(of: Recipe, lists: int = 0) -> tuple[download.DownloadPlan, list[str]]:
        """The plan, and the tars whose content is read, the first one for its columns."""
        before = len(asked)
        planned = download.plan(of)
        if lists and kind == "s3":
            assert len(listings(asked[before:])) == lists
        gets = [path for method, path in asked[before:] if method == "GET"]
        got = [path for path in gets if not path.startswith("/storage/")]  # GCS describes it there
        return planned, [name for name in ("0", "1", "2", "3") if f"/{name}.tar" in str(got)]

    # A tar's metadata are those of its folder's list, and the check asks for the first tar alone.
    first, read = plan(recipe, 2)
    assert read == ["0", "1", "2"]
    assert plan(recipe, 2) == (first, ["0"])
    assert build(recipe).summary["outcomes"] == {"success": 30}
    written(f"{url}/3.tar", range(30, 40))
    grown, read = plan(make_recipe(f"{url}/*.tar", tmp_path / "store"))
    assert read == ["0", "3"]
    assert grown.shards[: len(first.shards) - 1] == first.shards[:-1]
    missing = r"source\.path: \S*/4\.tar, \S*/5\.tar: no such file"
    with pytest.raises(Refused, match=missing):
        download.plan(make_recipe(f"{url}/{{0..5}}.tar", tmp_path / "store"))
    with pytest.raises(Refused, match=r"/23\.tar, and 76 others: no such file"):
        download.plan(make_recipe(f"{url}/{{0..99}}.tar", tmp_path / "store"))
    mixed = make_recipe(f"{url}{{,/[12].tar,/3.tar}}").source  # a folder, a glob and a file
    assert [file.name for file in tars.Tars(mixed)._files()] == [  # type: ignore[arg-type]
        f"{url}/{n}.tar" for n in range(4)
    ]


def listings(requests: list[tuple[str, str]]) -> list[str]:
    """Paths of the requests to S3 that list a bucket."""
    return [path for method, path in requests if method == "GET" and path.count("/") < 3]


def test_each_picture_is_read_once_by_a_plan_and_from_its_place_by_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(io.BytesIO):
        read_bytes = 0

        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            Counting.read_bytes += len(data)
            return data

    data = Path(written(tmp_path / "0.tar", range(50))).read_bytes()
    monkeypatch.setattr(source_files, "open_file", lambda _: Counting(data))
    source = tars.Tars(make_recipe(tmp_path / "0.tar").source)  # type: ignore[arg-type]
    (table,) = source._rows(str(tmp_path / "0.tar"))
    assert len(table) == 50 and Counting.read_bytes <= len(data)
    Counting.read_bytes = 0
    places = [
        tars.lists.PictureLocation(row["file"], row["row"]) for row in table.to_pylist()[40:45]
    ]
    assert list(source.pictures(places)) == [jpg(n) for n in range(40, 45)]
    assert Counting.read_bytes <= sum(len(jpg(n)) + 2048 for n in range(40, 45))


def test_colons_in_the_name_of_a_tar_are_no_chain_of_filesystems(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    Path(written(tmp_path / "0.tar", range(3))).rename(tmp_path / "in/a::0.tar")
    found = rows_of(make_recipe(tmp_path / "in"), tmp_path)
    assert sorted(found) == [(f"caption {n}", jpg(n)) for n in range(3)]


def test_keys_do_not_depend_on_the_order_of_the_list(tmp_path: Path) -> None:
    for number in range(3):
        written(tmp_path / f"{number}.tar", range(10 * number, 10 * number + 10))
    paths = ("", "*.tar", "{0..2}.tar", "{2,0,1,1}.tar")
    plans = [
        download.plan(make_recipe(f"{tmp_path}/{path}", f"memory://{n}"))
        for n, path in enumerate(paths)
    ]
    assert len({tuple(shard.key for shard in plan.shards) for plan in plans}) == 1
    assert len({plan.source_digest for plan in plans}) == 1


def test_long_names_belong_to_their_samples(tmp_path: Path) -> None:
    for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        with tarfile.open(tmp_path / "0.tar", "w", format=kind) as tar:
            for n in range(3):
                name = f"{'Bär/' * 80}{n}"
                add_files(tar, [(f"{name}.jpg", jpg(n)), (f"{name}.txt", b"caption %d" % n)])
        found = rows_of(make_recipe(tmp_path / "0.tar", f"memory://{kind}"), tmp_path)
        assert found == [(f"caption {n}", jpg(n)) for n in range(3)]


def test_a_caption_is_a_file_and_other_columns_are_of_the_json(tmp_path: Path) -> None:
    """Otherwise every caption, or every value, would be missing without an error."""
    only_json = packed(tmp_path / "a.tar", [("1.jpg", jpg(1)), ("1.json", b'{"txt": "a cat"}')])
    with pytest.raises(Refused, match=r"source\.caption_column: .*no column 'txt'"):
        download.plan(make_recipe(only_json))
    only_file = packed(tmp_path / "b.tar", [("1.jpg", jpg(1)), ("1.txt", b"a cat")])
    for setting in {"additional_columns": ["txt"]}, {"aesthetic_column": "txt"}:
        with pytest.raises(Refused, match="no column 'txt'"):
            download.plan(make_recipe(only_file, **setting))
    values = b'{"txt": 5.5}'
    both = packed(tmp_path / "c.tar", [("1.jpg", jpg(1)), ("1.txt", b"a cat"), ("1.json", values)])
    (row,) = source_rows.rows_of(make_recipe(both, additional_columns=["txt"]), tmp_path)
    assert (row.captions, row.additional) == (("a cat",), {"txt": 5.5})


def test_large_captions_are_planned_in_the_memory_of_small_ones(tmp_path: Path) -> None:
    texts = [b"%d" % n + b"x" * (2**20 - 9) for n in range(120)]
    files = [
        part for n, text in enumerate(texts) for part in ((f"{n}.jpg", b"p"), (f"{n}.txt", text))
    ]
    source = tars.Tars(make_recipe(packed(tmp_path / "0.tar", files)).source)  # type: ignore[arg-type]
    (piece,) = source.pieces()
    found = [row["captions"][0] for table in piece.read() for row in table.to_pylist()]
    assert found == [text.decode() for text in texts]


def test_a_first_picture_named_like_a_compressed_file_is_read(tmp_path: Path) -> None:
    path = packed(tmp_path / "0.tar", [("BZh001.jpg", jpg(1)), ("BZh001.txt", b"a cat")])
    assert rows_of(make_recipe(path), tmp_path) == [("a cat", jpg(1))]


def test_ranges_are_counted_before_they_are_expanded(tmp_path: Path) -> None:
    for braces in ("{0..9999999999}", "{x,{0..9999}{0..9999}}", "{00..99}{0..99999}"):
        with pytest.raises(Refused, match="it names more than 1,000,000 files"):
            download.plan(make_recipe(f"{tmp_path}/{braces}.tar"))
    for braces in ("{a}", "{a,{b,c}d}", "{5..1}", "{0..9..3}x{01..10}", "{a-{0..9},b}"):
        source = tars.Tars(make_recipe(f"/{braces}.tar").source)  # type: ignore[arg-type]
        assert tars._count(f"/{braces}.tar") == len(source._paths())
    (tmp_path / r"a\b").mkdir()
    for name in ("0.tar", "{0..0}.tar"):
        written(tmp_path / r"a\b" / "0.tar", range(2))
        recipe = make_recipe(rf"{tmp_path}/a\b/{name}", f"memory://{name}")
        assert len(rows_of(recipe, tmp_path)) == 2


def test_files_beside_the_samples_are_counted_rows(tmp_path: Path) -> None:
    """Left out, they would hide pictures of an extension that nobody reads."""
    files = [("1.jpg", jpg(1)), ("1.txt", b"a"), ("README.md", b"of a tar"), ("index.json", b"{}")]
    found = rows_of(make_recipe(packed(tmp_path / "0.tar", files)), tmp_path)
    assert found == [("a", jpg(1)), ("", None), ("", None)]


@pytest.mark.parametrize("root", ["", "./"])
def test_hidden_members_and_hidden_tars_are_no_rows(tmp_path: Path, root: str) -> None:
    hidden = ("._1", ".thumbnails/1", "@eaDir/1", "__MACOSX/a/1", "a/.cache/1", "a/__meta__/1")
    shown = ("1", "a/2", "a/__3")
    files = [(f"{root}{name}.jpg", jpg(n)) for n, name in enumerate((*shown, *hidden))]
    tar = packed(tmp_path / "1.tar", files)
    (tmp_path / ".trash").mkdir()
    packed(tmp_path / "._1.tar", files)
    packed(tmp_path / ".trash/1.tar", files)
    for path in (tar, tmp_path):
        rows = rows_of(make_recipe(path, caption_column=None), tmp_path)
        assert rows == [("", jpg(n)) for n in range(len(shown))]


def test_a_tar_of_hidden_files_alone_is_an_error(tmp_path: Path) -> None:
    """As `tar cf 1.tar ~/.cache/pictures` writes it: it would have no rows, in silence."""
    hidden = "home/u/.cache/pictures/1.jpg"
    packed(tmp_path / "0.tar", [("1.jpg", jpg(0))])
    packed(tmp_path / "1.tar", [("home/u/LICENSE", b""), (hidden, jpg(1))])
    said = rf"1\.tar: cannot be read: its samples are all hidden, the first is '{hidden}': write"
    for path in (tmp_path, tmp_path / "1.tar"):
        with pytest.raises(Refused, match=said):
            download.plan(make_recipe(path, caption_column=None))


def test_a_tar_that_changes_after_it_was_planned_is_not_committed(tmp_path: Path) -> None:
    recipe = make_recipe(written(tmp_path / "0.tar", range(6)), tmp_path / "store")
    plan = download.plan(recipe)
    stage = download.DownloadStage(recipe, plan)
    draft = Store(recipe.store).draft(stage.parts)
    written(tmp_path / "0.tar", range(1, 7))
    with pytest.raises(Refused, match="changed while it was being read: run again"):
        stage.build(draft, lambda *_: None)
    again = build(recipe)
    names = [entry.path for entry in again.files if entry.path.endswith(".parquet")]
    found = {row["caption"] for name in names for row in read_rows(again.read(name))}
    assert found == {f"caption {n}" for n in range(1, 7)}
