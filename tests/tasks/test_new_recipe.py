"""`kiln new`: what it finds of pictures, which bases fit a machine, and recipes of all answers."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from picture_sources import make_pictures, write_dataset, write_folder, write_listed_folder
from PIL import Image

from configs.errors import Refused
from configs.settings.recipe import Recipe
from tasks.new_recipe import bases, draft
from tasks.new_recipe.draft import Answers, Draft
from tasks.new_recipe.fit import loaded, prove
from tasks.new_recipe.machine import Machine, parse_machine
from tasks.new_recipe.pictures import Pictures, look


def write_photos(folder: Path, count: int, names: str = "{:02}") -> Path:
    """Pictures without captions."""
    folder.mkdir(parents=True)
    for number, one in enumerate(make_pictures(count)):
        (folder / f"{names.format(number)}.png").write_bytes(one.png)
    return folder


def write_list(file: Path, rows: int) -> Path:
    """A parquet list with LAION's columns."""
    query = "select 'http://h/' || i as URL, 'a thing of kind ' || i % 50 as TEXT"
    duckdb.sql(f"copy ({query} from range({rows}) t(i)) to '{file}' (format parquet)")
    return file


def test_of_a_folder_count_sizes_and_captions_are_found(tmp_path: Path) -> None:
    write_folder(tmp_path / "own", make_pictures(9))
    found = look(str(tmp_path / "own"))
    assert (found.count, found.captioned, found.sides) == (9, 9, (36, 48))
    assert len(found.examples) == 8 and "red wide 0" in found.examples
    assert not look(str(write_photos(tmp_path / "photos", 3))).has_captions


def test_captions_of_a_table_are_found(tmp_path: Path) -> None:
    write_listed_folder(tmp_path / "own", make_pictures(4))
    found = look(str(tmp_path / "own"))
    assert (found.count, found.captioned) == (4, 4)


def test_near_duplicates_are_those_that_select_would_drop(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 6)
    with Image.open(folder / "00.png") as image:
        larger = image.resize((120, 72), Image.Resampling.BICUBIC)
        larger.convert("RGB").save(folder / "copy.jpg", quality=95)
    assert look(str(folder)).near_duplicates == 1


def test_a_file_that_is_no_picture_is_counted(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 2)
    (folder / "torn.jpg").write_bytes(b"\xff\xd8 torn")
    assert look(str(folder)).unreadable == 1


def test_subsets_of_kohya_keep_their_repeats_and_class_tokens(tmp_path: Path) -> None:
    write_photos(tmp_path / "set/10_ohwx dog", 3)
    write_photos(tmp_path / "set/1_dog", 5)
    found = look(str(tmp_path / "set"))
    assert found.count == 8 and found.word == "ohwx dog"
    assert found.sources["ohwx_dog"]["repeats"] == 10
    assert found.sources["ohwx_dog"]["encode"]["captions"]["prompts"] == ["ohwx dog"]


def test_of_a_list_rows_are_counted_and_columns_guessed(tmp_path: Path) -> None:
    found = look(str(write_list(tmp_path / "list.parquet", 2000)))
    assert found.count == 2000 and len(found.examples) == 8
    source = found.sources[""]["source"]
    assert (source["url_column"], source["caption_column"]) == ("URL", "TEXT")


def test_of_json_lines_the_first_captions_are_examples(tmp_path: Path) -> None:
    lines = (json.dumps({"url": f"http://h/{n}", "text": f"caption {n}"}) for n in range(20))
    file = tmp_path / "list.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    found = look(str(file))
    assert found.count == 20 and found.examples[0] == "caption 0"


def test_parquet_with_pictures_is_a_data_set(tmp_path: Path) -> None:
    write_dataset(tmp_path / "own", make_pictures(4))
    found = look(str(tmp_path / "own"))
    assert found.count == 4 and found.sources[""]["source"]["image_column"] == "image"


def test_a_list_without_urls_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("name,size\nfox,3\n", encoding="utf-8")
    with pytest.raises(Refused, match="no column of URLs or pictures"):
        look(str(tmp_path / "list.csv"))


@pytest.mark.parametrize("name", ["empty", "nowhere"])
def test_no_pictures_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match=r"no pictures|no such file or folder"):
        look(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "name"),
    [("3060", "RTX 3060"), ("4 x H100", "4 x H100"), ("npu", "npu 32GB"), ("v5p-8", "v5p-8")],
)
def test_a_machine_is_named_as_it_is_read(text: str, name: str) -> None:
    machine = parse_machine(text)
    assert machine.name == name and parse_machine(machine.name) == machine


def test_the_base_of_a_small_card_is_its_fastest_recipe() -> None:
    [first, *_] = bases.offers(parse_machine("RTX 4060"), "subject")
    assert first.recipe == "sdxl-lora-8gb"
    names = {base.name for base in bases.offers(parse_machine("12GB"), "style")}
    assert {"sdxl", "sd15", "flux", "z-image", "flux2-klein"} <= names and "qwen-image" not in names


def test_all_weights_learn_everything_where_they_fit() -> None:
    recipes = {m: bases.offers(parse_machine(m), "everything")[0].recipe for m in ("H100", "24GB")}
    assert recipes == {"H100": "sdxl", "24GB": "sdxl-lora"}


def test_an_npu_is_offered_nothing_of_cuda_alone() -> None:
    for base in bases.offers(parse_machine("npu 32GB"), "style"):
        recipe = base.shipped
        assert not (recipe.train.lora.base_precision or recipe.evaluate.offload)


def test_a_base_that_does_not_fit_is_refused_with_those_that_do() -> None:
    with pytest.raises(Refused, match=r"qwen-image does not fit 8 GB.*sdxl"):
        bases.choose("qwen-image", parse_machine("8GB"), "style")


def test_a_model_of_ones_own_extends_a_recipe_of_its_family(tiny_flux: Path) -> None:
    base = bases.choose(str(tiny_flux), parse_machine("24GB"), "style")
    assert base.recipe == "flux-lora-24gb" and base.model == str(tiny_flux)


def answers(
    pictures: Pictures, machine: Machine, goal: bases.Goal = "subject", word: str | None = "ohwx"
) -> Answers:
    base = bases.offers(machine, goal)[0]
    prompts = draft.ready_prompts(pictures, goal, word)
    return Answers(pictures, goal, word, machine, base, prompts, "mine", price=0.5)


def drafted(folder: Path, *about: object, **more: object) -> Recipe:
    return loaded(draft.draft(answers(*about, **more), folder), folder)  # type: ignore[arg-type]


def test_all_answers_make_a_valid_recipe(tmp_path: Path) -> None:
    """Each kind of pictures, on each kind of machine, for each goal."""
    write_folder(tmp_path / "captioned", make_pictures(9))
    write_photos(tmp_path / "set/10_ohwx dog", 3)
    write_photos(tmp_path / "set/1_dog", 5)
    places = [tmp_path / "captioned", tmp_path / "set", write_photos(tmp_path / "photos", 6)]
    places.append(write_list(tmp_path / "list.parquet", 100))
    machines = map(parse_machine, ("8GB", "4 x H100", "hpu", "cpu"))
    goals: tuple[bases.Goal, ...] = ("subject", "style", "everything")
    for pictures, machine, goal in itertools.product(map(look, map(str, places)), machines, goals):
        word = None if goal == "everything" else "ohwx"
        recipe = drafted(tmp_path, pictures, machine, goal, word)
        assert len(recipe.evaluate.prompts["new"].prompts) == 8
        assert recipe.train.processes == machine.count


def test_a_recipe_names_pictures_by_its_own_folder(tmp_path: Path) -> None:
    photos = look(str(write_photos(tmp_path / "photos", 6)))
    text = draft.draft(answers(photos, parse_machine("24GB")), tmp_path).text()
    assert "path: ./photos" in text
    other = draft.draft(answers(photos, parse_machine("24GB")), tmp_path / "photos/below").text()
    assert f"path: {tmp_path}/photos" in other


def test_only_pictures_without_captions_get_some(tmp_path: Path) -> None:
    write_folder(tmp_path / "captioned", make_pictures(6))
    photos = look(str(write_photos(tmp_path / "photos", 6)))
    card = parse_machine("24GB")
    assert drafted(tmp_path, look(str(tmp_path / "captioned")), card).caption is None
    described = drafted(tmp_path, photos, card)
    assert described.caption is not None and described.caption.prefix == "a photo of ohwx, "
    (tmp_path / "photos" / "00.txt").write_text("a fox")
    some = drafted(tmp_path, look(str(tmp_path / "photos")), card)
    assert some.caption is not None and some.caption.only_missing
    small = drafted(tmp_path, photos, parse_machine("6GB"))  # the captioner does not fit
    assert small.caption is None and small.encode.captions is not None
    assert small.encode.captions.prompts == ("a photo of ohwx",)


def test_each_source_has_a_line_of_its_own() -> None:
    sources = {"fox": {"repeats": 2}, "dog": {"repeats": 1}}
    text = Draft({"sources": sources}, {}, ()).text()
    assert text == "sources:\n  fox: {repeats: 2}\n  dog: {repeats: 1}\n"


def test_near_duplicates_are_dropped_by_the_recipe(tmp_path: Path) -> None:
    folder = write_photos(tmp_path / "photos", 6)
    shutil.copy(folder / "00.png", folder / "copy.png")
    select = drafted(tmp_path, look(str(folder)), parse_machine("24GB")).select
    assert select is not None and select.duplicates.perceptual == "hash"


def test_few_pictures_are_held_out_of_many() -> None:
    assert draft.held_out_share(60, "subject") == 0.2
    assert draft.held_out_share(50_000_000, "everything") * 50_000_000 == pytest.approx(250)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("./My photos/", "my-photos"),
        ("Фото", "mine"),
        ("a/b.csv.gz", "b"),
        ("gs://b/laion/*.parquet", "laion"),
    ],
)
def test_a_model_is_named_after_its_pictures(place: str, name: str) -> None:
    assert draft.model_name(place) == name


@pytest.mark.slow
@pytest.mark.soak  # advice has tens of variants to plan
def test_a_draft_that_does_not_fit_takes_the_advice_of_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Callable[[], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    photos = look(str(write_photos(tmp_path / "photos", 6)))
    made = draft.draft(answers(photos, parse_machine("cpu")), tmp_path)
    proven = prove(made, parse_machine("0.055GB"), tmp_path, print)
    assert proven.refusal is None and proven.recipe.train != loaded(made, tmp_path).train
    assert "so that it fits" in proven.draft.text()
