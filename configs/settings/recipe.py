"""A recipe: its sections, each in a file of its own, and the rules between sections."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from configs.settings.base_section import Section, StoredUrl
from configs.settings.download import Download
from configs.settings.encode import Encode
from configs.settings.evaluate import Evaluate
from configs.settings.mindspore_and_gaudi import Hpu, MindSpore
from configs.settings.model import Model
from configs.settings.place import Place
from configs.settings.plan_assumptions import Plan
from configs.settings.publish import Publish
from configs.settings.retrain import Retrain
from configs.settings.source import Source
from configs.settings.sweep import Sweep
from configs.settings.tpu import Tpu
from configs.settings.train import Train

RuntimeName = Literal["torch", "xla", "jax", "mindspore"]
#: The stages of a run, in their order.
StageName = Literal["download", "encode", "train", "evaluate", "publish"]
STAGES: tuple[StageName, ...] = get_args(StageName)


class Recipe(Section):
    """A recipe: all settings from a source of images to a published model."""

    name: str = Field(description="Name of the recipe.")
    description: str = Field("", description="The resulting model, in one sentence.")
    runtime: RuntimeName = Field("torch", description="Runtime that trains and samples.")
    store: StoredUrl = Field("store", description="Artifact store: folder or fsspec URL.")
    model: Model
    source: Source
    download: Download = Download()
    beam: dict[str, Any] = Field(
        default_factory=dict,
        description="Beam pipeline options of the stages download and encode, such as runner or "
        "direct_num_workers.",
    )
    shared_folders: tuple[str, ...] = Field(
        (),
        description="Folders that remote Beam workers and work pools have at the same paths as "
        "this machine, such as the mount of a network file system.",
    )
    place: Place = Place()
    encode: Encode = Encode()
    train: Train = Train()
    tpu: Tpu | None = Field(
        None, description="Cloud TPU slice for runtime xla; null: train on the flow's machine."
    )
    evaluate: Evaluate
    publish: Publish
    retrain: Retrain = Retrain()
    sweep: Sweep = Sweep()
    plan: Plan = Plan()

    @model_validator(mode="after")
    def _check_runtime(self) -> Recipe:
        self._check_extra_inputs()
        if self.runtime != "mindspore" and self.train.mindspore != MindSpore():
            raise ValueError(f"train.mindspore requires runtime mindspore, not {self.runtime}")
        if self.runtime != "mindspore" and self.train.mixed_precision == "fp16":
            raise ValueError("train.mixed_precision: fp16 requires runtime mindspore: set bf16")
        if self.train.hpu != Hpu() and not self.train.device.startswith("hpu"):
            raise ValueError(f"train.hpu requires train.device: hpu, not {self.train.device}")
        if self.runtime != "torch":
            self.train.refuse_changed(
                ("allow_tf32", "compile", "attention", "cuda_graphs", "deterministic"),
                f"runtime: {self.runtime}",
            )
            self.train.lora.refuse_changed(("base_precision",), f"runtime: {self.runtime}")
            self.evaluate.refuse_changed(("offload",), f"runtime: {self.runtime}")
        if self.evaluate.device.startswith(("hpu", "npu")):
            self.evaluate.refuse_changed(("offload",), f"device: {self.evaluate.device}")
        if self.tpu is not None and self.runtime != "xla":
            raise ValueError(f"tpu requires runtime xla, not {self.runtime}")
        return self

    def _check_extra_inputs(self) -> None:
        """Raise ValueError if masks or scores are used but not produced, or produced but unused."""
        if self.train.inpainting != (self.encode.masks > 0):
            raise ValueError(
                "train.inpainting requires masks: set encode.masks, such as 4"
                if self.train.inpainting
                else "encode.masks requires train.inpainting: set both or neither"
            )
        scored = getattr(self.source, "aesthetic_column", None) is not None
        if self.train.aesthetic_score != scored:
            raise ValueError(
                "train.aesthetic_score requires scores: set source.aesthetic_column"
                if self.train.aesthetic_score
                else "source.aesthetic_column requires train.aesthetic_score: set both or neither"
            )
        if not scored:
            names = ("aesthetic_score", "negative_aesthetic_score")
            self.evaluate.refuse_changed(names, "train.aesthetic_score: false")
