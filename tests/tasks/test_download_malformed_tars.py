"""No tar is trusted: a malformed or hostile one is an error, or rows without a picture."""

import io
import json
import logging
import os
import random
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import source_rows
from tar_sources import add_files, jpg, make_recipe, packed, rows_of, written

from configs.errors import Refused
from tasks import download
from tasks.download import tars
from tasks.download.tars import samples

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


def test_a_sample_s_files_that_are_apart_are_an_error_not_another_s_caption(tmp_path: Path) -> None:
    pictures = [(f"{n}.jpg", jpg(n)) for n in range(3)]
    path = packed(tmp_path / "0.tar", [*pictures, *((f"{n}.txt", b"c") for n in range(3))])
    with pytest.raises(Refused, match=r"0\.tar: .*sample '0' are not beside"):
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
    rows = source_rows.rows_of(kept, tmp_path)
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
            add_files(tar, [(f"{name}.jpg", jpg(1)), (f"{name}.txt", b"only a name")])
    before = set(tmp_path.iterdir())
    found = rows_of(make_recipe(path, shard_size=99), tmp_path)
    assert found == [*[("", None)] * 6, *[("only a name", jpg(1))] * 2]
    assert {file.name for file in set(tmp_path.iterdir()) - before} <= {
        "cache",
        *(file.name for file in tmp_path.glob("tars-*")),
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
    with pytest.raises(Refused, match=r"2\.tar: cannot be read: a header is too"):
        download.plan(make_recipe(tmp_path / "2.tar", caption_column=None))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


def test_a_tar_cut_off_anywhere_is_one_error_that_names_it(tmp_path: Path) -> None:
    whole = Path(written(tmp_path / "whole.tar", range(4))).read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512  # of the last member
    for size in [*range(0, end + 1, 512), *range(1, end, 1777)]:
        (tmp_path / "cut.tar").write_bytes(whole[:size])
        with pytest.raises(Refused, match=r"cut\.tar: .*the tar is cut off") as error:
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
        with pytest.raises(Refused, match=words) as error:
            download.plan(make_recipe(tmp_path / name, **settings))
        assert "\n" not in str(error.value), name


def test_a_setting_with_which_no_sample_has_one_picture_is_an_error(tmp_path: Path) -> None:
    masked = {"jpg": jpg(1), "png": b"a mask", "txt": b"a cat"}
    files = [(f"{n}.{kind}", data) for n in range(3) for kind, data in masked.items()]
    path = packed(tmp_path / "0.tar", files)
    words = r"source\.image_extension: .*0\.tar has no sample .*set it to one of jpg, png$"
    with pytest.raises(Refused, match=words):
        download.plan(make_recipe(path))
    found = rows_of(make_recipe(path, image_extension="jpg"), tmp_path)
    assert found == [("a cat", jpg(1))] * 3


def test_errors_about_hostile_tars_are_short_and_name_the_sample(tmp_path: Path) -> None:
    values = json.dumps({f"{n}" + "k" * 200: 1 for n in range(4000)}).encode()
    keys = packed(tmp_path / "keys.tar", [("1.jpg", jpg(1)), ("1.json", values)])
    with pytest.raises(Refused, match=r"3,980 others\)$") as error:
        download.plan(make_recipe(keys, caption_column="caption"))
    assert len(str(error.value)) < 4000
    files = [(f"a/2019.{n:03}.jpg", jpg(1)) for n in range(101)]
    path = packed(tmp_path / "files.tar", files)
    words = r"files\.tar: .*sample 'a/2019' has more than 100 files: name"
    with pytest.raises(Refused, match=words):
        download.plan(make_recipe(path, image_extension="000.jpg"))
