"""Recipes: loading, errors, `extends`, overrides and dumps."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from configs.errors import Refused
from configs.load_recipe import (
    dump,
    dump_yaml,
    find_recipe,
    json_schema,
    load_recipe,
    parse_override,
    parse_yaml,
    recipe_names,
)


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_valid(name: str) -> None:
    assert load_recipe(name).name == name


def test_documented_recipes_exist() -> None:
    assert {"digits", "sdxl", "sdxl-lora", "sd2"} <= set(recipe_names())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"train.learning_rat": 1}, "train.learning_rat: unknown setting (did you mean train.lea"),
        ({"trian.steps": 1}, "trian: unknown setting (did you mean train?)"),
        ({"steps": 1}, "steps: unknown setting (did you mean train.steps?)"),
        ({"epochs": 1}, "unknown setting (did you mean train.epochs or retrain.epochs?)"),
        ({"lora.rank": 1}, "lora: unknown setting (did you mean train.lora?)"),
        ({"train.runtime": "jax"}, "train.runtime: unknown setting (did you mean runtime?)"),
        ({"evaluate.steps": 1}, "(did you mean evaluate.num_inference_steps?)"),
        ({"evaluate.stepz": 1}, "(did you mean evaluate.num_inference_steps?)"),
        ({"train.num_inference_steps": 1}, "(did you mean evaluate.num_inference_steps?)"),
        ({"train.batch_size": 1}, "mean train.global_batch_size or train.micro_batch_size?)"),
        ({"source.prot": 1}, "source.prot: unknown setting (did you mean source.port?)"),
        ({"tpu": {"name": "a", "zon": "b"}}, "tpu.zon: unknown setting (did you mean tpu.zone?)"),
        ({"ssh": {"hosts": ["-oProxyCommand=x", "b"]}}, "ssh.hosts.0: "),
        ({"train.wandb": {"projekt": "a"}}, "did you mean train.wandb.project?"),
        ({"train.best_checkpoint": {"patienc": 1}}, "did you mean train.best_checkpoint.patience?"),
        ({"publish.hub": {"rep": "a/b"}}, "did you mean publish.hub.repo?"),
        ({"evaluate.prompts.new.prompt": ["a"]}, "did you mean evaluate.prompts.new.prompts?"),
        ({"train.steps": "many"}, "train.steps: it takes a whole number without a unit"),
        (
            {"encode.holdout": "10%"},
            "holdout: it takes a number without a unit, such as 0.1 for 10%",
        ),
        ({"encode": {"holdout": 0, 15: None}}, "encode.15: no setting is a number; write a dec"),
        ({"source": "./mine"}, "source: it takes a section, such as {kind: folder, path"),
        ({"source.path": "mine"}, "(of source.kind urls, folder, dataset or tars; this one is d"),
        ({"source.pth": "mine"}, "source.pth: unknown setting (there are: board, count"),
        ({"train.method": "LoRA"}, "'lora' or 'controlnet' (got 'LoRA'; did you mean lora?)"),
        ({"evaluate.scheduler": "euler_a"}, "'euler_a' is euler_ancestral here"),
        ({"evaluate.scheduler": "DDIMScheduler"}, "(got 'DDIMScheduler'; did you mean ddim?)"),
        ({"train.fsdp": 2.5}, "or Input should be 'all' (got 2.5)"),
        ({"evaluate.judges": [5]}, "evaluate.judges.0: "),
        ({"evaluate.judges": [{"name": "a"}]}, "evaluate.judges.0.path: missing; it must be set"),
        ({"train.fsdp": "half"}, "a whole number without a unit, or Input should be 'all' (got"),
        (
            {"train.lora.target_modules": "to_q"},
            "target_modules: Input should be 'attention', 'linear' or 'all', or it takes a list",
        ),
        ({"train.steps": 0}, "train.steps: Input should be greater than 0 (got 0)"),
        (
            {"slurm.time_limit": "soon"},
            "it takes a text such as 4:00:00 or 2-00:00:00 (got 'soon')",
        ),
        ({"slurm.time_limit": 60}, "it takes a text such as 4:00:00 or 2-00:00:00 (got 60)"),
        ({"train.steps": None}, "train.steps: Input should be a valid integer (got null)"),
        ({"train.epochs": 1, "train.steps": 5}, "train: epochs and steps exclude each other"),
        ({"train.epochs": 1, "train.steps": 1000}, "train: epochs and steps exclude each other"),
        (
            {"train.lr_scheduler": "constant_with_warmup"},
            "'constant_with_warmup' is constant here, with train.lr_warmup_steps",
        ),
        ({"train.optimizer": "AdamW8bit"}, "train.optimizer: 'AdamW8bit' is adamw_8bit here"),
        ({"runtime": "tpu"}, "runtime: Input should be 'torch'"),
        ({"name.x": 1}, "name is a value, not a section"),
        ({"source.kind": "ftp"}, "source.kind: 'ftp' is unknown (there are: "),
        ({"source.kind": "folders"}, "'folders' is unknown (did you mean folder?)"),
        (  # a set of prompts may be called source
            {"evaluate.prompts.source.promts": ["a"], "source": {"kind": "folders"}},
            "promts: unknown setting (did you mean evaluate.prompts.source.prompts?)",
        ),
        ({"publish.gate": "cmmd < base"}, "publish.gate: it takes a list, such as [a, b] (got"),
        ({"evaluate.prompts.new": ["a"]}, "evaluate.prompts.new: it takes a section, such as {"),
        ({"train.fsdp": True}, "train: fsdp must be a number, not true"),
        ({"train.caption_dropout_rate": False}, "caption_dropout_rate must be a number, not fals"),
        ({"encode.holdout": 1.0}, "encode.holdout: Input should be less than 1 (got 1.0)"),
        (
            {"source.kind": "folder", "source.path": "x", "source.image_column": "a"},
            "source.image_column: unknown setting (of source.kind dataset; this one is folder)",
        ),
        (
            {"train.snr_gamma": 5.0, "train.debiased_estimation_loss": True},
            "train: snr_gamma and debiased_estimation_loss",
        ),
    ],
)
def test_error_names_the_file_and_the_setting(overrides, words: str) -> None:
    with pytest.raises(Refused) as caught:
        load_recipe("digits", overrides)
    assert words in str(caught.value) and len(str(caught.value)) < 200
    assert str(caught.value).startswith(("digits.yaml", "override "))


def test_a_path_of_the_home_folder_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: digits\nstore: ~/store\nsource: {kind: folder, path: ~/a}\n", encoding="utf-8"
    )
    recipe = load_recipe(str(path), {"model.path": "~/base"})
    found = (recipe.store, getattr(recipe.source, "path", None), recipe.model.path)
    assert found == ("/home/me/store", "/home/me/a", "/home/me/base")


def test_a_prompt_is_no_path(tmp_path: Path) -> None:
    path, prompts = tmp_path / "mine.yaml", ["~/ a cat", "./ a dog"]
    path.write_text(f"extends: digits\nevaluate: {{prompts: {{a: {{prompts: {prompts}}}}}}}\n")
    recipe = load_recipe(str(path), {"evaluate.prompts.b.prompts": prompts})
    assert [list(recipe.evaluate.prompts[name].prompts) for name in "ab"] == [prompts] * 2


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"evaluate.judges": [{"name": "a"}]}, "evaluate.judges.0.path: missing; it must be set"),
        (
            {"train.lora.target_modules": [3]},
            "train.lora.target_modules.0: Input should be a valid string (got 3)",
        ),
    ],
)
def test_a_fault_inside_a_section_or_a_list_is_the_only_one(settings, line: str) -> None:
    with pytest.raises(Refused) as caught:
        load_recipe("digits", settings)
    assert str(caught.value) == f"override {line}"


def test_the_error_of_an_override_does_not_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits\ntrain: {steps: many}\n", encoding="utf-8")
    given = {"train.batch_size": 0, "trian.steps": 1, "encode": {"batch_size": 2, "holdout": 7}}
    with pytest.raises(Refused) as caught:
        load_recipe(str(path), given)
    starts = (
        *("mine.yaml: train.steps: ", "override encode.holdout: "),
        *("override train.batch_size: ", "override trian: "),
    )
    for line, start in zip(sorted(str(caught.value).splitlines()), starts, strict=True):
        assert line.startswith(start)
    path.write_text("extends: digits\nencode: {hold: 1}\n", encoding="utf-8")
    with pytest.raises(Refused, match=r"^mine\.yaml: encode\.hold: unknown setting"):
        load_recipe(str(path), {"encode": {"batch_size": 2}})
    path.write_text("extends: digits\ntrain: {processes: 2}\n", encoding="utf-8")
    with pytest.raises(Refused, match=r"^mine\.yaml with overrides: train: .*multiple of pro"):
        load_recipe(str(path), {"train.global_batch_size": 7})


def test_an_error_of_yaml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits\ntrain:\n  steps: 7\n lr: 2\n", encoding="utf-8")
    with pytest.raises(Refused, match=r"mine\.yaml, line 4: not valid YAML: expected"):
        load_recipe(str(path))
    path.write_text("extends: digits\ntrain: {}\ntrain: {}\n", encoding="utf-8")
    with pytest.raises(Refused, match=r"mine\.yaml, line 3: not valid YAML: .*train is set tw"):
        load_recipe(str(path))


@pytest.mark.parametrize(
    ("name", "words"),
    [("digit", r"digit: not found \(did you mean digits"), ("no.yaml", "no.yaml: no such file")],
)
def test_an_unknown_recipe_is_refused(name: str, words: str) -> None:
    with pytest.raises(Refused, match=words):
        load_recipe(name)


@pytest.mark.parametrize(
    "text", ["a: [", "- 1", "extends: loop.yaml", "extends: nowhere", "extends: nowhere.yaml"]
)
def test_invalid_recipe_file_raises(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("loop.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(Refused, match=r"loop\.yaml"):
        load_recipe("loop.yaml")


def test_extends_changes_given_settings_and_keeps_others(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits\nname: mine\ntrain: {steps: 7}\n", encoding="utf-8")
    recipe, parent = load_recipe(str(path)), load_recipe("digits")
    assert recipe.train.steps == 7
    assert recipe.train.learning_rate == parent.train.learning_rate
    assert recipe.source == parent.source


def test_a_description_is_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: sdxl-lora\nname: mine\n")
    assert "One Piece" in load_recipe("sdxl-lora").description
    assert load_recipe(str(tmp_path / "mine.yaml")).description == ""


def test_a_recipe_with_epochs_does_not_inherit_steps(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits-lora\ntrain: {epochs: 3}\n", encoding="utf-8")
    by_epochs = load_recipe(str(path))
    assert by_epochs.train.epochs == 3 and load_recipe("digits-lora").train.steps == 300
    for overrides in ({"train.epochs": 3}, {"train": {"epochs": 3}}):
        assert load_recipe("digits-lora", overrides).train == by_epochs.train
    assert load_recipe(str(path), {"train.steps": 7}).train.epochs is None
    path.write_text(dump(by_epochs), encoding="utf-8")
    assert load_recipe(str(path)) == by_epochs
    assert load_recipe(str(path), {"train.steps": 7}).train.epochs is None
    path.write_text("extends: digits\ntrain: {epochs: 3, steps: 7}\n", encoding="utf-8")
    with pytest.raises(Refused, match=r"train: epochs and steps exclude each other: remove"):
        load_recipe(str(path))


def test_null_drops_an_inherited_set_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = "extends: digits\nevaluate: {judges: [], prompts: {old: null}}\n"
    path.write_text(text, encoding="utf-8")
    found = load_recipe(str(path)).evaluate
    assert [*found.prompts] == ["new"] and not found.judges
    jsonschema.validate(parse_yaml(text), json_schema())
    assert [*load_recipe("digits", {"evaluate.prompts.new": None}).evaluate.prompts] == ["old"]
    with pytest.raises(Refused, match=r"evaluate\.prompts: .* at least 1 item"):
        load_recipe(str(path), {"evaluate.prompts.new": None})


def test_a_path_without_its_suffix_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").touch()
    with pytest.raises(Refused, match=r"mine: not found \(did you mean mine\.yaml\?\)"):
        load_recipe("mine")


def test_a_file_beside_the_recipe_is_suggested_for_extends(tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text("extends: digits\n", encoding="utf-8")
    path = tmp_path / "mine.yaml"
    path.write_text("extends: first.yaml\n", encoding="utf-8")
    words = r"mine\.yaml: extends: recipe first\.yaml: .* \(did you mean \./first\.yaml\?\)"
    with pytest.raises(Refused, match=words):
        load_recipe(str(path))
    path.write_text("extends: ./first.yaml\n", encoding="utf-8")
    assert load_recipe(str(path)).name == "digits"


def test_a_recipe_without_sections_is_told_to_extend_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nsource: {kind: folder, path: ./pictures}\n", encoding="utf-8")
    with pytest.raises(Refused) as error:
        load_recipe(str(path))
    begin = "begin with `extends: NAME`, such as sdxl-lora (`kiln recipes` lists them)"
    assert str(error.value) == f"mine.yaml: it lacks model, evaluate, publish: {begin}"
    path.write_text("extends: digits\nsource: {kind: folder}\n", encoding="utf-8")
    with pytest.raises(Refused, match=r"^mine\.yaml: source\.path: missing; it must be set$"):
        load_recipe(str(path))


def test_another_kind_of_source_replaces_the_section(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits\nsource: {kind: folder, path: ./pictures}\n", encoding="utf-8")
    source = load_recipe(str(path)).source
    assert source.kind == "folder"
    assert source.path == str(tmp_path / "pictures")  # ./ is relative to the recipe file


def test_an_override_to_another_kind_of_source_replaces_the_section() -> None:
    source = load_recipe("sdxl", {"source.path": "/pictures", "source.kind": "folder"}).source
    assert source.kind == "folder" and source.path == "/pictures"


def test_the_same_kind_of_source_keeps_the_other_settings(tmp_path: Path) -> None:
    """Without its columns and its sha256, the list would be read wrongly, or unchecked."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: laion-jax\nsource: {kind: urls, path: ./new.parquet}\n", encoding="utf-8"
    )
    parent = load_recipe("laion-jax").source
    expected = parent.model_copy(update={"path": str(tmp_path / "new.parquet")})
    assert load_recipe(str(path)).source == expected != parent
    again = {"source": {"kind": "urls", "path": expected.path}}
    assert load_recipe("laion-jax", again).source == expected


@pytest.mark.parametrize(
    "name", ["a.csv", "a.CSV.gz", "*.csv", "a?.csv", "https://a.org/a.csv?sig=hidden"]
)
def test_a_list_of_text_is_not_read_as_parquet(name: str) -> None:
    source = {"kind": "urls", "path": name}
    with pytest.raises(Refused, match=r"ends in \.csv: set format to csv") as error:
        load_recipe("digits", {"source": source})
    assert "hidden" not in str(error.value)
    load_recipe("digits", {"source": {**source, "format": "csv"}})


def test_a_relative_path_is_recorded_as_an_absolute_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another folder, `demo/base` would be an id on the hub."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits\nmodel: {path: ./demo/base}\n", encoding="utf-8")
    assert load_recipe(str(path)).model.path == str(tmp_path / "demo/base")
    recipe = load_recipe("digits", {"model.path": "./other"})
    assert recipe.model.path == str(tmp_path / "other")


@pytest.mark.parametrize("text", ["4e12345", '"1e5"', "12e4567"])
def test_a_revision_that_looks_like_a_number_stays_a_string(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"extends: digits\nmodel: {{revision: {text}}}\n", encoding="utf-8")
    expected = text.strip('"')
    assert load_recipe(str(path)).model.revision == expected
    key, value = parse_override(f"model.revision={text}")
    recipe = load_recipe("digits", {key: value})
    assert recipe.model.revision == expected
    path.write_text(dump(recipe), encoding="utf-8")
    assert load_recipe(str(path)) == recipe


def test_dumped_recipe_loads_as_the_same_recipe(tmp_path: Path) -> None:
    recipe = load_recipe("digits", {"train.learning_rate": 1e-5, "beam.runner": "DirectRunner"})
    path = tmp_path / "again.yaml"
    path.write_text(dump(recipe), encoding="utf-8")
    assert load_recipe(str(path)) == recipe


@pytest.mark.parametrize(
    "override", ["train.wandb.project", "publish.hub.repo", "train.best_checkpoint.metric"]
)
def test_a_section_that_is_null_in_a_dumped_recipe_can_be_set(
    tmp_path: Path, override: str
) -> None:
    path = tmp_path / "again.yaml"
    path.write_text(dump(load_recipe("flux-lora")), encoding="utf-8")
    value = "holdout_loss" if "metric" in override else "me/mine"
    settings = {override: value, "train.holdout_loss.every_n_steps": 250}
    assert value in json.dumps(load_recipe(str(path), settings).model_dump(mode="json"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.steps=10", ("train.steps", 10)),
        ("train.learning_rate=1e-5", ("train.learning_rate", 1e-5)),
        ("publish.gate=[]", ("publish.gate", [])),
        ("train.mixed_precision=no", ("train.mixed_precision", "no")),  # as YAML 1.2 has it
        ("train.deterministic=true", ("train.deterministic", True)),
        ("store=gs://b/x=y", ("store", "gs://b/x=y")),
        ("store=/data/run #2", ("store", "/data/run #2")),
        ("store= #2 é😀 ", ("store", "#2 é😀")),
        ("train.steps=10 # ten", ("train.steps", "10 # ten")),
        ("store='/data/run #2' # quoted", ("store", "/data/run #2")),
        ("publish.gate=[a] # a list", ("publish.gate", ["a"])),
        ("train.lora=null ", ("train.lora", None)),
        ("train.lora=", ("train.lora", None)),
    ],
)
def test_override_values_are_yaml(text: str, expected) -> None:
    assert parse_override(text) == expected


@pytest.mark.parametrize(
    "text", ["train.steps", "=3", "a=[", "a=b #\0", "a=b #\ud800", r'a="\UFFFFFFFF"']
)
def test_a_malformed_override_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="override"):
        parse_override(text)


def test_schema_file_matches_the_code() -> None:
    path = Path(__file__).parents[2] / "docs/recipe.schema.json"
    assert json.loads(path.read_text(encoding="utf-8")) == json_schema()


@pytest.mark.slow
@pytest.mark.parametrize("name", recipe_names())
def test_editors_find_no_fault_in_a_shipped_recipe(name: str) -> None:
    jsonschema.validate(parse_yaml(find_recipe(name).read_text(encoding="utf-8")), json_schema())


def test_override_of_a_section_keeps_other_settings() -> None:
    recipe, plain = load_recipe("digits", {"train": {"steps": 7}}), load_recipe("digits")
    assert recipe.train == plain.train.model_copy(update={"steps": 7})


def test_an_empty_section_that_changes_nothing_is_refused(tmp_path: Path) -> None:
    line = r"evaluate\.prompts: {} changes nothing of new, .*: remove it, or set what"
    for overrides in ({"evaluate.prompts": {}}, {"evaluate": {"prompts": {}}}):
        with pytest.raises(Refused, match=f"^override {line}"):
            load_recipe("digits", overrides)
    path = tmp_path / "mine.yaml"
    path.write_text("extends: digits\nevaluate: {prompts: {}}\n", encoding="utf-8")
    with pytest.raises(Refused, match=rf"^mine\.yaml: {line}"):
        load_recipe(str(path))
    empty = {"beam": {}, "train.best_checkpoint": {"metric": "clip_score"}, "train.hpu": {}}
    overrides = {**empty, "train.sample_every_n_steps": 100, "train.checkpointing_steps": 100}
    assert load_recipe("digits", overrides).beam == {}


def test_dumped_recipe_has_no_secrets() -> None:
    url = "https://me:secret@example.org/list?token=hidden"
    given = {"source": {"kind": "urls", "path": url}, "beam.s3_secret_access_key": "concealed"}
    text = dump(load_recipe("digits", given))
    assert "example.org/list" in text and "s3_secret_access_key: '...'" in text
    assert not any(word in text for word in ("secret@", "hidden", "concealed"))


def test_a_dumped_recipe_has_no_secret_of_digits() -> None:
    secrets = {"beam.s3_secret_access_key": 5550123456, "beam.s3_session_token": [1.5]}
    text = dump(load_recipe("digits", {**secrets, "beam.s3_access_key_id": None}))
    assert "s3_secret_access_key: '...'" in text and "s3_access_key_id: null" in text
    assert "5550123456" not in text and "1.5" not in text


@pytest.mark.parametrize("url", ["s3://key:hidden@bucket/a", "https://example.org/a?sig=hidden"])
@pytest.mark.parametrize(
    "setting", ["store", "publish.registry", "model.path", "model.vae", "evaluate.clip"]
)
def test_a_secret_in_a_url_that_artifacts_name_is_refused(setting: str, url: str) -> None:
    with pytest.raises(Refused, match=f"{setting}: a URL with a secret is refused") as error:
        load_recipe("digits", {setting: url})
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize("scheme", ["s3", "hf", "gs"])
def test_a_password_is_refused_unless_http_sends_it(scheme: str) -> None:
    source = {"kind": "urls", "path": f"{scheme}://us:hidden@bucket/a"}
    with pytest.raises(Refused, match=r"source\.path: a URL with user and password") as error:
        load_recipe("digits", {"source": source})
    assert "hidden" not in str(error.value)
    load_recipe("digits", {"source": {**source, "path": "https://us:hidden@example.org/a"}})


@pytest.mark.parametrize("setting", ["store", "publish.registry", "model.path", "source.path"])
def test_a_name_that_fsspec_would_split_is_refused(setting: str) -> None:
    for name in ("s3://bucket/a::b", "./a::b/c", "s3://bucket/a::/x", "zip://a::b"):
        if setting == "model.path" and "://" not in name:
            load_recipe("digits", {setting: name})  # fsspec never sees it
            continue
        source = {"source": {"kind": "urls", "path": name}}
        with pytest.raises(Refused, match=f"{setting}: `::` chains URLs, such as zip:"):
            load_recipe("digits", source if setting == "source.path" else {setting: name})


def test_a_chain_of_urls_and_an_address_of_ipv6_are_accepted() -> None:
    for path in (
        "simplecache::https://host/a.csv",
        "zip://a.csv::simplecache::s3://bucket/lists.zip",
        "zip://a.csv::/lists/a.zip",
        "libarchive://a.csv::s3://bucket/a.7z",
    ):
        source = {"kind": "urls", "format": "csv", "path": path, "base_url": "http://[::1]:8000"}
        load_recipe("digits", {"source": source})


def test_numbers_are_those_of_yaml_1_2() -> None:
    """YAML 1.1 reads 0500 as octal and 1:30 as minutes."""
    found = parse_yaml(
        "{a: 0500, b: 08, c: 1:30, d: 0x1F, e: 1_000, f: .5, g: -3, h: 190:20:30.15}"
    )
    expected = {"a": 500, "b": 8, "c": "1:30", "d": 31, "e": 1000, "f": 0.5, "g": -3}
    assert found == {**expected, "h": "190:20:30.15"}
    for text in ("0500", "08", "1:30", "0x1F", "0o7", "1_0", "-3", ".5", "+5", "0b1"):
        assert parse_yaml(dump_yaml([text])) == [text]


def test_a_merge_key_is_refused() -> None:
    """PyYAML would drop a setting that it repeats."""
    with pytest.raises(yaml.YAMLError, match="merge keys"):
        parse_yaml("train: {<<: {steps: 3, steps: 4}}")


def test_counts_of_slurm_may_be_numbers() -> None:
    slurm = {"gpus_per_node": 8, "memory": 0}
    found = load_recipe("digits", {"train.hosts": 2, "slurm": slurm}).slurm
    assert found is not None and (found.gpus_per_node, found.memory) == (8, 0)
