"""Recipes and overrides: Refused, or settings that a key and a dump can be made of."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import yaml
from fuzz.mutations import encode, mutate, mutate_tree
from fuzz.reader import Reader

from artifacts.records import canonical_json
from configs.errors import Refused
from configs.load_recipe import dump, load_recipe, parse_override
from configs.settings.recipe import Recipe

RECIPE: dict[str, Any] = {
    "name": "mine",
    "model": {"path": "./base", "revision": "4e12345"},
    "source": {"kind": "urls", "path": "s3://bucket/list.csv", "format": "csv"},
    "beam": {"runner": "DirectRunner", "direct_num_workers": 2},
    "encode": {"resolution": 512, "holdout": 0.1, "flip": True},
    "train": {
        "steps": 300,
        "learning_rate": "1e-5",
        "adam_betas": [0.9, 0.99],
        "lora": {"target_modules": ["to_q", "to_k"]},
        "timesteps": {"distribution": "logit_normal", "logit_mean": 0.5},
        "seed": 3,
    },
    "evaluate": {
        "clip": "openai/clip",
        "prompts": {"new": {"prompts": ["a cat", "a dog: \u00e9"], "images_per_prompt": 2}},
    },
    "publish": {"name": "mine", "gate": ["cmmd < base"]},
}
OVERRIDES = (
    b"train.steps=100",
    b"evaluate.prompts.new.prompts=[a, b]",
    b"source={kind: folder, path: ./pictures}",
    b"train.learning_rate=1e-4",
    b"model.vae=null",
    b"encode.flip=false",
)


def readers(folder: Path) -> list[Reader]:
    valid = yaml.safe_dump(RECIPE, sort_keys=False, allow_unicode=True).encode()
    file, child = folder / "mine.yaml", folder / "child.yaml"
    kept = folder / "kept.yaml"
    kept.write_bytes(valid)

    def recipe(rng: Random) -> bool:
        kind = rng.randrange(4)
        data = mutate(valid, rng) if kind < 2 else encode(mutate_tree(RECIPE, rng), rng)
        file.write_bytes(data)
        if kind == 3:
            child.write_bytes(mutate(b"extends: ./mine.yaml\ntrain: {steps: 7}\n", rng))
        return _is_right(child if kind == 3 else file, {}, folder)

    def override(rng: Random) -> bool:
        texts = [mutate(rng.choice(OVERRIDES), rng).decode(errors="replace") for _ in range(2)]
        try:
            overrides = dict(map(parse_override, texts))
        except Refused:
            return False
        return _is_right(kept, overrides, folder)

    return [Reader("recipe", 12, recipe), Reader("override", 8, override)]


def _is_right(path: Path, overrides: dict[str, Any], folder: Path) -> bool:
    try:
        recipe = load_recipe(str(path), overrides)
    except Refused:
        return False
    canonical_json(recipe.model_dump(mode="json"))
    _check_read_back(recipe, folder / "again.yaml")
    _check_names(yaml.compose(path.read_bytes()))
    return True


def _check_read_back(recipe: Recipe, path: Path) -> None:
    """What a run records of its recipe is a recipe, and the same one."""
    path.write_text(dump(recipe), encoding="utf-8")
    again = load_recipe(str(path))
    assert dump(again) == path.read_text(encoding="utf-8"), "it is another one when read back"


def _check_names(node: yaml.Node | None) -> None:
    """No setting was dropped for another of its name."""
    if isinstance(node, yaml.MappingNode):
        names = [key.value for key, _ in node.value]
        assert len(names) == len(set(names)), f"a name twice: {names}"
    for child in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in child if isinstance(child, tuple) else (child,):
            _check_names(part)
