"""The settings of another tool as those of a recipe.

A setting that is ours under another name follows the names that `aka` lists (configs/settings); the
rules of this module convert values. What a recipe cannot hold is a remark: nothing is dropped.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from configs.errors import Refused
from configs.explain_errors import TABLE, VALUES, did_you_mean, explain, similar_names
from configs.load_recipe import dump_yaml
from configs.secrets import is_secret
from configs.settings.recipe import Recipe

#: Measures likeness of pictures and prompts; other tools measure nothing.
CLIP = "openai/clip-vit-large-patch14"
#: The sections of a recipe, in the order of its file.
SECTIONS = ("name", "description", "runtime", "store", *Recipe.model_fields)
#: Parts of a recipe that one setting of another tool does not make.
PARTS = ("source", "encode.captions", "evaluate.prompts")


class Inapplicable(Exception):
    """A value that a recipe cannot hold, and why."""


@dataclass
class Translation:
    """A recipe that is being written, and remarks on what differs from the other tool."""

    tool: str  # letter of TOOLS in configs/explain_errors.py
    given: dict[str, Any]  # name of the other tool -> value
    rules: Mapping[str, Rule]
    recipe: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = {name: f for f in TABLE if self.tool in f.tools for name in f.names.split()}
        self._names = names

    def translate(self, names: Iterable[str]) -> None:
        """Translate the given settings of these names; a rule precedes the table of names."""
        for name in [*names]:  # a rule may add what another one reads
            value = self.given[name]
            try:
                if value is not None:
                    self._translate(name, value)
            except Inapplicable as why:
                self.remark(name, str(why))
            except Refused:  # which is a ValueError
                raise
            except (ValueError, TypeError, IndexError):
                raise Refused(f"{name}: {value!r} is not a value that it takes") from None

    def set(self, dotted: str, value: Any) -> None:
        """Set a setting of the recipe."""
        *parents, last = dotted.split(".")
        section = self.recipe
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value

    def remark(self, name: str, why: str) -> None:
        """Record that a given setting has no equivalent, or another meaning."""
        value = self.given.get(name)
        text = (
            "..." if is_secret(name, value) else json.dumps(value, ensure_ascii=False, default=str)
        )
        shown = "" if value is None else f" ({text})"
        self.remarks.append(f"{name}{shown}: {why}")

    def number(self, name: str, default: float) -> float:
        """A given number, or the other tool's default."""
        value = self.given.get(name)
        return default if value is None else value

    def _translate(self, name: str, value: Any) -> None:
        if (rule := self.rules.get(name) or RULES.get(name)) is not None:
            rule(self, value)
            return
        foreign = self._names.get(name)
        if foreign is None:
            hint = did_you_mean(similar_names(name, self._names))
            raise Inapplicable(f"unknown setting ({hint})" if hint else "unknown setting")
        if foreign.ours == "none" or foreign.ours.startswith(PARTS):
            raise Inapplicable(foreign.hint)
        self.set(foreign.ours, CONVERSIONS.get(foreign.ours, _same)(value))

    def text(self, origin: str) -> str:
        """The recipe as YAML below its remarks. Raises Refused if it is no valid recipe.

        Args:
            origin: what it was imported from.
        """
        if "model" not in self.recipe:
            raise Refused("the base model is missing: add pretrained_model_name_or_path to it")
        ordered = {name: self.recipe[name] for name in SECTIONS if name in self.recipe}
        try:
            Recipe.model_validate(ordered)
        except ValidationError as error:
            raise Refused(explain(f"recipe of {origin}", error, ordered)) from None
        lines = [f"# Imported from {origin}."]
        if self.remarks:
            lines += ["#", "# These settings have no equivalent, or another meaning:"]
            lines += [f"#   {line}" for line in self.remarks]
        return "\n".join(lines) + "\n" + dump_yaml(ordered)

    def without_secrets(self, text: str) -> str:
        """A text without the secrets among the given settings, such as a token of the hub."""
        for name, value in self.given.items():
            if is_secret(name, value):
                text = text.replace(str(value), "...")
        return text


Rule = Callable[[Translation, Any], None]


def _same(value: Any) -> Any:
    return value


def to(dotted: str) -> Rule:
    """The rule of a setting with our values."""
    return lambda translation, value: translation.set(dotted, value)


def no_equivalent(why: str) -> Rule:
    """The rule of a setting that a recipe cannot hold."""

    def rule(translation: Translation, value: Any) -> None:
        raise Inapplicable(why)

    return rule


def met(translation: Translation, value: Any) -> None:
    """The rule of a setting that another rule reads, or that holds here always."""


def if_set(dotted: str, ours: Any) -> Rule:
    """The rule of a flag that selects one of our values."""

    def rule(translation: Translation, value: Any) -> None:
        if value:
            translation.set(dotted, ours)

    return rule


def our_choice(dotted: str) -> Callable[[Any], Any]:
    """The conversion of a choice whose names here are those of VALUES."""
    renamed = {key[1].lower(): text.split()[0] for key, text in VALUES.items() if key[0] == dotted}
    return lambda value: renamed.get(str(value).lower(), str(value).lower())


def precision(value: Any) -> str:
    """`mixed_precision`: fp16 is trained as bf16, since float16 needs runtime mindspore."""
    return {"fp16": "bf16"}.get(str(value), str(value))


def place(value: Any) -> str:
    """A model or folder; one on this machine has its whole path, since recipes move."""
    return os.path.abspath(value) if os.path.exists(os.path.expanduser(value)) else value


def model_name(value: Any) -> str:
    """A name of the registry."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(str(value)).name).strip("-._") or "imported"


def side_of(value: Any) -> int:
    """The side of `512`, or of a square with about the area of `512,768` or [512, 768].

    It is a multiple of 16 then, as all models read.
    """
    sides = [int(side) for side in re.findall(r"\d+", str(value))]
    if sides[0] == sides[-1]:
        return sides[0]
    return round((sides[0] * sides[-1]) ** 0.5 / 16) * 16


#: Our setting -> conversion of a value of another tool.
CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "model.path": place,
    "model.vae": place,
    "source.path": place,
    "store": os.path.abspath,
    "encode.resolution": side_of,
    "train.lora.start": place,
    "train.gradient_checkpointing": lambda value: "blocks" if value else "none",
    "train.mixed_precision": precision,
    "train.optimizer": our_choice("train.optimizer"),
    "train.lr_scheduler": our_choice("train.lr_scheduler"),
    "train.prefetch": lambda value: max(1, int(value)),
    "train.fsdp": lambda value: "all" if value else 1,
    "train.lora.target_modules": lambda value: (
        [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    ),
    "train.text_encoder_lr": lambda value: value[0] if isinstance(value, list) else value,
    "train.loss": lambda value: "mse" if value == "l2" else value,
    "publish.name": model_name,
    "publish.dtype": lambda value: {"fp16": "float16", "bf16": "bfloat16"}.get(value, "float32"),
}


def _track(translation: Translation, value: Any) -> None:
    if value not in ("wandb", "all"):
        return  # TensorBoard files are always written
    given = translation.given
    project = given.get("tracker_project_name") or given.get("log_tracker_name") or "kilnworks"
    translation.set("train.wandb", {"project": project})


def _set_hub(translation: Translation, value: Any) -> None:
    repo = translation.given.get("hub_model_id")
    if value and "/" not in str(repo):
        raise Inapplicable("publish.hub needs owner/name: set it to publish on the hub")
    if value:
        translation.set("publish.hub", {"repo": repo})


def _weighting(translation: Translation, value: Any) -> None:
    if value == "logit_normal":
        translation.set("train.timesteps.distribution", "logit_normal")
    elif value == "mode":
        raise Inapplicable("no equivalent: timesteps are uniform or logit_normal")
    else:
        translation.set("train.weighting_scheme", value)


def _betas(translation: Translation, value: Any) -> None:
    first = translation.number("adam_beta1", 0.9)
    translation.set("train.adam_betas", [first, translation.number("adam_beta2", 0.999)])


def _clip_gradients(translation: Translation, value: Any) -> None:
    translation.set("train.max_grad_norm", value or None)  # theirs: 0 is no limit


def _scale_learning_rate(translation: Translation, value: Any) -> None:
    if value:
        raise Inapplicable("multiply train.learning_rate by train.global_batch_size")


def _warm_up(translation: Translation, value: Any) -> None:
    if 0 < value < 1:
        value *= translation.number("max_train_steps", 1600)
    translation.set("train.lr_warmup_steps", int(value))


def _end_at(translation: Translation, value: Any) -> None:
    rate = translation.number("learning_rate", 1e-4)
    translation.set("train.lr_min_ratio", min(1.0, float(value) / rate))


def _flow_shift(translation: Translation, value: Any) -> None:
    if value in ("flux_shift", "auto", True):
        translation.set("train.timesteps.resolution_shift", True)
    elif value in ("shift", "sigma"):
        raise Inapplicable("no equivalent: see train.timesteps")
    if value in ("flux_shift", "auto", True, "sigmoid"):
        translation.set("train.timesteps.distribution", "logit_normal")


def _half(translation: Translation, value: Any) -> None:
    """Full bfloat16 or float16: trained weights stay float32 here."""
    if value:
        translation.set("train.mixed_precision", "bf16")
        raise Inapplicable("train.mixed_precision is bf16; trained weights stay float32")


def _mixed(translation: Translation, value: Any) -> None:
    translation.set("train.mixed_precision", precision(value))
    if value == "fp16":
        raise Inapplicable("train.mixed_precision is bf16: fp16 needs runtime mindspore")


_of_all_timesteps = no_equivalent(
    "timesteps are weighted, not excluded: train.timesteps.bias_strategy: range"
)
_by_epochs = no_equivalent("pictures are drawn by steps: train.sample_every_n_steps")
_kernels = met  # attention is PyTorch's

#: Setting of another tool -> rule, for all tools.
RULES: dict[str, Rule] = {
    "logging_dir": met,  # curves are in the store
    "dataset_config": met,
    "data_backend_config": met,
    "cache_latents": met,
    "cache_text_encoder_outputs": met,
    "random_flip": to("encode.flip"),
    "flip_aug": to("encode.flip"),
    "fp8_base": if_set("train.lora.base_precision", "int8"),
    "fp8_scaled": if_set("train.lora.base_precision", "int8"),
    "use_8bit_adam": if_set("train.optimizer", "adamw_8bit"),
    "use_lion_optimizer": if_set("train.optimizer", "lion"),
    "use_ema": if_set("train.ema_decay", 0.9999),
    "v_parameterization": if_set("train.prediction_type", "v_prediction"),
    "rescale_betas_zero_snr": if_set("train.zero_terminal_snr", True),
    "zero_terminal_snr": if_set("train.zero_terminal_snr", True),
    "adam_beta1": _betas,
    "adam_beta2": _betas,
    "max_grad_norm": _clip_gradients,
    "lr_warmup_steps": _warm_up,
    "lr_end": _end_at,
    "weighting_scheme": _weighting,
    "timestep_sampling": _flow_shift,
    "flow_schedule_auto_shift": _flow_shift,
    "min_timestep": _of_all_timesteps,
    "max_timestep": _of_all_timesteps,
    "validation_epochs": _by_epochs,
    "sample_every_n_epochs": _by_epochs,
    "full_bf16": _half,
    "full_fp16": _half,
    "mixed_precision": _mixed,
    "report_to": _track,
    "log_with": _track,
    "tracker_project_name": met,
    "log_tracker_name": met,
    "push_to_hub": _set_hub,
    "hub_model_id": met,
    "scale_lr": _scale_learning_rate,
    "xformers": _kernels,
    "sdpa": _kernels,
    "mem_eff_attn": _kernels,
    "enable_xformers_memory_efficient_attention": _kernels,
    "attention_mechanism": _kernels,
}
