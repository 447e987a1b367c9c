"""Tars of others: each picture has its own caption, and no tar is trusted or read again."""

import hashlib
import io
import json
import logging
import os
import random
import tarfile
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from download_stage import build, samples_of
from picture_bytes import encode_picture
from PIL import Image
from shortest_recipe import shortest_recipe
from store_servers import REMOTE, RequestsTo, UrlOf
from webdataset import TarWriter

from artifacts.image_shards import read_rows
from artifacts.store import Store
from configs.settings.recipe import Recipe
from tasks import download
from tasks.download import plan_parquet, tars
from tasks.download.download_shard import DownloadContext, planned_rows
from tasks.download.read_tars import samples
from tasks.download.row_fields_and_hash import Row
from tasks.download.serve_folder import serve_folder
from tasks.download.source_protocol import ServedAt

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

Files = Iterable[tuple[str, bytes]]


def make_recipe(
    path: Any, store: Any = "memory://tars", *, shard_size: int = 4, **source: Any
) -> Recipe:
    return shortest_recipe(
        source={"kind": "tars", "path": str(path), **source},
        store=str(store),
        download={"shard_size": shard_size, "image_size": 16, "min_image_size": 0},
        beam={"direct_running_mode": "in_memory", "direct_num_workers": 1},
        train={"aesthetic_score": "aesthetic_column" in source},
    )


def jpg(number: int) -> bytes:
    picture = Image.new("RGB", (40, 32), (number, 60, 90))
    return encode_picture(picture, "JPEG", comment=str(number))  # no two have equal bytes


def written(path: Any, numbers: Iterable[int], **more: Any) -> str:
    """A tar by WebDataset's writer, with picture n, caption n and json n of each number."""
    buffer = io.BytesIO()
    with TarWriter(buffer) as tar:
        for n in numbers:
            values = {"caption": f"from json {n}", "score": n / 2, "licence": f"cc {n}", **more}
            tar.write({"__key__": f"{n:05}", "jpg": jpg(n), "txt": f"caption {n}", "json": values})
    with fsspec.open(str(path), "wb") as stream:
        stream.write(buffer.getvalue())
    return str(path)


def packed(path: Path, files: Files) -> Path:
    """A tar of these files, in this order."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def rows_of(recipe: Recipe, scratch: Path) -> list[tuple[str, bytes | None]]:
    """(first caption, picture) of all rows, read shard by shard as the workers do."""
    return [(row.captions[0], _picture(row)) for row in whole_rows_of(recipe, scratch)]


def whole_rows_of(recipe: Recipe, scratch: Path) -> list[Row]:
    key, rows = plan_parquet.plan_key(), list[Row]()
    context = DownloadContext(recipe.store, "", recipe.source, recipe.download, ServedAt(), key)
    for number, shard in enumerate(download.plan(recipe).shards):
        folder = scratch / f"rows-{len(list(scratch.iterdir()))}-{number}"
        folder.mkdir()
        rows += planned_rows(shard, context, folder)
    return rows


def _picture(row: Row) -> bytes | None:
    return None if row.file is None else Path(row.file).read_bytes()


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
    with pytest.raises(download.SourceError, match=missing):
        download.plan(make_recipe(f"{url}/{{0..5}}.tar", tmp_path / "store"))
    with pytest.raises(download.SourceError, match=r"/23\.tar, and 76 others: no such file"):
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
    monkeypatch.setattr(tars, "open_file", lambda _: Counting(data))
    source = tars.Tars(make_recipe(tmp_path / "0.tar").source)  # type: ignore[arg-type]
    (table,) = source._rows(str(tmp_path / "0.tar"))
    assert len(table) == 50 and Counting.read_bytes <= len(data)
    Counting.read_bytes = 0
    places = [tars.PictureLocation(row["file"], row["row"]) for row in table.to_pylist()[40:45]]
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
                for extension, data in ("jpg", jpg(n)), ("txt", b"caption %d" % n):
                    member = tarfile.TarInfo(f"{'Bär/' * 80}{n}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        found = rows_of(make_recipe(tmp_path / "0.tar", f"memory://{kind}"), tmp_path)
        assert found == [(f"caption {n}", jpg(n)) for n in range(3)]


def test_a_sample_s_files_that_are_apart_are_an_error_not_another_s_caption(
    tmp_path: Path,
) -> None:
    pictures = [(f"{n}.jpg", jpg(n)) for n in range(3)]
    path = packed(tmp_path / "0.tar", [*pictures, *((f"{n}.txt", b"c") for n in range(3))])
    with pytest.raises(download.SourceError, match=r"0\.tar: .*sample '0' are not beside"):
        download.plan(make_recipe(path))


def test_a_sample_without_one_sure_picture_or_caption_is_a_row_without_a_picture(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = [
        *[("good/1.jpg", jpg(1)), ("good/1.txt", b"one\n"), ("good/1.seg.png", b"no picture")],
        *[("2.jpg", jpg(2)), ("2.PNG", jpg(2)), ("2.txt", b"two pictures")],
        *[("3.jpg", jpg(3)), ("3.txt", b"first"), ("3.txt", b"second")],
        ("4.txt", b"no picture"),
        *[("5.jpg", jpg(5)), ("5.txt", b"x" * (tars.MAX_TEXT + 1))],
        *[("__about__/it.json", b"[]"), ("README", b""), (".hidden", b""), ("._7.jpg", b"mac")],
        *[("7.jpg", jpg(7)), ("7.txt", "\ufeffein Bär".encode())],
        ("8.jpg", jpg(8)),
    ]
    path = packed(tmp_path / "0.tar", files)
    with caplog.at_level(logging.WARNING, logger="kiln"):
        found = rows_of(make_recipe(path, shard_size=99), tmp_path)
    assert found == [
        ("one", jpg(1)),
        ("two pictures", None),
        ("", None),
        ("no picture", None),
        ("", None),
        ("ein Bär", jpg(7)),
        ("", jpg(8)),
    ]
    assert "0.tar: 4 samples have no usable picture, the first is '2'" in caplog.text
    chosen = make_recipe(path, "memory://chosen", shard_size=99, image_extension="PNG")
    assert rows_of(chosen, tmp_path)[1] == ("two pictures", jpg(2))


def test_a_malformed_json_gives_no_picture_an_empty_caption(tmp_path: Path) -> None:
    path = packed(
        tmp_path / "0.tar",
        [
            *[("0.jpg", jpg(0)), ("0.json", b'{"caption": "a cat", "likes": 3}')],
            *[("1.jpg", jpg(1)), ("1.json", b'{"caption": "cut o')],
            *[("2.jpg", jpg(2)), ("2.json", b"[" * 100_000)],
            *[("3.jpg", jpg(3)), ("3.json", b'["no", "object"]')],
            ("4.jpg", jpg(4)),
        ],
    )
    found = rows_of(make_recipe(path, caption_column="caption"), tmp_path)
    assert found == [("a cat", jpg(0)), ("", None), ("", None), ("", None), ("", jpg(4))]
    kept = make_recipe(path, "memory://b", caption_column=None, additional_columns=["likes"])
    rows = whole_rows_of(kept, tmp_path)
    assert [row.additional for row in rows] == [{"likes": n} for n in (3, None, None, None, None)]
    assert [row.file is not None for row in rows] == [True, False, False, False, True]


def test_links_devices_and_sparse_members_are_rows_without_a_picture(tmp_path: Path) -> None:
    (tmp_path / "secret.jpg").write_bytes(jpg(9))
    path = tmp_path / "0.tar"
    kinds = {
        "1": (tarfile.SYMTYPE, f"{tmp_path}/secret.jpg"),
        "2": (tarfile.LNKTYPE, "/../good.jpg"),
        "3": (tarfile.CHRTYPE, ""),
        "4": (tarfile.FIFOTYPE, ""),
        "5": (tarfile.GNUTYPE_SPARSE, ""),
    }
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, (kind, target) in kinds.items():
            member = tarfile.TarInfo(f"{name}.jpg")
            member.type, member.linkname = kind, target
            tar.addfile(member)
        sparse = tarfile.TarInfo("6.jpg")
        sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.realsize": "999999999999"}
        tar.format = tarfile.PAX_FORMAT
        tar.addfile(sparse)
        for name in ("/etc/passwd", "../../good"):
            for extension, data in ("jpg", jpg(1)), ("txt", b"only a name"):
                member = tarfile.TarInfo(f"{name}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    before = set(tmp_path.iterdir())
    found = rows_of(make_recipe(path, shard_size=99), tmp_path)
    assert found == [*[("", None)] * 6, *[("only a name", jpg(1))] * 2]
    assert {file.name for file in set(tmp_path.iterdir()) - before} <= {
        "cache",
        *(file.name for file in tmp_path.glob("rows-*")),
    }


def test_huge_members_and_headers_take_little_memory(tmp_path: Path) -> None:
    claimed = 10 * 2**30
    huge = tarfile.TarInfo("1.jpg")
    huge.size = claimed
    bomb = tarfile.TarInfo("pax")
    bomb.type, bomb.size = tarfile.XHDTYPE, claimed
    (tmp_path / "bomb").write_bytes(packed(tmp_path / "good", [("0.jpg", jpg(0))]).read_bytes())
    for name, header in ("1.tar", huge), ("2.tar", bomb):
        with open(tmp_path / name, "wb") as stream:
            stream.write(header.tobuf(tarfile.GNU_FORMAT))
            stream.seek(claimed, os.SEEK_CUR)  # a hole: it takes no disk
            stream.write((tmp_path / "good").read_bytes())
    tracemalloc.start()
    recipe = make_recipe(tmp_path / "1.tar", caption_column=None)
    assert rows_of(recipe, tmp_path) == [("", None), ("", jpg(0))]
    with pytest.raises(download.SourceError, match=r"2\.tar: cannot be read: a header is too"):
        download.plan(make_recipe(tmp_path / "2.tar", caption_column=None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


def test_a_tar_cut_off_anywhere_is_one_error_that_names_it(tmp_path: Path) -> None:
    whole = Path(written(tmp_path / "whole.tar", range(4))).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # of the last member
    for size in [*range(0, end + 1, 512), *range(1, end, 1777)]:
        (tmp_path / "cut.tar").write_bytes(whole[:size])
        with pytest.raises(download.SourceError, match=r"cut\.tar: .*the tar is cut off") as error:
            download.plan(make_recipe(tmp_path / "cut.tar"))
        assert "\n" not in str(error.value)


def test_a_damaged_tar_gives_no_picture_the_caption_of_another(tmp_path: Path) -> None:
    whole = Path(written(tmp_path / "whole.tar", range(4))).read_bytes()
    pairs = {(jpg(n), b"caption %d" % n) for n in range(4)}
    chance, refused = random.Random(0), 0
    for _ in range(400):
        data = bytearray(whole)
        data[chance.randrange(len(data) // 512) * 512 + chance.choice((0, 124, 150, 156))] ^= 1
        try:
            found = list(samples(io.BytesIO(data), lambda extension: 2**20))
        except ValueError:
            refused += 1
            continue
        for sample in found:
            files = {name: file.content for name, file in sample.files.items()}
            pair = (files.get("jpg"), files.get("txt"))
            changed = sum(not any(part in p for p in pairs) for part in pair if part is not None)
            assert None in pair or pair in pairs or changed == 1
    assert refused > 50, "of damaged headers, all are noticed"


def test_an_unusable_tar_is_a_one_line_error(tmp_path: Path) -> None:
    good = written(tmp_path / "good.tar", range(3))
    two = Path(good).read_bytes() * 2
    (tmp_path / "two.tar").write_bytes(two)
    (tmp_path / "packed.tar").write_bytes(b"\x1f\x8b" + bytes(1024))
    (tmp_path / "none.tar").write_bytes(b"no tar at all" * 100)
    (tmp_path / "empty.tar").write_bytes(bytes(10240))
    packed(tmp_path / "text.tar", [("1.heic", b"a"), ("1.txt", b"a")])
    packed(tmp_path / "plain.tar", [("1.jpg", jpg(1)), ("1.json", b'{"text": "a"}')])
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("two.tar", {}, r"two\.tar: cannot be read: it has data behind its end"),
        ("packed.tar", {}, r"packed\.tar: cannot be read: it is compressed: unpack it"),
        ("none.tar", {}, r"none\.tar: cannot be read: it is no tar"),
        ("empty.tar", {}, "source: it has no rows"),
        ("text.tar", {}, r"source\.image_extension: .*no pictures .*but heic, txt"),
        ("good.tar", {"image_extension": "png"}, r"source\.image_extension: .*but jpg, json, txt"),
        ("plain.tar", {}, r"source\.caption_column: .*no column 'txt' \(did you mean 'text'"),
        ("good.tar", {"caption_column": "captoin"}, r"'captoin' \(did you mean 'caption'\?\)"),
        ("good.tar", {"aesthetic_column": "x"}, r"source\.aesthetic_column: .* no column .x. "),
        ("{0..1}.tar", {}, r"source\.path: .*/0\.tar: no such file"),
        ("{0..1.tar", {}, r"source\.path: .*\{0\.\.1\.tar: "),
        ("{0..9999999}.tar", {}, "it names more than 1,000,000 files"),
    ]
    for name, settings, words in cases:
        with pytest.raises(download.SourceError, match=words) as error:
            download.plan(make_recipe(tmp_path / name, **settings))
        assert "\n" not in str(error.value), name


def test_a_caption_is_a_file_and_other_columns_are_of_the_json(tmp_path: Path) -> None:
    """Otherwise every caption, or every value, would be missing without an error."""
    only_json = packed(tmp_path / "a.tar", [("1.jpg", jpg(1)), ("1.json", b'{"txt": "a cat"}')])
    with pytest.raises(download.SourceError, match=r"source\.caption_column: .*no column 'txt'"):
        download.plan(make_recipe(only_json))
    only_file = packed(tmp_path / "b.tar", [("1.jpg", jpg(1)), ("1.txt", b"a cat")])
    for setting in {"additional_columns": ["txt"]}, {"aesthetic_column": "txt"}:
        with pytest.raises(download.SourceError, match="no column 'txt'"):
            download.plan(make_recipe(only_file, **setting))
    values = b'{"txt": 5.5}'
    both = packed(tmp_path / "c.tar", [("1.jpg", jpg(1)), ("1.txt", b"a cat"), ("1.json", values)])
    (row,) = whole_rows_of(make_recipe(both, additional_columns=["txt"]), tmp_path)
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
        with pytest.raises(download.SourceError, match="it names more than 1,000,000 files"):
            download.plan(make_recipe(f"{tmp_path}/{braces}.tar"))
    for braces in ("{a}", "{a,{b,c}d}", "{5..1}", "{0..9..3}x{01..10}", "{a-{0..9},b}"):
        source = tars.Tars(make_recipe(f"/{braces}.tar").source)  # type: ignore[arg-type]
        assert tars._count(f"/{braces}.tar") == len(source._paths())
    (tmp_path / r"a\b").mkdir()
    for name in ("0.tar", "{0..0}.tar"):
        written(tmp_path / r"a\b" / "0.tar", range(2))
        recipe = make_recipe(rf"{tmp_path}/a\b/{name}", f"memory://{name}")
        assert len(rows_of(recipe, tmp_path)) == 2


def test_a_setting_with_which_no_sample_has_one_picture_is_an_error(tmp_path: Path) -> None:
    masked = {"jpg": jpg(1), "png": b"a mask", "txt": b"a cat"}
    files = [(f"{n}.{kind}", data) for n in range(3) for kind, data in masked.items()]
    path = packed(tmp_path / "0.tar", files)
    words = r"source\.image_extension: .*0\.tar has no sample .*set it to one of jpg, png$"
    with pytest.raises(download.SourceError, match=words):
        download.plan(make_recipe(path))
    found = rows_of(make_recipe(path, image_extension="jpg"), tmp_path)
    assert found == [("a cat", jpg(1))] * 3


def test_files_beside_the_samples_are_counted_rows(tmp_path: Path) -> None:
    """Left out, they would hide pictures of an extension that nobody reads."""
    files = [("1.jpg", jpg(1)), ("1.txt", b"a"), ("README.md", b"of a tar"), ("index.json", b"{}")]
    found = rows_of(make_recipe(packed(tmp_path / "0.tar", files)), tmp_path)
    assert found == [("a", jpg(1)), ("", None), ("", None)]


def test_errors_about_hostile_tars_are_short_and_name_the_sample(tmp_path: Path) -> None:
    values = json.dumps({f"{n}" + "k" * 200: 1 for n in range(4000)}).encode()
    keys = packed(tmp_path / "keys.tar", [("1.jpg", jpg(1)), ("1.json", values)])
    with pytest.raises(download.SourceError, match=r"3,980 others\)$") as error:
        download.plan(make_recipe(keys, caption_column="caption"))
    assert len(str(error.value)) < 4000
    files = [(f"a/2019.{n:03}.jpg", jpg(1)) for n in range(101)]
    path = packed(tmp_path / "files.tar", files)
    words = r"files\.tar: .*sample 'a/2019' has more than 100 files: name"
    with pytest.raises(download.SourceError, match=words):
        download.plan(make_recipe(path, image_extension="000.jpg"))


def test_a_tar_that_changes_after_it_was_planned_is_not_committed(tmp_path: Path) -> None:
    recipe = make_recipe(written(tmp_path / "0.tar", range(6)), tmp_path / "store")
    plan = download.plan(recipe)
    draft = Store(recipe.store).draft(download.key_parts(recipe, plan))
    written(tmp_path / "0.tar", range(1, 7))
    with pytest.raises(download.SourceError, match="changed while it was being read: run again"):
        download.build(recipe, plan, draft, lambda *_: None)
    again = build(recipe)
    names = [entry.path for entry in again.files if entry.path.endswith(".parquet")]
    found = {row["caption"] for name in names for row in read_rows(again.read(name))}
    assert found == {f"caption {n}" for n in range(1, 7)}
