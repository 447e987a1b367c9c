"""The generate stage: one model's pictures of given prompts, with an index of the pictures."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from pydantic import ValidationError

from artifacts.models import check_model_available, local_model, resolve_model
from artifacts.records import digest_json
from artifacts.store import Artifact, Draft
from configs.errors import Refused
from configs.explain_errors import explain, hint_of
from configs.settings.evaluate import Sampling
from configs.settings.generate import Generate
from configs.settings.recipe import NAME, team_of
from runtimes import registry as runtimes_registry
from runtimes.families import all_families
from runtimes.objective.noise_schedule import TABULATED, drawing_config, read_scheduler_config
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import GenerateJob
from runtimes.sample.control_pictures import read_controls, sha256_of
from runtimes.sample.reference_pictures import read_picture
from runtimes.sample.sampling_inputs import check_size, size_step
from tasks.build_or_reuse import RECIPE, Stage
from tasks.child_process import run_job
from tasks.code_version import runtime_facts
from tasks.cut_captions import cut_facts, tell_cut_prompts
from tasks.evaluate.draw import EvalModel, RunJob, progress_callback, sampler_settings, scratch
from tasks.evaluate.edits import PictureFile, local_file
from tasks.evaluate.metrics import read_prompts
from tasks.evaluate.published import find_parts, is_complete_here, load_published_model
from tasks.panels import Facts, Panel, PicturePanel, Table, picture_grid, to_png
from tasks.progress import Progress
from tasks.publish.registry import Registry, model_names, registry_url
from tasks.train import check_guidance, ignores_guidance

STAGE = "generate"
VERSION = 2
LIST = "pictures.json"
GAP = 2  # pixels between pictures of the grid
SCORES = ("aesthetic_score", "negative_aesthetic_score")
REFERENCE_PIXELS = 1024 * 1024  # of models without a recipe: the default of encode
SHOWN = 20  # pictures in the report


def locate(settings: Generate) -> str:
    """The model's folder, hub id or URL; for a name or `name@version`, that in the registry.

    A name with a slash is a folder or a hub id, if the registry has no team of that name.

    Raises:
        Refused: the folder, the name or the version does not exist.
    """
    name, _, version = settings.model.partition("@")
    place = settings.model
    if re.fullmatch(NAME, name):
        models = Registry(registry_url(settings.store, settings.registry), name)
        published = models.find(version) if version else models.champion()
        known = model_names(models.store) if published is None else []
        # Other names with a slash are hub ids: a typing error must not fetch a stranger's model.
        is_name = team_of(name) in map(team_of, ["", *known])
        if published is None and is_name and not Path(name).is_dir():
            others = [model for model in known if model != name]
            hint = hint_of(name, others) if others else "`kiln ls` lists the published models"
            raise Refused(
                f"model {name}: it is neither a folder nor a champion in {models.store.url} "
                f"({hint})"
            )
        place = place if published is None else published.uri
    local_model(place)
    return place


def find_model(settings: Generate) -> EvalModel:
    """A local copy of the model. Raises as `locate`, and Refused for a folder without a model."""
    return load_published_model(resolve_model(locate(settings)))


def check_here(settings: Generate) -> None:
    """Raise Refused for what needs no fetched model: prompts, and the place of the model.

    A model in a local folder is checked as by `check`; of any other, that the hub has it.
    """
    with_prompts(settings)
    check_reference_files(settings)
    place = locate(settings)
    folder = local_model(place)
    if folder is None:
        if "://" not in place:
            check_model_available(place)
    elif is_complete_here(folder):
        model = find_parts(folder)
        check(with_sampler(settings, model), model)


def with_sampler(settings: Generate, model: EvalModel) -> Generate:
    """The settings with a complete sampler: given, else of the model's recipe, else of its family.

    Raises Refused for a recipe.yaml with values that no evaluation has.
    """
    family = model.base.family
    values = {
        "num_inference_steps": family.num_inference_steps,
        "guidance_scale": 1 if ignores_guidance(model.base) else family.guidance_scale,
    }
    required = set(values)
    names = values.keys() | Sampling.model_fields
    evaluated = {name: value for name, value in model.evaluated.items() if name in names}
    if settings.references:
        values["reference_pixels"] = model.encoded.get("reference_pixels", REFERENCE_PIXELS)
        values["reference_step"] = model.encoded.get("bucket_step", size_step(model.base))
        required |= {"reference_pixels", "reference_step"}
    for chosen in (evaluated, settings.model_dump(exclude_unset=True)):
        values |= {n: v for n, v in chosen.items() if n not in required or v is not None}
    try:
        return Generate.model_validate(values)
    except ValidationError as error:
        reason = explain(f"{RECIPE} of {settings.model}: evaluate", error, values, Generate)
        raise Refused(f"{reason}: give it with -o") from None


def check(settings: Generate, model: EvalModel) -> None:
    """Raise Refused for settings that the model or the runtime does not support.

    Args:
        settings: of `with_sampler`.
    """
    runtimes_registry.check_installed(settings.runtime)
    if settings.offload and settings.runtime != "torch":
        raise Refused(f"offload requires runtime torch, not {settings.runtime}: set it to false")
    if settings.device not in ("auto", "cpu"):
        runtimes_registry.check_devices(settings.runtime, {"device": settings.device})
    base = model.base
    family = base.family
    runtimes_registry.check_family(settings.runtime, family.name, settings.device)
    own = read_scheduler_config(model.part("scheduler"))
    chosen = settings.scheduler
    steps = settings.num_inference_steps
    assert steps is not None  # with_sampler
    runtimes_registry.check_scheduler(settings.runtime, own, chosen, steps, section="")
    kind = (own if chosen is None else drawing_config(own, chosen))["_class_name"]
    if settings.ddim_eta and not kind.startswith("DDIM"):
        raise Refused(f"ddim_eta is for scheduler ddim alone, not {kind}: set it to 0")
    if not model.extras.aesthetic_score:
        try:
            settings.refuse_changed(SCORES, "a model that was not trained with scores")
        except ValueError as error:
            raise Refused(str(error)) from None
    check_guidance(settings, base)
    guided = family.is_guided(settings.model_dump(), base.encoders)
    if settings.negative_prompt is not None and not guided:
        name = "true_cfg_scale" if family.guidance_input else "guidance_scale"
        above = f"raise {name} above 1"
        remedy = "this model is distilled, leave it out" if base.is_distilled else above
        raise Refused(f"negative_prompt: it has no effect without guidance: {remedy}")
    if settings.ddim_eta and runtimes_registry.spec_of(settings.runtime).schedulers == TABULATED:
        raise Refused(f"ddim_eta: runtime {settings.runtime} adds no noise per step: set it to 0")
    sizes = {"height": settings.height, "width": settings.width}
    if settings.references:
        sizes["reference_step"] = settings.reference_step
        check_references(settings, base)
    _check_control(settings, model)
    check_size(sizes, base)


def check_references(settings: Generate, base: Base) -> None:
    """Raise Refused for references that the model does not read, and for files without picture."""
    family = base.family
    count = len(settings.references)
    if not family.max_references:
        readers = [each.name for each in all_families().values() if each.max_references]
        raise Refused(
            f"a model of family {family.name} reads no references: leave them out, or draw with "
            f"one of {', '.join(readers)}",
            setting="references",
        )
    if count > family.max_references:
        most = family.max_references
        raise Refused(
            f"a model of family {family.name} reads at most {most}, not {count}",
            setting="references",
            remedy=f"give {most} of them" if most > 1 else "give one",
        )
    check_reference_files(settings)


def check_reference_files(settings: Generate) -> None:
    """Raise Refused for a reference that is no picture."""
    for path in settings.references:
        read_picture(path)


def _check_control(settings: Generate, model: EvalModel) -> None:
    """Raise Refused for control pictures without a ControlNet, or one without control pictures."""
    has_network = "controlnet" in model.weights.parts
    given = len(settings.control)
    if has_network and not given:
        raise Refused("control: this model is a ControlNet: give a control picture, --control FILE")
    if given and not has_network:
        raise Refused("control: this model is no ControlNet: leave it out")
    if has_network and settings.runtime != "torch":
        raise Refused(f"a ControlNet requires runtime torch, not {settings.runtime}")
    if given not in (0, 1, len(settings.prompts)):
        raise Refused(
            f"control: {given} files for {len(settings.prompts)} prompts: give one, or as many"
        )
    for file in settings.control:
        read_controls([file], (8, 8))


def with_prompts(settings: Generate) -> Generate:
    """The settings with `file` replaced by its prompts. Raises Refused if it is unreadable."""
    if settings.file is None:
        return settings
    prompts = read_prompts("--from-file", settings.file)
    return settings.model_copy(update={"prompts": prompts, "file": None})


@dataclass(frozen=True)
class GenerateStage(Stage):
    """Pictures of prompts, with their index."""

    options: Generate  # of `with_sampler`
    model: EvalModel
    run: RunJob = run_job

    name = STAGE
    version = VERSION

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that affect a picture; the model's content has its own digest."""
        return self.options.key_settings()

    @cached_property
    def references(self) -> list[PictureFile]:
        """The references as local files; those at URLs are fetched."""
        return [local_file(place, "references") for place in self.options.references]

    @property
    def inputs(self) -> dict[str, str]:
        """The model and, if there are any, the references and control pictures."""
        model = {"model": self.model.digest}
        files = [file.sha256 for file in self.references]
        model |= {"references": digest_json(files)} if files else {}
        controls = [sha256_of(file) for file in self.options.control]
        return model | ({"control": digest_json(controls)} if controls else {})

    def build(self, draft: Draft, progress: Progress) -> dict[str, Any]:
        """Write `samples/00000.png`, ... and their index `pictures.json` into the draft."""
        options = self.options
        # In each round, all samples of a prompt are consecutive.
        samples = range(options.num_images_per_prompt)
        prompts = tuple(prompt for prompt in options.prompts for _ in samples) * options.num_rounds
        controls = options.control
        if len(controls) == 1:
            controls *= len(options.prompts)
        controls = tuple(file for file in controls for _ in samples) * options.num_rounds
        negative = filter(None, [options.negative_prompt])
        cuts = tell_cut_prompts(STAGE, self.model.base, (*prompts, *negative))
        with scratch(draft) as folder:
            job = replace(self._job(prompts, folder, draft.store.compiled_url), controls=controls)
            result = self.run(job, progress_callback(progress))
            for number in range(len(prompts)):
                draft.upload(str(folder / f"{number:05d}.png"), f"samples/{number:05d}.png")
        noise = options.num_images_per_prompt if options.fixed_noise else len(prompts)
        listed = [
            {"file": f"samples/{number:05d}.png", "prompt": prompt, "noise": number % noise}
            for number, prompt in enumerate(prompts)
        ]
        text = json.dumps({"pictures": listed, "settings": job.words}, indent=1, ensure_ascii=False)
        draft.write(LIST, text.encode())
        times = ("drawn", "seconds", "first_seconds", "compile_seconds")
        return {
            "pictures": len(prompts),
            "num_images_per_prompt": options.num_images_per_prompt,
            "cut": cuts,
            **{name: result[name] for name in times},
            "run": runtime_facts(options.runtime),
        }

    def _job(self, prompts: tuple[str, ...], out: Path, compiled: str) -> GenerateJob:
        options = self.options
        sampler = sampler_settings(options, "negative_prompt")
        listed = {"ddim_eta", "dtype", "runtime", "num_images_per_prompt", "fixed_noise"}
        words = dict(sorted((sampler | options.model_dump(mode="json", include=listed)).items()))
        sampler |= {"eta": options.ddim_eta, "batch_size": options.num_images_per_prompt}
        more: dict[str, Any] = {}
        if options.references:
            paths = tuple(file.path for file in self.references)
            more |= {"references": (paths,) * len(prompts)}
            more |= options.model_dump(include={"reference_pixels", "reference_step"})
            words |= {"references": [file.sha256 for file in self.references]}
        return GenerateJob(
            runtime=options.runtime,
            **self.model.base.job_fields,
            drawings=(self.model.weights.drawing(out),),
            prompts=prompts,
            sampler=sampler,
            device=options.device,
            dtype=options.dtype,
            offload=options.offload,
            compiled=compiled,
            fixed_noise=options.fixed_noise,
            words={**words, "model": self.model.digest},
            **more,
        )

    @staticmethod
    def show(artifact: Artifact) -> list[Panel]:
        """The grid, the timings, the settings and the prompt of each picture."""
        index = json.loads(artifact.read(LIST))
        title = f"Pictures ({len(index['pictures'])})"
        return [
            PicturePanel("Grid", grid(artifact, artifact.summary["num_images_per_prompt"], SHOWN)),
            Facts("Drawn", artifact.summary | {"cut": cut_facts(artifact.summary.get("cut", {}))}),
            Facts("Settings", {k: v for k, v in index["settings"].items() if v is not None}),
            Table(title, index["pictures"][:SHOWN]),
        ]


def grid(artifact: Artifact, columns: int, limit: int | None = None) -> bytes:
    """PNG bytes of an artifact's first `limit` pictures (default: all), `columns` per row."""
    names = sample_names(artifact)[:limit]
    pictures = (Image.open(BytesIO(artifact.read(name))) for name in names)
    return to_png(picture_grid(pictures, len(names), columns, gap=GAP))


def sample_names(artifact: Artifact) -> list[str]:
    """Paths of an artifact's pictures, in order."""
    return [picture["file"] for picture in json.loads(artifact.read(LIST))["pictures"]]
