"""Settings of the section `evaluate`: prompt sets, metrics and the sampler.

`evaluate` and `generate` share the settings of prompts and sampler.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, PositiveInt

from configs.settings import base_section

SchedulerName = Literal[
    "ddim",
    "ddim_parallel",
    "ddpm",
    "dpm++",
    "euler",
    "euler_ancestral",
    "flow_euler",
    "lms",
    "pndm",
]


class Prompts(base_section.Section):
    """Prompts, listed or from a text file."""

    prompts: tuple[str, ...] = ()
    """Prompts, in order."""
    file: base_section.ReadFile | None = base_section.setting(None, not_in_key="content")
    """Text file with one prompt per line, instead of `prompts`."""

    def faults(self) -> Iterator[str]:
        named = [name for name in self._sources() if getattr(self, name)]
        if not named:
            yield f"it has no prompts: set {', or '.join(self._sources())}"
        if len(named) > 1:
            yield (
                f"set either {' or '.join(named)}, not both (`prompts: []` drops those of a recipe "
                "that is extended)"
            )
        for number, prompt in enumerate(self.texts):
            try:
                prompt.encode()
            except UnicodeEncodeError:
                yield f"prompts.{number} is not UTF-8: {prompt!a}"

    @property
    def texts(self) -> tuple[str, ...]:
        """The listed prompts, without their pictures."""
        return self.prompts

    def _sources(self) -> tuple[str, ...]:
        """The settings of which one has the prompts."""
        return ("prompts", "file")


class Sampling(base_section.Section):
    """Sampler and size of pictures."""

    scheduler: SchedulerName | None = None
    """Sampling scheduler; null: the model's own."""
    true_cfg_scale: float = base_section.setting(1.0, ge=1)
    """Classifier-free guidance scale of FLUX, whose guidance_scale is an input of the denoiser or
    without effect; 1 turns it off."""
    height: PositiveInt | None = None
    """Picture height in pixels; null: the model's default."""
    width: PositiveInt | None = None
    """Picture width in pixels; null: the model's default."""
    aesthetic_score: float = 6.0
    """Aesthetic score, for a model trained with train.aesthetic_score."""
    negative_aesthetic_score: float = 2.5
    """Aesthetic score of the negative prompt, for the same models."""
    controlnet_conditioning_scale: float = base_section.setting(
        1.0, ge=0, in_key_with="controlnet_conditioning_scale != 1.0"
    )
    """Factor of the outputs of a ControlNet; training has 1."""
    dtype: base_section.Dtype = "float32"
    """Precision of the sampling pipeline."""
    offload: bool = base_section.setting(
        False, not_in_key="execution", aka="enable_model_cpu_offload (D): layer by layer"
    )
    """Keep the weights of denoiser and text encoders in the host's memory, and copy each layer to
    the device when it runs. The pictures are the same. Runtime `torch`."""


JudgeName = Literal["digits"]


class Edit(base_section.Section):
    """A prompt with the pictures that it is about."""

    prompt: str
    """The prompt."""
    references: tuple[base_section.ReadFile, ...] = base_section.setting(min_length=1)
    """Reference pictures, in order: local paths or fsspec URLs."""
    mask: base_section.ReadFile | None = None
    """Grey picture whose white pixels may change: local path or fsspec URL. null: all may."""


class PromptSet(Prompts):
    """A named set of prompts, with metrics of its own."""

    prompts: tuple[str | Edit, ...] = ()  # type: ignore[assignment]
    """Prompts, in order; of an edit model, `{prompt, references}`."""
    held_out: PositiveInt | None = base_section.setting(None, not_in_key="content")
    """Maximum number of held-out samples whose captions and references are the prompts, instead of
    `prompts`. Their pictures are the targets of target_similarity."""
    images_per_prompt: PositiveInt = 1
    """Pictures per prompt, each with its own noise."""
    prompts_per_round: PositiveInt | None = base_section.setting(None, not_in_key="content")
    """Prompts of this set in each round of `evaluate.max_pictures`: the first ones, then the next
    ones; null: all in each round."""
    compare: bool = True
    """Include these pictures in cmmd, fd, kid, precision and recall, the comparison with held-out
    pictures. Use false for subjects absent from the held-out pictures."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The listed prompts, without their pictures."""
        return tuple(e.prompt if isinstance(e, Edit) else e for e in self.prompts)

    @property
    def has_plain(self) -> bool:
        """Whether it has prompts without references, which alone are drawn while training."""
        return self.file is not None or any(isinstance(listed, str) for listed in self.prompts)

    def _sources(self) -> tuple[str, ...]:
        return ("prompts", "file", "held_out")


class PreferenceModel(base_section.Section):
    """A judge: a CLIPModel tuned on people's choices, such as PickScore or HPSv2."""

    name: str = base_section.setting(pattern=r"^[a-z][a-z0-9_]*$")
    """Name of the metric."""
    path: base_section.ModelPlace
    """CLIPModel folder: hub id, local path or fsspec URL."""


class Memorization(base_section.Section):
    """The search for training pictures among the samples."""

    pictures: PositiveInt = 5000
    """Maximum number of training pictures to search."""
    similarity: base_section.Fraction = 0.95
    """A sample counts in `memorized` from this cosine of features on, to its nearest training
    picture."""
    pixel_similarity: base_section.Fraction = 0.95
    """A sample counts in `memorized_pixels` from this correlation of pixels on."""


class Sibling(base_section.Section):
    """Another base of equal shapes, such as the turbo model: adapters are drawn on it too."""

    path: base_section.ModelPlace
    """Pipeline folder or checkpoint file: see model.path."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    components: base_section.ModelPlace | None = None
    """See model.components."""
    scheduler: SchedulerName | None = None
    """Sampling scheduler; null: that of `evaluate`."""
    num_inference_steps: PositiveInt | None = None
    """Denoising steps; null: those of `evaluate`."""
    guidance_scale: float | None = base_section.setting(None, ge=0)
    """Guidance scale; null: that of `evaluate`."""


def _section_of_path(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class Evaluate(Sampling):
    """Compare the tuned model with its base on equal prompts and noise."""

    prompts: Annotated[dict[str, PromptSet], base_section.NullDrops] = base_section.setting(
        min_length=1,
        not_in_key="content",
        aka="validation_prompt validation_prompts sample_prompts (DKS)",
    )
    """Named prompt sets; null instead of one drops that of the extended recipe."""
    clip: base_section.ModelPlace = base_section.setting(not_in_key="content")
    """CLIPModel folder for clip_score and cmmd: hub id, local path or fsspec URL."""
    image_encoder: base_section.ModelPlace | None = base_section.setting(None, not_in_key="content")
    """Vision model of transformers (such as DINOv2) for fd, kid, precision, recall and memorized:
    hub id, local path or fsspec URL; null: `clip`."""
    inception: base_section.ModelPlace | None = base_section.setting(None, not_in_key="content")
    """Weights file of torch-fidelity's InceptionV3 for fd_inception and kid_inception: local path
    or fsspec URL; null: without these metrics."""
    judges: tuple[JudgeName | PreferenceModel, ...] = base_section.setting((), not_in_key="content")
    """Additional judges of the pictures: names, or preference models."""
    model: Annotated[Sibling | None, BeforeValidator(_section_of_path)] = base_section.setting(
        None, not_in_key="content", needs="train.method == lora"
    )
    """Another base of equal shapes, on which the adapters are drawn and measured, too: the section,
    or its path alone. Its metrics end in @sibling; null: none."""
    memorization: Memorization = Memorization()
    num_inference_steps: PositiveInt = 30
    """Denoising steps."""
    guidance_scale: float = base_section.setting(5.0, ge=0)
    """Classifier-free guidance scale; 1 or less turns guidance off (for Z-Image 0). For FLUX.1 dev
    it is an input of the denoiser."""
    batch_size: PositiveInt = base_section.setting(4, not_in_key="execution")
    """Pictures per sampling batch."""
    seed: int = base_section.setting(0, ge=0, lt=2**63)
    """Seed of the initial noise, the loss noise and the bootstrap."""
    max_pictures: PositiveInt | None = base_section.setting(None, not_in_key="content")
    """Maximum number of pictures per model. While the gate cannot tell, the evaluation draws rounds
    of new pictures up to this number; null: one round."""
    bootstrap: PositiveInt = 1000
    """Resamples per confidence interval."""
    holdout_samples: PositiveInt = 256
    """Maximum number of held-out samples of each source for the loss, at 8 noise levels each."""
    device: str = base_section.setting("auto", not_in_key="execution")
    """Device: see train.device."""
    hosts: PositiveInt | None = base_section.setting(None, not_in_key="execution")
    """Machines of the recipe's cluster that draw the pictures and compute held-out losses; null:
    the machine of the flow, which measures the pictures in any case."""

    @property
    def measuring_device(self) -> str:
        """Device on which the flow's machine measures pictures; `device` may be of the hosts."""
        return self.device if self.hosts is None else "auto"

    def faults(self) -> Iterator[str]:
        names = [judge if isinstance(judge, str) else judge.name for judge in self.judges]
        if len(set(names)) < len(names):
            yield "judges: two judges have the same name"

    @property
    def on_sibling(self) -> Self:
        """The settings with which pictures of the sibling are drawn."""
        own = {"scheduler", "num_inference_steps", "guidance_scale"}
        changed = {} if self.model is None else self.model.model_dump(include=own)
        return self.model_copy(update={n: v for n, v in changed.items() if v is not None})

    @property
    def has_samples(self) -> bool:
        """Whether a training has prompts to draw samples of."""
        return any(chosen.has_plain for chosen in self.prompts.values())

    @property
    def preference_models(self) -> dict[str, str]:
        """Name -> folder of each judge that is a preference model."""
        return {j.name: j.path for j in self.judges if isinstance(j, PreferenceModel)}
