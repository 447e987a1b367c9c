"""The model card: README.md with metadata, usage, metrics, gate, lineage and settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from configs.load import dump
from configs.schema import Recipe
from configs.urls import without_secrets
from tasks.panels import escape_markdown, human
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
    """README.md of the published folder, with the YAML metadata of the Hugging Face hub."""
    found = base_card(base)
    head: dict[str, Any] = {
        "license": license_of(recipe, base),
        **{k: found[k] for k in ("license_name", "license_link") if k in found},
        "base_model": without_secrets(recipe.model.path),
        "base_model_relation": "finetune" if weights.pipeline else "adapter",
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "tags": ["kilnworks", "diffusers", "text-to-image", *["lora"][: weights.adapters]],
    }
    parts = [
        "---\n" + yaml.safe_dump(head, sort_keys=False) + "---",
        f"# {escape_markdown(recipe.publish.name)}",
        escape_markdown(recipe.description),
        "![The same prompts and noise: base above, tuned below](before_after.png)",
        _use(recipe, weights),
        "## Measured\n\n" + _metric_table(metrics),
        "## Gate\n\n" + _rule_table(verdicts),
        "## Lineage\n\n" + _lineage_table(lineage),
        "## Settings\n\n```yaml\n" + dump(recipe) + "```",
    ]
    return "\n\n".join(parts) + "\n"


def metric_rows(metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per metric: base and tuned value with 95% interval, and the sample count."""
    rows = []
    for name, models in metrics.items():
        row: dict[str, Any] = {"metric": name}
        for model in ("base", "tuned"):
            row[model] = _with_interval(models.get(model))
        row["samples"] = models["tuned"]["n"]
        rows.append(row)
    return rows


def _with_interval(measured: dict[str, Any] | None) -> str:
    if measured is None:
        return "—"
    low, high = measured["ci"]
    return f"{human(float(measured['value']))} [{human(float(low))}, {human(float(high))}]"


def _use(recipe: Recipe, weights: Weights) -> str:
    prompt = next((s.prompts[0] for s in recipe.evaluate.prompts.values() if s.prompts), "a prompt")
    return (
        "```python\n"
        + ("import torch\n" if recipe.train.aesthetic_score else "")
        + "from diffusers import DiffusionPipeline\n\n"
        f"{_load(recipe, weights)}"
        f"{_scored(recipe)}"
        f"pipe({prompt!r}, {_masked(recipe)}"
        f"num_inference_steps={recipe.evaluate.num_inference_steps}, "
        f"guidance_scale={recipe.evaluate.guidance_scale}).images[0]\n"
        "```"
    ) + _about_adapters(recipe, weights)


def _masked(recipe: Recipe) -> str:
    """The picture and mask arguments of an inpainting pipeline; empty for others."""
    return "image=picture, mask_image=mask, " if recipe.train.inpainting else ""


def _scored(recipe: Recipe) -> str:
    """Code that passes the aesthetic score to the UNet, which no diffusers pipeline supports."""
    if not recipe.train.aesthetic_score:
        return ""
    given = recipe.evaluate
    scores = [given.negative_aesthetic_score, given.aesthetic_score][given.guidance_scale <= 1 :]
    return (
        f"scores = torch.tensor({scores}, device=pipe.device)  # of the empty prompt, of yours\n"
        "pipe.unet.register_forward_pre_hook(\n"
        '    lambda _, given, named: (given, named | {"class_labels": scores}), with_kwargs=True\n'
        ")\n"
    )


def _load(recipe: Recipe, weights: Weights) -> str:
    if weights.pipeline:
        return 'pipe = DiffusionPipeline.from_pretrained("path/to/this/folder", dtype="auto")\n'
    base = repr(without_secrets(recipe.model.path))
    text = (
        f'pipe = DiffusionPipeline.from_pretrained({base}, dtype="auto")\n'
        'pipe.load_lora_weights("path/to/this/folder")\n'
    )
    if recipe.model.vae is not None:
        text += f"# Measured with the VAE {without_secrets(recipe.model.vae)!r}.\n"
    if weights.scheduler:
        text += (
            "# It was trained for the scheduler in scheduler/: load that one into the pipeline.\n"
        )
    return text


def _about_adapters(recipe: Recipe, weights: Weights) -> str:
    if not weights.adapters:
        return ""
    lora, where = recipe.train.lora, ""
    if weights.pipeline:
        where = "They are merged into these weights; `lora/` has separate copies. "
    return (
        f"\n\nAdapters of rank {lora.rank}{' with DoRA' if lora.dora else ''}. {where}"
        "`pytorch_lora_weights.safetensors` is in diffusers' format; the file ending in "
        "`_kohya.safetensors`, if present, is in kohya's layout."
    )


def _metric_table(metrics: dict[str, Any]) -> str:
    lines = ["| metric | base | tuned | samples |", "|---|---|---|---|"]
    for row in metric_rows(metrics):
        cells = (escape_markdown(row[k]) for k in ("metric", "base", "tuned", "samples"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\nIn brackets: 95% confidence interval."


def _rule_table(verdicts: list[Verdict]) -> str:
    if not verdicts:
        return "No rules: everything passes."
    lines = ["| rule | value | bound | verdict |", "|---|---|---|---|"]
    for row in as_rows(verdicts):
        cells = (escape_markdown(human(v)) for v in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _lineage_table(lineage: dict[str, Any]) -> str:
    lines = ["| what | fingerprint |", "|---|---|"]
    lines += [f"| {escape_markdown(name)} | `{value}` |" for name, value in lineage.items()]
    return "\n".join(lines)
