"""Adapters are drawn and judged on another base of equal shapes, too."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from evaluation_world import World, evaluation_recipe, metrics_in
from safetensors.torch import load_file, save_file
from tiny_adapters import make_lora, write_adapters_of

from artifacts.store import Artifact, KeyParts
from configs.errors import Refused
from configs.settings.evaluate import Evaluate
from configs.settings.recipe import Recipe
from configs.settings.train import Train
from configs.settings.train_parts import Lora
from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.pipeline_folder.folder import Base
from tasks.evaluate.inputs import EvalInputs, fingerprint
from tasks.evaluate.metrics import metric_names
from tasks.evaluate.published import metrics_of_published
from tasks.evaluate.stage import EvaluateStage, check_sibling, read_estimates
from tasks.progress import Progress
from tasks.publish.promotion_gate import check_rules, judge
from tasks.train import notes_of_distillation

pytestmark = pytest.mark.slow
SAMPLER = {"num_inference_steps": 1, "guidance_scale": 1.0}


@pytest.fixture
def sibling(tiny_sdxl: Path, tmp_path: Path) -> Path:
    """The base with other weights."""
    folder = Path(shutil.copytree(tiny_sdxl, tmp_path / "turbo"))
    (file,) = (folder / "unet").glob("*.safetensors")
    weights = load_file(file)
    torch.manual_seed(0)
    changed = {name: weight + 0.05 * torch.randn_like(weight) for name, weight in weights.items()}
    save_file(changed, file, {"format": "pt"})
    return folder


@pytest.fixture
def adapters(world: World, tmp_path: Path) -> Artifact:
    """A training's adapters."""
    draft = world.store.draft(KeyParts("train", 1, {"adapters": 1}, {}))
    draft.upload(str(make_lora(tmp_path / LORA_WEIGHTS)), LORA_WEIGHTS)
    return draft.commit({}, {})


def recipe_of(world: World, base: Path, sibling: Any = None, **evaluate: Any) -> Recipe:
    recipe = evaluation_recipe(Path(world.store.root), base, world.clip, **evaluate)
    changed = recipe.evaluate.model_dump() | {"model": sibling}
    return recipe.model_copy(update={"evaluate": Evaluate(**changed)})


def data_of(world: World, recipe: Recipe) -> EvalInputs:
    """The inputs of a recipe, with the sibling that it names."""
    named = recipe.evaluate.model
    data = replace(world.inputs(recipe), base=Base.open(Path(recipe.model.path)))
    sibling = None if named is None else Base.open(Path(named.path))
    return replace(data, measuring=replace(data.measuring, sibling=sibling))


def evaluate(world: World, recipe: Recipe, trained: Artifact) -> Artifact:
    stage = EvaluateStage(data_of(world, recipe), trained, run=world.run)
    draft = world.store.draft(stage.parts)
    return draft.commit(stage.build(draft, Progress("evaluate")), {})


def test_adapters_have_the_metrics_that_they_have_on_the_sibling_as_a_base(
    world: World, adapters: Artifact, sibling: Path, tmp_path: Path
) -> None:
    named = {"path": str(sibling), **SAMPLER}
    recipe = recipe_of(world, world.model, sibling=named)
    evaluated = evaluate(world, recipe, adapters)
    alone = metrics_in(evaluate(world, recipe_of(world, sibling, **SAMPLER), adapters))
    both = metrics_in(evaluated)
    assert {*both} - {"holdout_loss"} >= {*metric_names(recipe)} - {"holdout_loss"}
    there = {name.removesuffix("@sibling"): m for name, m in both.items() if "@" in name}
    drawn = {name: m for name, m in alone.items() if not name.startswith("holdout_loss")}
    assert there == drawn and there["cmmd"]["base"] != there["cmmd"]["tuned"]
    assert both["cmmd"] != both["cmmd@sibling"]
    assert {*evaluated.summary["drawn"]} == {"base", "tuned", "base@sibling", "tuned@sibling"}
    assert "cmmd@sibling" in evaluated.summary["differences"]
    estimates = read_estimates(evaluated)
    bound = both["cmmd@sibling"]["base"]["value"]
    rules = ["cmmd@sibling >= base - 1000", "cmmd@sibling > base + 1000"]
    verdicts = judge(rules, estimates)
    assert [verdict.passed for verdict in verdicts] == [True, False]
    assert verdicts[0].bound == pytest.approx(bound - 1000)


def test_the_champion_is_measured_on_the_sibling_too(
    world: World, adapters: Artifact, sibling: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(world, world.model, sibling=str(sibling))
    evaluated = evaluate(world, recipe, adapters)
    champion = tmp_path / "champion"
    champion.mkdir()
    make_lora(champion / LORA_WEIGHTS)
    (champion / "recipe.yaml").write_text(yaml.safe_dump({"model": {"path": str(world.model)}}))
    data = data_of(world, recipe)
    metrics, _ = metrics_of_published(data, evaluated, world.build, str(champion), run=world.run)
    own = read_estimates(evaluated)["tuned"]
    assert metrics["cmmd@sibling"].value == own["cmmd@sibling"].value
    rule = ["cmmd@sibling >= champion"]
    (verdict,) = judge(rule, {"tuned": own, "champion": metrics}, champion=True)
    assert verdict.passed and verdict.bound == own["cmmd@sibling"].value


def test_a_champion_whose_adapters_do_not_fit_the_sibling_has_no_metrics_there(
    world: World, adapters: Artifact, sibling: Path, tiny_sd: Path, tmp_path: Path
) -> None:
    """Its recipe had another base."""
    recipe = recipe_of(world, world.model, sibling=str(sibling))
    evaluated = evaluate(world, recipe, adapters)
    champion = tmp_path / "champion"
    champion.mkdir()
    write_adapters_of(champion / LORA_WEIGHTS, Base.open(tiny_sd), Lora(rank=1))
    (champion / "recipe.yaml").write_text(yaml.safe_dump({"model": {"path": str(tiny_sd)}}))
    data = data_of(world, recipe)
    metrics, _ = metrics_of_published(data, evaluated, world.build, str(champion), run=world.run)
    assert "cmmd" in metrics and not any(name.endswith("@sibling") for name in metrics)


def test_metrics_are_comparable_on_the_same_sibling_with_the_same_sampler(
    world: World, adapters: Artifact, sibling: Path
) -> None:
    named: list[Any] = [None, str(sibling), {"path": str(sibling), **SAMPLER}, str(world.model)]
    stages = [
        EvaluateStage(data_of(world, recipe_of(world, world.model, sibling=one)), adapters)
        for one in named
    ]
    assert len({stage.parts.key for stage in stages}) == len(named)
    assert len({fingerprint(stage.data) for stage in stages}) == len(named)
    assert "sibling" not in json.dumps(stages[0].parts.as_dict())


def test_a_rule_on_the_sibling_needs_one(world: World) -> None:
    rule = ["clip_score@sibling >= base"]
    check_rules(rule, metric_names(recipe_of(world, world.model, sibling="a/b")), 20)
    with pytest.raises(Refused, match="clip_score@sibling is not measured"):
        check_rules(rule, metric_names(world.recipe), 20)


def test_a_base_that_adapters_or_captions_do_not_fit_is_no_sibling(
    world: World, sibling: Path, tiny_sd: Path, tmp_path: Path
) -> None:
    base = Base.open(world.model)
    lora = {"method": "lora", "lora": {"target_modules": ["to_k", "conv1"]}}
    recipe = recipe_of(world, world.model, sibling=str(sibling))
    recipe = recipe.model_copy(update={"train": Train(**lora)})
    check_sibling(recipe, base, Base.open(sibling))

    def refused(folder: Path) -> str:
        with pytest.raises(Refused) as error:
            check_sibling(recipe, base, Base.open(folder))
        return str(error.value)

    assert "it is of family sd, the base is of sdxl" in refused(tiny_sd)

    def change(part: str, name: str) -> Path:
        """A copy of the sibling in which a matrix has one column less."""
        copy = Path(shutil.copytree(sibling, tmp_path / name, dirs_exist_ok=True))
        (file,) = (copy / part).glob("*.safetensors")
        weights = load_file(file)
        weights[name] = weights[name][:, 1:].contiguous()
        save_file(weights, file, {"format": "pt"})
        return copy

    unadapted = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight"
    check_sibling(recipe, base, Base.open(change("unet", unadapted)))
    words = refused(change("unet", unadapted.replace("to_q", "to_k")))
    assert "unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_k is (32, 32)" in words
    (file,) = (sibling / "text_encoder").glob("*.safetensors")
    name = next(name for name in load_file(file) if name.endswith("fc1.weight"))
    assert "its text_encoder is another one" in refused(change("text_encoder", name))


def test_a_base_of_few_steps_is_warned_of_without_an_assistant(
    tiny_sdxl: Path,
    tiny_flux: Path,
    tiny_flux_schnell: Path,
    tiny_flux2: Path,
    tiny_flux2_distilled: Path,
    tiny_z_image: Path,
    tmp_path: Path,
) -> None:
    turbo = Path(shutil.copytree(tiny_z_image, tmp_path / "z-image-turbo"))
    scheduler = turbo / "scheduler/scheduler_config.json"
    settings = json.loads(scheduler.read_text())
    distilled = []
    for shift in (6.0, 3.0):
        scheduler.write_text(json.dumps(settings | {"shift": shift}))
        distilled.append(bool([*notes_of_distillation(Train(), Base.open(turbo))]))
    assert distilled == [False, True]
    for folder, expected in (
        *((tiny_sdxl, False), (tiny_flux, False), (tiny_flux2, False)),
        *((tiny_flux_schnell, True), (tiny_flux2_distilled, True)),
    ):
        base = Base.open(folder)
        assert bool([*notes_of_distillation(Train(), base)]) == expected, folder.name
        lora = Train(method="lora", lora=Lora(assistant="file"))
        assert not [*notes_of_distillation(lora, base)]
