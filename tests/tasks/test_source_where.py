"""`source.where`: dropped rows are never fetched, hostile conditions are refused."""

from pathlib import Path
from typing import Any

import pytest
from source_rows import make_recipe, parquet, png, rows_of, write_list

from artifacts.gc import record_run
from artifacts.store import KeyParts, Store
from configs.errors import Refused
from configs.load_recipe import dump
from configs.settings.recipe import Recipe
from flows.show_plan import _source_rows
from tasks import download

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

SCORES = [6.5, 5.0, None, 7.25, 5.5, 10.0]
SCORED = [
    {"url": f"http://a/{n}.jpg", "caption": f"c {n}", "score": score}
    for n, score in enumerate(SCORES)
]
NUMBER = "try_cast(score as double) > 5.5"


def recipe_of(path: Any, where: str | None, kind: str = "parquet", **more: Any) -> Recipe:
    listed = {"kind": "urls", "path": str(path), "format": kind, "where": where}
    return make_recipe({**listed, **more})


@pytest.mark.parametrize("name", ["parquet", "csv", "tsv.gz", "jsonl", "json"])
def test_rows_that_meet_the_condition_are_the_rows_of_every_format(
    tmp_path: Path, name: str
) -> None:
    """A null, or an empty text, meets no comparison."""
    kind = name.split(".")[0]
    file = write_list(tmp_path / f"a.{name}", SCORED)
    recipe = recipe_of(file, "score > 5.5" if kind == "parquet" else NUMBER, kind)
    assert [row.url for row in rows_of(recipe, tmp_path)] == [
        f"http://a/{n}.jpg" for n in (0, 3, 5)
    ]
    assert download.plan(recipe).artifact.summary["dropped"] == 3
    assert download.plan(recipe_of(file, None, kind)).rows == len(SCORED)


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_columns_are_named_in_capitals_or_small_letters(tmp_path: Path, kind: str) -> None:
    file = Path(write_list(tmp_path / f"a.{kind}", SCORED))
    recipe = recipe_of(file, "try_cast(Score as double) > 5.5", kind)
    download.check(recipe)
    assert len(rows_of(recipe, tmp_path)) == 3
    if kind != "parquet":  # Python reads a list with a malformed line
        line = "no json\n" if kind == "jsonl" else '"open\n'
        file.write_text(file.read_text() + line)
        assert len(rows_of(recipe, tmp_path)) == 3


def test_the_plan_of_a_list_with_dropped_rows_is_that_of_a_list_without_them(
    tmp_path: Path,
) -> None:
    """Rows are identified by themselves: a condition downloads nothing again."""
    plan = download.plan(recipe_of(write_list(tmp_path / "a.parquet", SCORED), "score > 5.5"))
    kept = write_list(tmp_path / "b.parquet", [SCORED[n] for n in (0, 3, 5)])
    same = download.plan(recipe_of(kept, None))
    assert plan.source_digest == same.source_digest
    assert [spec.key for spec in plan.shards] == [spec.key for spec in same.shards]
    assert plan.artifact.key != same.artifact.key


def test_malformed_lines_meet_no_condition_and_are_counted(tmp_path: Path) -> None:
    """Python reads such a list; of two readers, one would otherwise keep the line."""
    lines = ['{"url": "http://a/1.jpg", "n": 1}', "no json", '{"url": "http://a/2.jpg", "n": 2}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "a.csv").write_text('url,n\nhttp://a/1.jpg,1\n"open\nhttp://a/2.jpg,2\n')
    for kind in ("jsonl", "csv"):
        recipe = recipe_of(tmp_path / f"a.{kind}", "n::int > 1", kind, caption_column=None)
        assert [row.url for row in rows_of(recipe, tmp_path)] == ["http://a/2.jpg"]
        assert download.plan(recipe).artifact.summary["dropped"] == 2


def test_a_datasets_pictures_that_miss_the_condition_are_no_rows(tmp_path: Path) -> None:
    rows = [{"image": png(n), "text": f"p {n}", "n": n} for n in range(5)]
    (tmp_path / "train.parquet").write_bytes(parquet(rows))
    source = {"kind": "dataset", "path": str(tmp_path), "where": "n % 2 = 1 and n < 4"}
    recipe = make_recipe(source)
    assert [row.captions for row in rows_of(recipe, tmp_path)] == [("p 1",), ("p 3",)]
    assert download.plan(recipe).artifact.summary["dropped"] == 3


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("scor > 5", "no column 'scor' (did you mean 'score'?)"),
        ("score", "type DOUBLE: compare it"),
        ("score > 'x", "unterminated string literal"),
        ("url > 5", "Cannot compare values of type VARCHAR"),
        ("score > 5; select 1", "syntax error"),
        (
            "score > 5) union select content from read_text('/etc/passwd') where (true",
            "no single expression",
        ),
        ("url in (select content from read_text('/etc/passwd'))", "a subquery"),
        ("exists (from glob('/**'))", "a subquery"),
        ("random() < 0.1", "md5_number(url) % 10 = 0"),
        ("count(*) > 1", "cannot contain aggregates"),
        ("+".join(["score"] * 900) + " > 1", "nested too deep"),
    ],
)
def test_a_wrong_or_hostile_condition_is_refused_before_any_work(
    tmp_path: Path, where: str, why: str
) -> None:
    file = write_list(tmp_path / "a.parquet", SCORED)
    with pytest.raises(Refused) as refused:
        download.check(recipe_of(file, where))
    assert "source.where" in str(refused.value) and why in str(refused.value)


def test_a_number_in_a_text_list_is_text_and_the_error_says_how_to_compare_it(
    tmp_path: Path,
) -> None:
    file = write_list(tmp_path / "a.csv", SCORED)
    with pytest.raises(Refused, match=r"columns of csv are text, try_cast\(x as double\)"):
        download.check(recipe_of(file, "score > 5", "csv"))


def test_a_later_file_whose_columns_do_not_fit_is_refused_by_its_name(tmp_path: Path) -> None:
    write_list(tmp_path / "a.parquet", SCORED)
    write_list(tmp_path / "b.parquet", [{"url": "u", "caption": "c", "score": "high"}])
    with pytest.raises(Refused, match=r"source.where: .*b.parquet: .* Cannot compare"):
        download.plan(recipe_of(tmp_path, "score > 5"))


def test_a_later_file_without_the_column_is_refused(tmp_path: Path) -> None:
    """Its rows would otherwise all be dropped without a word."""
    write_list(tmp_path / "a.csv", SCORED)
    write_list(tmp_path / "b.csv", [{"url": "u", "caption": "c", "rating": 9}])
    with pytest.raises(Refused, match=r"b\.csv has no column 'score'"):
        download.plan(recipe_of(tmp_path, NUMBER, "csv"))


def test_a_list_without_a_row_that_meets_the_condition_is_refused(tmp_path: Path) -> None:
    file = write_list(tmp_path / "a.parquet", SCORED)
    with pytest.raises(Refused, match=r"no rows that meet source.where \(6 do not\)"):
        download.plan(recipe_of(file, "score > 100"))


@pytest.mark.parametrize("kind", ["parquet", "csv", "jsonl"])
def test_a_condition_that_fails_on_every_row_is_refused_with_its_first_error(
    tmp_path: Path, kind: str
) -> None:
    rows = [{**row, "score": f"about {n}"} for n, row in enumerate(SCORED)]
    file = write_list(tmp_path / f"a.{kind}", rows)
    why = r"source.where: 'cast\(score as double\) > 5': .*'about \d'.*try_cast\(x as double\)"
    with pytest.raises(Refused, match=why):
        download.plan(recipe_of(file, "cast(score as double) > 5", kind))


def test_a_plan_of_the_training_tells_the_rows_that_were_dropped(tmp_path: Path) -> None:
    file = write_list(tmp_path / "a.parquet", SCORED)
    recipe = recipe_of(file, "score > 5.5").model_copy(update={"store": str(tmp_path / "store")})

    def begin(parts: KeyParts) -> None:
        facts = {"recipe": dump(recipe), "stages": {"plan": [parts.key]}}
        record_run(Store(recipe.store), "run", facts)

    assert _source_rows(recipe) == {"rows": None, "rows_dropped": None}
    download.plan(recipe, begin)
    assert _source_rows(recipe) == {"rows": 3, "rows_dropped": 3}
