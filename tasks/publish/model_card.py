"""The model card: README.md with metadata, usage, metrics, gate, lineage and settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.load import dump
from configs.recipe import Recipe
from configs.redact_urls import without_secrets
from tasks.evaluate.metric_suite import metric_rows
from tasks.panels import escape_markdown, markdown_table
from tasks.publish.gate import Verdict, as_rows
from tasks.trained_weights import TrainedWeights

UNKNOWN_LICENSE = "other"
LICENSE_FIELDS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Weights:
    """The weights in a published folder."""

    pipeline: bool  # a full pipeline; otherwise adapters only
    adapters: bool = False
    scheduler: bool = False  # a scheduler that differs from the base's

    @classmethod
    def of(cls, tuned: TrainedWeights, *, merged: bool) -> Weights:
        has_lora = tuned.lora is not None
        return cls(merged or not has_lora, has_lora, "scheduler" in tuned.parts)


def base_card(base: Path) -> dict[str, str]:
    """The licence fields of the YAML metadata in the base's README.md, where they are texts.

    Nothing else is read: YAML aliases in a hostile card would expand to gigabytes.
    """
    path = base / "README.md"
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("---\n"):
        return {}
    try:
        found = yaml.safe_load(text[4:].split("\n---", 1)[0])
    except yaml.YAMLError:
        return {}
    if not isinstance(found, dict):
        return {}
    return {name: found[name] for name in LICENSE_FIELDS if isinstance(found.get(name), str)}


def license_of(recipe: Recipe, base: Path) -> str:
    """The licence of the recipe, else of the base's card, else `other`."""
    return recipe.publish.license or base_card(base).get("license", UNKNOWN_LICENSE)


def write_card(
    recipe: Recipe,
    base: Path,
    metrics: dict[str, Any],
    verdicts: list[Verdict],
    lineage: dict[str, Any],
    weights: Weights,
) -> str:
    """README.md of the published folder, with the metadata of the Hugging Face hub."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    found = base_card(base)
    results = [
        EvalResult(
            task_type="text-to-image",
            dataset_type=recipe.name,
            dataset_name=f"prompts and held-out pictures of the recipe {recipe.name}",
            metric_type=name,
            metric_value=models["tuned"]["value"],
        )
        for name, models in metrics.items()
    ]
    data = ModelCardData(
        license=license_of(recipe, base),
        license_name=found.get("license_name"),
        license_link=found.get("license_link"),
        base_model=without_secrets(recipe.model.path),
        base_model_relation="finetune" if weights.pipeline else "adapter",
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=["kilnworks", "diffusers", "text-to-image", *["lora"][: weights.adapters]],
        model_name=recipe.publish.name,
        eval_results=results,
    )
    given, sets = recipe.evaluate, recipe.evaluate.prompts.values()
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("model_card.md.jinja")),
        recipe=recipe,
        settings=dump(recipe),
        weights=weights,
        prompt=next((one.prompts[0] for one in sets if one.prompts), "a prompt"),
        scores=[given.negative_aesthetic_score, given.aesthetic_score][given.guidance_scale <= 1 :],
        metric_table=markdown_table(metric_rows(metrics)),
        rule_table=markdown_table(as_rows(verdicts)) if verdicts else "No rules.",
        lineage=lineage,
        escape=escape_markdown,
        repr=repr,
        without_secrets=without_secrets,
    )
    return str(card)
