"""Local sources: folders, links, names, and the encodings of text."""

import errno
import hashlib
import os
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from shortest_recipe import shortest_recipe
from source_rows import ROWS, make_recipe, png, rows_of, write_list
from web_sites import serving

from artifacts.records import digest_bytes
from configs.errors import Refused
from tasks import download
from tasks.download.rows import Row
from tasks.download.source_files import list_files

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def _folder(path: Path, names: Iterable[str]) -> None:
    for number, name in enumerate(names):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(png(number))


def test_a_folder_has_captions_in_text_files(tmp_path: Path) -> None:
    _folder(tmp_path / "in", ["a.png", "sub/b.PNG", "c.png"])
    (tmp_path / "in/a.txt").write_text("a cat\n")
    (tmp_path / "in/sub/b.txt").write_bytes("\ufeffein Bär".encode())
    (tmp_path / "in/notes.md").write_text("no picture")
    rows = rows_of(make_recipe({"kind": "folder", "path": str(tmp_path / "in")}), tmp_path)
    assert [row.captions for row in rows] == [("a cat",), ("",), ("ein Bär",)]
    assert [Path(row.file or "").read_bytes() for row in rows] == [png(0), png(2), png(1)]
    assert [Path(row.place).name for row in rows] == ["a.png", "c.png", "b.PNG"]
    assert rows[0].url == f"sha256:{hashlib.sha256(png(0)).hexdigest()}"


HIDDEN = (
    *("._a.png", "sub/.b.png", ".ipynb_checkpoints/a-checkpoint.png", "sub/.thumbnails/a.png"),
    *("@eaDir/a.png/SYNOFILE_THUMB_M.png", "__MACOSX/in/a.png", "sub/__pycache__/a.png"),
    *("#recycle/a.png", "@Recycle/a.png", "$RECYCLE.BIN/a.png", "sub/$Recycle.Bin/a.png"),
    *("@SynoResource/a.png",),
)
SHOWN = ("#d.png", "@f.png", "__e.png", "a.png", "sub/_d_.png")


@pytest.mark.parametrize("place", ["{}", "memory:/{}"])
def test_hidden_files_and_copies_of_systems_are_no_rows(tmp_path: Path, place: str) -> None:
    folder = tmp_path / ".hidden/@eaDir/in"  # a person may name a hidden folder
    _folder(folder, [*HIDDEN, *SHOWN])
    fsspec.filesystem("memory").put(str(folder), f"memory:/{folder}", recursive=True)
    path = place.format(folder)
    for asked in (path, f"{path}/**/*.png", f"{path}/*"):
        names = [file.name.rpartition("/in/")[2] for file in list_files(asked, (".png",))]
        assert names == [n for n in SHOWN if "/" not in n or asked != f"{path}/*"]
    rows = rows_of(make_recipe({"kind": "folder", "path": path}), tmp_path)
    assert [row.place.rpartition("/in/")[2] for row in rows] == list(SHOWN)


def test_a_link_shows_what_a_hidden_folder_has(tmp_path: Path) -> None:
    _folder(tmp_path / "in", [".store/a.png"])
    (tmp_path / "in/photos").symlink_to(tmp_path / "in/.store")
    (file,) = list_files(str(tmp_path / "in"), (".png",))
    assert file.name == f"{tmp_path}/in/photos/a.png"


def test_hidden_copies_of_lists_and_of_their_pictures_are_no_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in (".ipynb_checkpoints", "__MACOSX", "lists"):
        (tmp_path / "in" / folder).mkdir(parents=True)
        write_list(tmp_path / "in" / folder / "a.parquet", ROWS)
        write_list(tmp_path / "in" / folder / "train.parquet", [{"image": png(1), "text": "a"}])
    urls = make_recipe({"kind": "urls", "path": f"{tmp_path}/in/*/a.parquet"})
    assert len(rows_of(urls, tmp_path)) == len(ROWS)
    assert len(rows_of(make_recipe({"kind": "dataset", "path": f"{tmp_path}/in"}), tmp_path)) == 1
    _folder(tmp_path / "listed", ["a.png", "._a.png"])
    lines = [{"file_name": name, "text": name} for name in ("./a.png", "._a.png")]
    write_list(tmp_path / "listed/metadata.jsonl", lines)
    (row,) = rows_of(make_recipe({"kind": "folder", "path": f"{tmp_path}/listed"}), tmp_path)
    assert row.captions == ("./a.png",)
    assert "metadata.jsonl: 1 lines name hidden files" in caplog.text


@pytest.mark.parametrize("text", ["FOX.TXT", "FOX.Txt"])
def test_captions_beside_pictures_may_be_in_capitals(tmp_path: Path, text: str) -> None:
    _folder(tmp_path / "in", ["FOX.JPG"])
    (tmp_path / "in" / text).write_text("a fox")
    (row,) = rows_of(make_recipe({"kind": "folder", "path": f"{tmp_path}/in"}), tmp_path)
    assert row.captions == ("a fox",)


@pytest.mark.parametrize(
    ("pictures", "texts", "captions"),
    [
        (["FOX.JPG"], ["fox.txt"], {"FOX.JPG": "fox.txt"}),
        (["fox.png"], ["FOX.TXT"], {"fox.png": "FOX.TXT"}),
        (["fox.png", "fox.webp"], ["Fox.txt"], {"fox.png": "Fox.txt", "fox.webp": "Fox.txt"}),
        (["fox.png"], ["FOX.TXT", "fox.txt"], {"fox.png": "fox.txt"}),
        (["FOX.png", "fox.png"], ["fox.txt"], {"FOX.png": "", "fox.png": "fox.txt"}),
        (["fox.png"], ["FOX.TXT", "Fox.txt"], {"fox.png": ""}),
        (["a/fox.png"], ["A/fox.txt"], {"fox.png": ""}),
    ],
)
def test_a_picture_and_its_caption_may_differ_by_case(
    tmp_path: Path, pictures: list[str], texts: list[str], captions: dict[str, str]
) -> None:
    _folder(tmp_path / "in", pictures)
    for text in texts:
        (tmp_path / "in" / text).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / text).write_text(Path(text).name)
    rows = rows_of(make_recipe({"kind": "folder", "path": f"{tmp_path}/in"}), tmp_path)
    assert {Path(row.place).name: row.captions[0] for row in rows} == captions


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "metadata.parquet"])
@pytest.mark.parametrize("place", ["", "train/", "a/train/"])
def test_captions_are_read_from_the_tables_of_imagefolder(
    tmp_path: Path, name: str, place: str
) -> None:
    _folder(tmp_path / "in", [f"{place}fox.png", f"{place}sub/owl.png", f"{place}left_out.png"])
    lines = [
        {"file_name": "fox.png", "text": "a fox", "score": 5.5, "licence": "cc0"},
        {"file_name": "sub/owl.png", "text": "an owl", "score": None, "licence": "by"},
    ]
    write_list(tmp_path / "in" / place / name, lines)
    source: dict[str, Any] = {"kind": "folder", "path": f"{tmp_path}/in"}
    source["aesthetic_column"] = "score"
    source["additional_columns"] = ["licence"]
    recipe = shortest_recipe(source=source, store="memory://s", train={"aesthetic_score": True})
    download.check(recipe)
    fox, owl = rows_of(recipe, tmp_path)
    assert (fox.captions, owl.captions) == (("a fox",), ("an owl",))
    assert (fox.aesthetic_score, owl.aesthetic_score) == (5.5, None)
    assert (fox.additional["licence"], owl.additional["licence"]) == ("cc0", "by")
    assert [Path(row.file or "").read_bytes() for row in (fox, owl)] == [png(0), png(1)]
    write_list(tmp_path / "in" / place / name, [{"file_name": "fox.png", "prompt": "a fox"}])
    with pytest.raises(Refused, match=f"{name} has no column 'text'"):
        download.check(make_recipe({"kind": "folder", "path": f"{tmp_path}/in"}))


def test_each_part_of_a_folder_may_have_captions_of_its_own(tmp_path: Path) -> None:
    _folder(tmp_path / "in", ["a/1.png", "b/2.png", "b/sub/3.png", "c.png"])
    write_list(tmp_path / "in/a/metadata.csv", [{"file_name": "1.png", "text": "one"}])
    write_list(tmp_path / "in/b/Metadata.jsonl", [{"file_name": "sub/3.png", "text": "three"}])
    write_list(tmp_path / "in/b/sub/metadata.csv", [{"file_name": "3.png", "text": "again"}])
    (tmp_path / "in/c.txt").write_text("sea")
    rows = rows_of(make_recipe({"kind": "folder", "path": f"{tmp_path}/in"}), tmp_path)
    assert [row.captions for row in rows] == [("one",), ("three",), ("sea",)]


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "metadata.parquet"])
def test_every_table_has_the_columns(tmp_path: Path, name: str) -> None:
    _folder(tmp_path / "in", ["a/1.png", "b/2.png"])
    write_list(tmp_path / "in/a/metadata.jsonl", [{"file_name": "1.png", "text": "one"}])
    write_list(tmp_path / "in/b" / name, [{"file_name": "2.png", "caption": "two"}])
    with pytest.raises(Refused, match=f"/b/{name} has no column 'text'"):
        download.check(make_recipe({"kind": "folder", "path": f"{tmp_path}/in"}))


@pytest.mark.parametrize(
    ("files", "unread"),
    [
        (["fox.caption", "owl.txt", "notes.md"], "fox.caption, owl.txt"),
        (["captions.csv", "fox.txt", "list/all.parquet"], "captions.csv, list/all.parquet"),
        (["a.json", "b.JSONL", "c.tsv", "d.xlsx"], "a.json, b.JSONL, c.tsv, d.xlsx"),
        (["fox.json", "metadata.xlsx", "fox.txt"], "fox.json, metadata.xlsx"),
        (["fox.png.txt"], "fox.png.txt"),
        (["metadata.csv", "metadata.jsonl", "fox.txt"], "fox.txt, metadata.csv"),
        (["fox.txt", "FOX.TXT"], "FOX.TXT"),
        (["FOX.TXT", ".fox.json"], None),
    ],
)
def test_files_of_captions_that_are_not_read_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, files: list[str], unread: str | None
) -> None:
    _folder(tmp_path / "in", ["fox.png"])
    for name in files:
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text("file_name,text\n")
    if "metadata.jsonl" in files:
        write_list(tmp_path / "in/metadata.jsonl", [{"file_name": "fox.png", "text": "a"}])
    download.check(make_recipe({"kind": "folder", "path": f"{tmp_path}/in"}))
    told = [record.getMessage().replace(f"{tmp_path}/in/", "") for record in caplog.records]
    assert told == [] if unread is None else f"are not read ({unread}): captions are" in told[0]


@pytest.mark.parametrize("status", [404, 410])
def test_a_picture_of_a_web_folder_may_lack_its_caption(tmp_path: Path, status: int) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        bodies = {"/in/": b'<a href="a.png"></a>', "/in/a.png": png(0)}
        body = bodies.get(request.path, b"")
        request.send_response(200 if body else status)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Content-Type", "text/html")
        request.end_headers()
        request.wfile.write(body)

    with serving(answer) as host:
        source = {"kind": "folder", "path": f"http://{host}/in/"}
        (row,) = rows_of(make_recipe(source), tmp_path)
    assert row.captions == ("",)


def test_a_folder_may_have_metadata_jsonl(tmp_path: Path) -> None:
    _folder(tmp_path / "in", ["a.png", "b.png"])
    lines = [
        {"file_name": "b.png", "text": "second"},
        {"file_name": "gone.png", "text": "lost"},
        {"file_name": "a.png", "text": "first"},
    ]
    write_list(tmp_path / "in/metadata.jsonl", lines)
    rows = rows_of(make_recipe({"kind": "folder", "path": str(tmp_path / "in")}), tmp_path)
    assert [row.captions[0] for row in rows] == ["second", "lost", "first"]
    assert rows[1] == Row("", ("lost",))
    write_list(tmp_path / "in/metadata.jsonl", [{"file_name": "../secret.png", "text": ""}])
    with pytest.raises(Refused, match="leads out of the folder"):
        download.plan(make_recipe({"kind": "folder", "path": str(tmp_path / "in")}))


def test_a_folder_that_cannot_be_listed_is_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_list(tmp_path / name / "rows.parquet", ROWS)
    ls = LocalFileSystem.ls

    def failing(fs: LocalFileSystem, path: str, **more: Any) -> Any:
        if path.endswith("/b"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return ls(fs, path, **more)

    monkeypatch.setattr(LocalFileSystem, "ls", failing)
    for path in (tmp_path, f"{tmp_path}/*/*.parquet"):
        with pytest.raises(Refused, match=r"cannot be read: .*Input/output error"):
            list_files(str(path), (".parquet",))


def test_a_request_that_a_client_hides_makes_no_folder_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the clients of the hub and of GCS do in `isdir`."""
    _folder(tmp_path / "in", ["a.png"])
    fsspec.filesystem("memory").put(f"{tmp_path}/in", "memory://hides", recursive=True)
    monkeypatch.setattr(MemoryFileSystem, "isdir", lambda *_: False)
    (row,) = rows_of(make_recipe({"kind": "folder", "path": "memory://hides"}), tmp_path)
    assert Path(row.file or "").read_bytes() == png(0)


def test_a_file_whose_name_is_not_utf_8_is_named(tmp_path: Path) -> None:
    _folder(tmp_path / "in", ["a.png", "ein Bär 🐻.png"])
    recipe = make_recipe({"kind": "folder", "path": str(tmp_path / "in")})
    assert len(rows_of(recipe, tmp_path)) == 2
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/in/caf\xe9.png")).write_bytes(png(3))
    with pytest.raises(Refused, match=r"caf\\udce9\.png' is not UTF-8: rename"):
        download.plan(recipe)


def test_a_picture_or_a_caption_behind_a_link_is_read_again_when_its_target_changes(
    tmp_path: Path,
) -> None:
    there, folder = tmp_path / "there", tmp_path / "folder"
    for path in (there, folder):
        path.mkdir()
    for name, content in (("a.png", png(1)), ("a.txt", b"a cat")):
        (there / name).write_bytes(content)
        (folder / name).symlink_to(there / name)
    recipe = make_recipe({"kind": "folder", "path": str(folder)}, tmp_path / "store")
    assert rows_of(recipe, tmp_path)[0].captions == ("a cat",)
    (there / "a.txt").write_text("a dog")
    [row] = rows_of(recipe, tmp_path)
    assert row.captions == ("a dog",)
    (there / "a.png").write_bytes(png(2))
    assert rows_of(recipe, tmp_path)[0].sha256 != row.sha256


def test_folders_behind_links_are_read_once(tmp_path: Path) -> None:
    there, folder = tmp_path / "there", tmp_path / "folder"
    for number, path in enumerate((there, folder)):
        path.mkdir()
        (path / f"{number}.png").write_bytes(png(number))
    (folder / "more").symlink_to(there)
    (folder / "again").symlink_to(folder)
    (folder / "more_again").symlink_to(there)
    (there / "up").symlink_to(folder)
    found = [Path(file.name).name for file in list_files(str(folder), (".png",))]
    assert sorted(found) == ["0.png", "1.png"]


@pytest.mark.parametrize("text", ["ein Bär", "🐻"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16-le", "utf-16-be"])
def test_captions_are_utf_8_or_utf_16_by_their_mark(
    tmp_path: Path, text: str, encoding: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.png").write_bytes(png(1))
    mark = "\ufeff" if encoding.startswith("utf-16") else ""
    (folder / "a.txt").write_bytes((mark + text).encode(encoding))
    recipe = make_recipe({"kind": "folder", "path": str(folder)})
    assert rows_of(recipe, tmp_path)[0].captions == (text,)


def test_a_local_name_with_colons_is_no_chain_of_filesystems(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a::b.png").write_bytes(png(1))
    (folder / "a::b.txt").write_text("a cat")
    recipe = make_recipe({"kind": "folder", "path": str(folder)})
    [row] = rows_of(recipe, tmp_path)
    assert row.captions == ("a cat",) and row.url.startswith("sha256:")


@pytest.mark.parametrize("name", ["photos [2024]", "what?", "a*"])
def test_a_folder_whose_name_has_wildcards_is_no_pattern(tmp_path: Path, name: str) -> None:
    _folder(tmp_path / name, ["a.png"])
    write_list(tmp_path / name / "train.parquet", [{"image": png(1), "text": "a cat"}])
    write_list(tmp_path / name / "test.parquet", [{"image": png(2), "text": "a dog"}])
    folder = make_recipe({"kind": "folder", "path": str(tmp_path / name)})
    assert [row.url for row in rows_of(folder, tmp_path)] == [f"sha256:{digest_bytes(png(0))}"]
    dataset = make_recipe({"kind": "dataset", "path": str(tmp_path / name)})
    assert [row.captions for row in rows_of(dataset, tmp_path)] == [("a cat",)]
    (one,) = list_files(f"{tmp_path}/{name[0]}*/[t]r*", ())
    assert one.name == f"{tmp_path}/{name}/train.parquet"


@pytest.mark.parametrize("value", ["ein Bär", ["ein Bär", "a bear"]])
def test_text_in_binary_columns_is_utf_8(tmp_path: Path, value: Any) -> None:
    is_list = isinstance(value, list)
    captions = [one.encode() for one in value] if is_list else value.encode()
    kind = pa.list_(pa.binary()) if is_list else pa.binary()
    columns = {
        "url": pa.array([b"http://example.org/\xc3\xa4.jpg", b"\xff"], pa.binary()),
        "caption": pa.array([captions, None], kind),
        "image": pa.array([png(1), png(2)], pa.binary()),
        "more": pa.array(["Bär".encode(), None], pa.binary()),
        "sha256": pa.array([bytes(range(200, 232)), b"AB" * 32], pa.binary()),
    }
    pq.write_table(pa.table(columns), tmp_path / "list.parquet")
    expected = tuple(value) if is_list else (value,)
    path = str(tmp_path / "list.parquet")
    named = {"caption_column": "caption", "additional_columns": ["more"]}
    listed = {"kind": "urls", "path": path, "sha256_column": "sha256", **named}
    rows = rows_of(make_recipe(listed), tmp_path)
    assert [row.url for row in rows] == ["http://example.org/ä.jpg", r"\xFF"]
    assert [row.sha256 for row in rows] == [bytes(range(200, 232)).hex(), "ab" * 32]
    assert [row.additional["more"] for row in rows] == ["Bär", None]
    assert [row.captions for row in rows] == [expected, ("",)]
    dataset = make_recipe({"kind": "dataset", "path": path, "image_column": "image", **named})
    rows = rows_of(dataset, tmp_path)
    assert [row.captions for row in rows] == [expected, ("",)]
    assert [row.additional["more"] for row in rows] == ["Bär", None]
