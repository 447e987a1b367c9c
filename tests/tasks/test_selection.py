"""Which entries are kept, and the reason of each other one, over tables made by hand."""

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from configs.errors import Refused
from configs.settings.select import Select
from tasks.encode.crop_to_bucket import is_holdout
from tasks.select.groups import group_pictures
from tasks.select.selection import LEAKED, check_columns, choose, read_entries

HOLDOUT = 0.25


def picture(number: int, *, held_out: bool = False) -> bytes:
    """A sha256 of a picture in one of the splits."""
    rng = np.random.default_rng(number)
    while True:
        sha256 = rng.bytes(32)
        if is_holdout(sha256, HOLDOUT) == held_out:
            return sha256


def entry(number: int, *, held_out: bool = False, **values: Any) -> dict[str, Any]:
    """A row of a list and of a description; pictures with other numbers are unlike."""
    thumbnail = np.random.default_rng(values.pop("like", number)).bytes(256)
    phash = int.from_bytes(thumbnail[:8], "big")
    usual = {"host": "a.example", "original_width": 100, "original_height": 100, "score": 1.0}
    vector = np.eye(64, dtype=np.float32)[number % 64]
    described = {"hash_phash": phash, "hash_mirrored": ~phash % 2**64, "hash_thumbnail": thumbnail}
    ids = {"id": picture(number, held_out=held_out)}
    return {**usual, **described, "clip": vector.tolist(), **ids, **values}


DESCRIBED = ("score", "hash_phash", "hash_mirrored", "hash_thumbnail", "clip")


def select(rows: list[dict[str, Any]], tmp_path: Path, **settings: Any) -> tuple[pa.Table, Any]:
    """The selection of rows, in their order, and its summary."""
    section = Select.model_validate(settings)
    placed = [{"tar": f"{n // 4:064x}", "row": n % 4, **row} for n, row in enumerate(rows)]
    places = ("tar", "row", "id")
    names = [name for name in placed[0] if name not in (*DESCRIBED, *places)]
    types = {"hash_phash": pa.uint64(), "hash_mirrored": pa.uint64(), "score": pa.float64()}
    columns = {name: [row[name] for row in placed] for name in placed[0]}
    table = pa.table({name: pa.array(v, types.get(name)) for name, v in columns.items()})
    with duckdb.connect() as db:
        db.register("listed", table.select([*places, *names]))
        db.register("described", table.select([*places, *DESCRIBED]))
        kinds = dict(
            db.execute("select column_name, column_type from (describe listed)").fetchall()
        )
        kinds |= {"score": "DOUBLE", "cluster": "BIGINT"}
        shown = check_columns(section, kinds)

        def describe(columns: list[str]) -> pa.RecordBatchReader:
            return table.select(["id", *columns]).to_reader()

        db.register("groups", group_pictures(db, describe, section, tmp_path))
        db.execute(
            "create view entries as select listed.*, described.* exclude (tar, row, id), "
            "groups.* exclude (id) from listed join described using (tar, row) "
            "join groups on groups.id = listed.id"
        )
        return choose(read_entries(db, section, shown), section, {*DESCRIBED}, HOLDOUT)


def reasons(rows: list[dict[str, Any]], tmp_path: Path, **settings: Any) -> list[str]:
    table, summary = select(rows, tmp_path, **settings)
    found = table["reason"].to_pylist()
    assert table["kept"].to_pylist() == [reason == "" for reason in found]
    assert summary["kept"] + sum(summary["reasons"].values()) == summary["entries"] == len(rows)
    assert all(summary["reasons"][r] == found.count(r) for r in found if r)
    return list(found)


def test_a_condition_drops_what_it_does_not_hold_for(tmp_path: Path) -> None:
    rows = [entry(0, score=6.0), entry(1, score=5.0), entry(2, score=None), entry(3, host=None)]
    where = "score > 0.5 and score <> 5 and host like 'a%'"
    dropped = ["", "where: score <> 5", "not described: score", "where: host like 'a%'"]
    assert reasons(rows, tmp_path, where=where) == dropped
    table, _ = select(rows, tmp_path, where=where)
    assert table.column_names[-2:] == ["score", "host"]
    assert table["score"].to_pylist() == [6.0, 5.0, None, 1.0]


def test_of_duplicates_one_is_kept(tmp_path: Path) -> None:
    rows = [
        entry(0),
        entry(0, host="b.example"),
        entry(1, like=0, original_width=200),
        entry(2),
        entry(3, clip=entry(2)["clip"], original_width=200),
    ]
    both = {"perceptual": "hash", "semantic": "clip"}
    found = reasons(rows, tmp_path, duplicates=both)
    assert found == ["near-duplicate", "exact duplicate", "", "semantic duplicate", ""]
    groups = select(rows, tmp_path, duplicates=both)[0]["group"].to_pylist()
    assert groups[0] == groups[1] == groups[2] != groups[3] == groups[4]
    assert reasons(rows, tmp_path) == ["", "exact duplicate", "", "", ""]
    assert reasons(rows, tmp_path, duplicates={"exact": False}) == [""] * 5


@pytest.mark.parametrize(
    ("keep", "kept"), [("largest", 1), ("best", 2), ("first", 0)], ids=lambda value: str(value)
)
def test_the_picture_that_is_kept_is_a_setting(keep: str, kept: int, tmp_path: Path) -> None:
    rows = [entry(0), entry(1, like=0, original_height=300), entry(2, like=0, score=9.0)]
    duplicates = {"perceptual": "hash", "keep": keep}
    found = reasons(rows, tmp_path, duplicates=duplicates, prefer="score")
    assert [row for row, reason in enumerate(found) if not reason] == [kept]


def test_a_dropped_picture_is_not_the_one_that_is_kept(tmp_path: Path) -> None:
    rows = [entry(0), entry(1, like=0, original_height=300, score=0.0)]
    found = reasons(rows, tmp_path, where="score > 0", duplicates={"perceptual": "hash"})
    assert found == ["", "where: score > 0"]


def test_no_training_picture_is_a_duplicate_of_a_held_out_one(tmp_path: Path) -> None:
    """The held-out picture stays though it is smaller, and no picture changes its side."""
    rows = [
        entry(0, held_out=True),
        entry(1, like=0, original_width=900),
        entry(2, like=0, held_out=True, original_width=50),
        entry(3),
        entry(4, like=3, held_out=True, score=0.0),
    ]
    duplicates = {"perceptual": "hash"}
    found = reasons(rows, tmp_path, where="score > 0", duplicates=duplicates)
    assert found == ["", LEAKED, "near-duplicate", "", "where: score > 0"]


def test_the_order_of_shards_and_rows_changes_no_picture(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    rows = [
        entry(n, like=int(rng.integers(25)), held_out=n % 5 == 0, host=f"h{n % 3}", score=n % 4)
        for n in range(60)
    ]
    settings: dict[str, Any] = {
        "duplicates": {"perceptual": "hash"},
        "cap": {"host": 6},
        "prefer": "score",
        "limit": 15,
    }
    order = rng.permutation(60)
    found = reasons(rows, tmp_path, **settings)
    moved = reasons([rows[n] for n in order], tmp_path, **settings)
    assert moved == [found[n] for n in order]
    assert found.count("") == 15


def test_the_group_of_a_picture_has_one_number_in_any_order(tmp_path: Path) -> None:
    rows = [entry(n, like=n // 2) for n in range(40)]
    found = []
    for order in (range(40), reversed(range(40))):
        table, _ = select([rows[n] for n in order], tmp_path, duplicates={"perceptual": "hash"})
        found.append(dict(zip(table["id"].to_pylist(), table["group"].to_pylist(), strict=True)))
    assert found[0] == found[1]


def test_a_cap_keeps_the_preferred_of_each_value(tmp_path: Path) -> None:
    rows = [entry(n, host="ab"[n % 2] if n < 8 else None, score=float(n)) for n in range(12)]
    found = reasons(rows, tmp_path, cap={"host": 3}, prefer="score")
    dropped = [row for row, reason in enumerate(found) if reason == "cap of host"]
    assert dropped == [0, 1, 8]


def test_columns_are_named_in_capitals_or_small_letters(tmp_path: Path) -> None:
    rows = [entry(n, host="aabbbb"[n]) for n in range(6)]
    found = reasons(rows, tmp_path, cap={"HOST": 3}, balance={"by": "Host"}, where="SCORE > 0")
    assert sorted(found) == ["", "", "", "", "balance of Host", "cap of HOST"]


def test_pictures_without_descriptions_are_in_no_group_and_no_cluster(tmp_path: Path) -> None:
    rows = [entry(n, **dict.fromkeys(DESCRIBED)) for n in range(3)]
    settings: dict[str, Any] = {
        "duplicates": {"perceptual": "hash", "semantic": "clip"},
        "clusters": {"describer": "clip"},
        "cap": {"cluster": 3},
    }
    table, summary = select(rows, tmp_path, **settings)
    assert (summary["kept"], summary["groups"]) == (3, 0)
    assert table["cluster"].to_pylist() == [None] * 3


def test_clusters_are_capped_like_any_column(tmp_path: Path) -> None:
    rows = [entry(n, clip=np.eye(64)[n % 3].tolist(), like=n) for n in range(12)]
    clusters = {"describer": "clip", "count": 3}
    table, _ = select(rows, tmp_path, clusters=clusters, cap={"cluster": 2})
    assert table["reason"].to_pylist().count("cap of cluster") == 6
    kept = table.filter(table["kept"])["cluster"].to_pylist()
    assert sorted(kept) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("factor", "most"), [(1.0, 2), (1.6, 3), (9.0, 6)])
def test_a_balance_keeps_at_most_a_multiple_of_the_rarest(
    factor: float, most: int, tmp_path: Path
) -> None:
    rows = [entry(n, host="aaaaaabbbbcc"[n]) for n in range(12)]
    table, _ = select(rows, tmp_path, balance={"by": "host", "factor": factor})
    kept = table.filter(table["kept"])["host"].to_pylist()
    assert {host: kept.count(host) for host in "abc"} == {
        "a": min(6, most),
        "b": min(4, most),
        "c": 2,
    }


def test_the_values_of_a_balance_share_a_limit(tmp_path: Path) -> None:
    rows = [entry(n, host="aaaaaabbbbcc"[n]) for n in range(12)]
    table, summary = select(rows, tmp_path, balance={"by": "host", "factor": 2}, limit=6)
    assert sorted(table.filter(table["kept"])["host"].to_pylist()) == ["a", "a", "b", "b", "c", "c"]
    assert summary["reasons"] == {"balance of host": 2, "limit": 4}


def test_a_limit_prefers_no_side_of_the_split(tmp_path: Path) -> None:
    rows = [entry(n, held_out=n % 4 == 0) for n in range(400)]
    _, summary = select(rows, tmp_path, limit=100)
    assert summary["kept"] == 100
    assert 12 <= summary["held_out"] <= 40


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"where": "scor > 5"}, "select.where: the table of pictures has no column 'scor' (did"),
        ({"cap": {"hots": 3}}, "select.cap.hots: .*did you mean 'host'"),
        ({"balance": {"by": "label"}}, "select.balance.by: .*there are: tar, row, id"),
        ({"prefer": "host"}, "select.prefer: 'host' is of type VARCHAR, no number"),
    ],
)
def test_a_wrong_column_is_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=words.replace("(", r"\(")):
        select([entry(0)], tmp_path, **settings)
