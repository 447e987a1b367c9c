"""The model card: README.md with metadata, usage, metrics, gate, lineage and settings.

The published recipe has the names of folders in place of absolute local paths.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from artifacts.models import LICENSE_FILES, local_model
from configs.load_recipe import dump, dump_yaml, parse_yaml
from configs.secrets import without_secrets
from configs.settings.data import Encode
from configs.settings.evaluate import Evaluate, Sibling
from configs.settings.recipe import Model, Publish, Recipe
from configs.settings.train import Train
from configs.settings.train_parts import Lora
from runtimes.adapters.lora_files import LORA_WEIGHTS
from runtimes.families import Family
from runtimes.objective.noise_schedule import SCHEDULERS, read_scheduler_config
from runtimes.pipeline_folder.folder import Base
from runtimes.pipeline_folder.single_file import file_sha256, is_single_file
from runtimes.pipeline_folder.weights import pipeline_variant, weight_variant
from tasks.build_or_reuse import GRID
from tasks.encode.near_duplicates import copies_facts
from tasks.evaluate.metrics import metric_rows
from tasks.panels import escape_markdown, human, markdown_table
from tasks.publish import comfyui
from tasks.publish.assemble import KOHYA_SUFFIX
from tasks.publish.promotion_gate import Verdict, as_rows
from tasks.trained_weights import TrainedWeights

#: The start of a path that only this machine has.
ABSOLUTE = re.compile(r"(file|local)://|[/~]")
#: Settings whose values are no places.
TEXTS = {"description", "prompts"}


def published_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings of `dump` with names in place of absolute local paths.

    What lies in the folder of the base begins with the name of that folder.
    """
    base = recipe.model.path

    def shown(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: shown(item, key) for key, item in value.items()}
        if isinstance(value, list):
            return [shown(item, name) for item in value]
        if not isinstance(value, str) or name in TEXTS:
            return value
        if f"{value}/".startswith(f"{base}/"):
            return f"{base_name(base)}{value[len(base) :]}"
        return Path(value).name if ABSOLUTE.match(value) else value

    settings: dict[str, Any] = shown(parse_yaml(dump(recipe)))
    return settings


def hub_id(path: str) -> str | None:
    """A path that the hub's metadata may name: owner/name; None for folders and URLs."""
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not path.startswith((".", "~"))
    return path if is_id and not Path(path).is_dir() and not is_single_file(path) else None


def base_name(path: str) -> str:
    """A base as readers on other machines know it: hub id, URL, or a local folder's name."""
    return Path(path).absolute().name if is_local(path) else without_secrets(path)


def place_in_code(path: str, folder: str = "path/to") -> str:
    """A model as the card's code names it: `base_name`, which of a local folder is in `folder`.

    A checkpoint file is there as a folder, too.
    """
    if is_single_file(path):
        return f"{folder}/{Path(path.partition('?')[0]).stem}"
    return f"{folder}/{base_name(path)}" if is_local(path) else base_name(path)


def has_vae_folder(path: str, vae: Path) -> bool:
    """Whether `vae` is the folder `vae` of the pipeline at a path, and not the model there."""
    folder = local_model(path)  # None of the hub or a URL, whose copies have other names
    return vae.name == "vae" and (folder is None or vae.parent == folder)


def is_local(path: str) -> bool:
    """Whether only this machine has what is at a path."""
    return bool(ABSOLUTE.match(path)) or ("://" not in path and hub_id(path) is None)


FOLDER = "path/to/this/folder"  # of the card, in its code
VAES = "path/to/vae"  # of a local VAE, in the card's code: its name may be the base's
TAG = "kilnworks"  # by which a push knows its own repositories
UNKNOWN_LICENSE = "other"
LICENSE_FIELDS = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Weights:
    """The weights in a published folder."""

    pipeline: bool  # a full pipeline; otherwise adapters or a ControlNet only
    adapters: bool = False
    scheduler: str | None = None  # class of a scheduler that differs from the base's
    variant: str | None = None  # of the base's weight files, such as fp16
    vae_variant: str | None = None  # of the weight files of the recipe's VAE
    vae_subfolder: bool = False  # whether the recipe's VAE is a part of a pipeline
    absent: tuple[str, ...] = ()  # text encoders and tokenizers that the pipeline goes without
    kohya: bool = False  # whether the adapters are there in kohya's layout, too
    workflow: bool = False  # whether a workflow for ComfyUI lies beside them
    family: Family | None = None  # its pipeline may have other arguments of guidance
    caption_tokens: int | None = None  # T5's maximum, where it is not the pipeline's default
    chunks: int = 1  # in which CLIP reads a prompt
    zero_empty: bool = False  # whether embeddings of zeros replace the empty prompt's
    emphasis: str = "text"  # as encode.captions.emphasis
    control: bool = False  # whether it is a ControlNet

    @classmethod
    def of(
        cls,
        tuned: TrainedWeights,
        base: Base,
        out: Path,
        *,
        merged: bool,
        vae_place: str | None = None,
    ) -> Weights:
        """The weights in the folder `out`; `vae_place` is `model.vae`."""
        has_lora = tuned.lora is not None
        has_control = "controlnet" in tuned.parts
        own = tuned.parts.get("scheduler")
        vae = base.vae_folder
        scheduler = None if own is None else read_scheduler_config(own)["_class_name"]
        return cls(
            pipeline=not has_control and (merged or not has_lora),
            adapters=has_lora,
            control=has_control,
            scheduler=scheduler,
            variant=pipeline_variant(base.folder),
            vae_variant=None if vae is None else weight_variant(vae),
            vae_subfolder=bool(vae and vae_place and has_vae_folder(vae_place, vae)),
            absent=base.absent_text_parts,
            kohya=any(out.rglob(f"*{KOHYA_SUFFIX}")),
            workflow=any(out.rglob(comfyui.WORKFLOW)),
            family=base.family,
            caption_tokens=base.unusual_text_length,
            chunks=base.chunks,
            zero_empty=base.encoders["empty_prompt"] == "zeros",
            emphasis=base.emphasis,
        )


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
        header = yaml.safe_load(text[4:].split("\n---", 1)[0])
    except yaml.YAMLError:
        return {}
    if not isinstance(header, dict):
        return {}
    return {name: header[name] for name in LICENSE_FIELDS if isinstance(header.get(name), str)}


def license_of(settings: Publish, base: Path) -> str:
    """The licence of the recipe, else of the base's card, else `other`."""
    return settings.license or base_card(base).get("license", UNKNOWN_LICENSE)


def shown_license(settings: Publish, base: Path) -> str:
    """`license_of` for people: the name in place of `other`, where the base's card has it."""
    short = license_of(settings, base)
    card = base_card(base)
    named = short == UNKNOWN_LICENSE == card.get("license")
    return card.get("license_name", short) if named else short


def license_conflict(settings: Publish, base: Path) -> str | None:
    """One line if `publish.license` differs from the licence in the base's card."""
    ours = settings.license
    card = base_card(base)
    theirs = card.get("license")
    if ours is None or theirs is None or ours == theirs:
        return None
    name = card.get("license_name", theirs) if theirs == UNKNOWN_LICENSE else theirs
    return f"publish.license: {ours} differs from the base's licence, {name}: ask who may grant it"


def license_files(base: Path) -> list[Path]:
    """The texts of the base's licence and its notices, which a derived model must come with."""
    return [
        path
        for path in sorted(base.iterdir())
        if path.is_file() and any(fnmatch(path.name.upper(), form) for form in LICENSE_FILES)
    ]


def write_card(
    recipe: Recipe,
    base: Path,
    measured: dict[str, Any],
    verdicts: list[Verdict],
    lineage: dict[str, Any],
    weights: Weights,
    training: dict[str, Any] | None = None,
    *,
    forced: str | None = None,
    columns: Sequence[Mapping[str, Any]] = (),
    sources: Sequence[Mapping[str, Any]] = (),
) -> str:
    """README.md of the published folder, with the metadata of the Hugging Face hub.

    Args:
        measured: the content of metrics.json.
        training: facts of the training run for people, as of `training_facts`.
        forced: the reason to publish a model that failed the gate.
        columns: rows of tasks.data_set.column_facts, of the columns kept from the source.
        sources: rows of the sources of a mixture.
    """
    from huggingface_hub import ModelCard

    drawing = recipe.evaluate
    settings = published_settings(recipe)
    vae = recipe.model.vae
    scores = [drawing.negative_aesthetic_score, drawing.aesthetic_score]
    card = ModelCard.from_template(
        _metadata(recipe, base, measured, weights),
        template_path=str(Path(__file__).with_name("model_card.md.jinja")),
        recipe=recipe,
        settings=dump_yaml(settings),
        base=_base(recipe.model, file_sha256(base) or lineage.get("base")),
        is_single_file=is_single_file(recipe.model.path),
        folder=FOLDER,
        lora_weights=LORA_WEIGHTS,
        base_path=place_in_code(recipe.model.path),
        vae=None if vae is None or weights.pipeline else place_in_code(vae, VAES),
        weights=weights,
        adapter_rows=_adapter_rows(recipe.publish.file_stem, recipe.train.lora, weights),
        lora_files=_lora_files(recipe.train),
        sibling=drawing.model and _base(drawing.model, None),
        on_sibling=drawing.on_sibling,
        prompt=prompt_of(drawing),
        training=training,
        guidance=_guidance(drawing, weights.family),
        references=_reference_arguments(recipe, weights.family),
        drawn_with=None if drawing.scheduler is None else SCHEDULERS[drawing.scheduler],
        scores=scores if drawing.guidance_scale > 1 else scores[1:],
        metric_table=markdown_table(metric_rows(measured["metrics"], measured["differences"])),
        rule_table=markdown_table(as_rows(verdicts)) if verdicts else "No rules.",
        forced=forced,
        column_table=markdown_table(columns) if columns else None,
        source_table=markdown_table(sources) if sources else None,
        license_name=shown_license(recipe.publish, base),
        license_files=[path.name for path in license_files(base)],
        lineage=lineage,
        escape=escape_markdown,
        repr=repr,
        human=human,
        shell_quote=shlex.quote,
        source="; ".join(_source(part, name) for name, part in recipe.by_source.items()),
    )
    return str(card)


def prompt_of(settings: Evaluate) -> str:
    """The prompt in the card's code."""
    return next(iter(_first_prompts(settings)), "a prompt")


def _metadata(recipe: Recipe, base: Path, measured: dict[str, Any], weights: Weights) -> Any:
    """ModelCardData: what the Hugging Face hub shows beside a model and searches by."""
    from huggingface_hub import EvalResult, ModelCardData

    shown = license_of(recipe.publish, base)
    fields = base_card(base)
    if fields.get("license") != shown:  # the name and link are those of another licence
        fields = {}
    base_model = hub_id(recipe.model.path)
    relation = "finetune" if weights.pipeline else "adapter"
    kinds = ["lora"] * weights.adapters + ["controlnet"] * weights.control
    sources = [part.source for part in recipe.by_source.values()]
    datasets = [hub_id(source.path) for source in sources if source.kind == "dataset"]
    return ModelCardData(
        license=shown,
        license_name=fields.get("license_name"),
        license_link=fields.get("license_link"),
        base_model=base_model,
        base_model_relation=base_model and relation,
        datasets=[*filter(None, datasets)] or None,
        library_name="diffusers",
        pipeline_tag="image-to-image" if recipe.has_references else "text-to-image",
        tags=[TAG, "diffusers", "text-to-image", *kinds],
        thumbnail=GRID,
        widget=[
            {"text": text, "output": {"url": GRID}} for text in _first_prompts(recipe.evaluate)
        ],
        model_name=recipe.publish.name,
        eval_results=[
            EvalResult(
                task_type="text-to-image",
                task_name="Text to image",
                dataset_type=recipe.name,
                dataset_name=f"prompts and held-out pictures of the recipe {recipe.name}",
                metric_type=name,
                metric_name=name,
                metric_value=float(f"{models['tuned']['value']:.4g}"),  # as tables have it
            )
            for name, models in measured["metrics"].items()
        ],
    )


def _guidance(settings: Evaluate, family: Family | None) -> dict[str, Any]:
    """The arguments of guidance of the pipeline's call, as the evaluation has drawn with it."""
    arguments: dict[str, Any] = {"guidance_scale": settings.guidance_scale}
    size = {"height": settings.height, "width": settings.width}  # the card has them already
    if family is not None:
        known = arguments | (size if None not in size.values() else {})
        arguments = family.pipeline_arguments(None, known, count=1)
        arguments = {name: value for name, value in arguments.items() if name not in size}
    if settings.true_cfg_scale > 1:
        arguments |= {"true_cfg_scale": settings.true_cfg_scale, "negative_prompt": ""}
    first = {n: v[0] if isinstance(v, list) else v for n, v in arguments.items()}
    return {name: value for name, value in first.items() if value is not None}


def _reference_arguments(recipe: Recipe, family: Family | None) -> Mapping[str, Any] | None:
    """Arguments of the pipeline's call beside a reference; None without references."""
    if family is None or not recipe.has_references:
        return None
    return family.reference_arguments


def _adapter_rows(name: str, lora: Lora, weights: Weights) -> list[tuple[str, str, str]]:
    """(tool, file, use) of the tools, other than diffusers, that read the adapters."""
    folder = "lora/" if weights.pipeline else ""
    kohya_file = f"{folder}{name}{KOHYA_SUFFIX}"
    family = weights.family
    names = family.kohya if family is not None and weights.kohya else None
    file = family and comfyui.adapter_file(family, name, lora, kohya=weights.kohya)
    if file is None:
        no_dora = "not with DoRA, whose magnitudes ComfyUI does not read in this layout"
        rows = [("ComfyUI", f"{folder}{LORA_WEIGHTS}", no_dora)]
    else:
        load = "copy it to `models/loras`, and add the node *Load LoRA*"
        if weights.workflow:
            load += f"; or drag `{folder}{comfyui.PICTURE}` into the window: it has the workflow"
        rows = [("ComfyUI", f"{folder}{file}", load)]
    if names is not None and not lora.dora:
        kohya = names.in_invokeai
        invokeai = kohya_file if kohya else f"{folder}{LORA_WEIGHTS}"
        rows.append(("InvokeAI", invokeai, "add it on the page *Models*"))
    if names is not None:
        load = f"`--network_module {names.network_module} --network_weights FILE`"
        if lora.target_modules != "attention":
            load += f"; it ignores {names.ignored}"
        no_dora = "not with DoRA, whose magnitudes it ignores"
        rows.append((names.trainer, kohya_file, no_dora if lora.dora else load))
    return rows


def hardware_of(run: Mapping[str, Any]) -> str | None:
    """What a training ran on, from the `run` of its manifest: a process's device, on N hosts."""
    device = run.get("device")
    if run.get("hosts", 1) == 1:
        return device
    each = f", each with {count} processes" if (count := run["processes"]) > 1 else ""
    return f"{run['hosts']} hosts of {run['cluster']}{each}: {device}"


def training_facts(
    run: dict[str, Any], summary: dict[str, Any], settings: Encode
) -> dict[str, Any]:
    """Hardware, hours and versions of a training run, from its manifest; no energy: not measured.

    Hours are those of the last attempt of a resumed run.

    Args:
        summary: of the train artifact, with the checkpoint that a rule chose and the numbers of
            batches that a divergence excluded, and of copies that were left out.
        settings: what the recipe holds out.
    """
    chosen = None
    if "chosen_step" in summary:
        chosen = f"step {summary['chosen_step']} of {summary['steps']}, {summary['chosen_because']}"
    versions = run.get("versions", {})
    names = ("torch", "jax", "torch_xla", "mindspore", "diffusers", "transformers")
    facts = {
        "hardware": hardware_of(run),
        "runtime": run.get("runtime"),
        "checkpoint": chosen,
        "batches left out after a divergence": summary.get("batches_left_out"),
        **copies_facts(settings.model_dump(), summary.get("copies_left_out", 0)),
        "hours": round(run["seconds"] / 3600, 2) if "seconds" in run else None,
        "hours count from step": run.get("resumed_from") or None,
        "images per second": run.get("images_per_second"),
        "versions": ", ".join(f"{name} {versions[name]}" for name in names if name in versions),
    }
    return {name: value for name, value in facts.items() if value not in (None, "")}


def _lora_files(settings: Train) -> dict[str, str]:
    """Words -> name of each file of adapters that training was given."""
    lora = settings.lora
    files = {"started with": lora.start, "assistant, in no file here": lora.assistant}
    return {words: base_name(file) for words, file in files.items() if file is not None}


def _base(model: Model | Sibling, digest: str | None) -> str:
    """The base, with its revision, or with the digest of the weights of a local folder."""
    named = base_name(model.path)
    if model.revision is not None:
        return f"{named}, revision {model.revision}"
    if digest is not None and is_single_file(model.path):
        return f"{named}, sha256 {digest}"
    if digest is not None and is_local(model.path):
        return f"{named}, sha256 {digest[:12]}…"
    return named


def _source(recipe: Recipe, name: str) -> str:
    """Name in the mixture, kind, place and revision of the source."""
    source = published_settings(recipe)["source"]
    facts = [source["kind"], source.get("path"), source.get("revision")]
    text = ", ".join(str(fact) for fact in facts if fact)
    if source["kind"] == "drawn":
        text = f"{source['count']:,} pictures drawn by the base"
    return f"{name}: {text}" if name else text


def _first_prompts(settings: Evaluate) -> list[str]:
    """The first prompt of each prompt set."""
    return [text for listed in settings.prompts.values() for text in listed.texts[:1]]
