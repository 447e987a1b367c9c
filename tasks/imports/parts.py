"""Parts that all imported recipes have: sources, batches, prompts to draw; and command lines."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from configs.errors import Refused
from configs.load_recipe import parse_yaml
from tasks.download.folders import METADATA, PICTURES
from tasks.imports.translation import CLIP, Translation

#: Arguments of accelerate with an equivalent.
LAUNCHED = ("num_processes", "mixed_precision")
#: Captions of a folder that are drawn, if no prompts are given.
DRAWN = 4


def read_text(path: str) -> str:
    """A text file. Raises Refused if it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path}: it cannot be read ({error}): name a text file") from None


def split_command(words: Sequence[str]) -> list[str]:
    """The words of a command line, which may be one text, or a file such as a shell script.

    Variables that the script exports have their values.
    """
    text = shlex.join(words)
    if len(words) == 1:
        text = read_text(words[0]) if os.path.isfile(words[0]) else words[0]
    for name, value in re.findall(r"^\s*(?:export\s+)?([A-Z][A-Z0-9_]*)=(.*)$", text, re.M):
        text = re.sub(rf"\$\{{?{name}\b\}}?", value.strip().strip("'\""), text)
    text = re.sub(r"^\s*(?:export\s+)?[A-Z][A-Z0-9_]*=.*$", "", text, flags=re.M)
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise Refused(f"the command line cannot be read ({error}): quote it whole") from None


def parse_arguments(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """(script, arguments) of a command line such as `accelerate launch train.py --name value`.

    A name without a value is true, with several a list. Those of accelerate, such as its own
    `config_file`, are named `accelerate_…` unless they count here.
    """
    script = ""
    arguments: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            name = name.replace("-", "_")
            arguments[name] = value_of(value) if sign else True
            name = "" if sign else name
        elif word.endswith(".py"):
            script = Path(word).stem
            name = ""
            launched = arguments.items()
            arguments = {n if n in LAUNCHED else f"accelerate_{n}": v for n, v in launched}
        elif name:
            before = arguments[name]
            value = value_of(word)
            arguments[name] = value if before is True else [*_listed(before), value]
    return script, arguments


def value_of(text: str) -> Any:
    """The value of an argument; numbers are as in YAML."""
    try:
        value = parse_yaml(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, int | float | bool) else text


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def source_name(text: str, taken: Collection[str]) -> str:
    """A name of a source, such as `my_dog` of the folder `My dog`, that no other source has."""
    name = re.sub(r"[^a-z0-9_-]+", "_", text.lower()).strip("_-") or "source"
    name = name if name[0].isalpha() else f"source_{name}"
    numbers = (f"{name}_{number}" for number in range(2, len(taken) + 2))
    return next(free for free in (name, *numbers) if free not in taken)


def captions_of(folder: str, extension: str = ".txt") -> Iterator[str]:
    """Captions beside the pictures of a folder, if it is on this machine."""
    root = Path(folder).expanduser()
    for path in sorted(root.glob(f"*{extension}")) if root.is_dir() else ():
        yield path.read_text(encoding="utf-8", errors="replace").strip()


def has_captions(folder: str) -> bool:
    """Whether a folder on this machine has captions that a source reads."""
    root = Path(folder).expanduser()
    return any(captions_of(folder)) or any((root / name).is_file() for name in METADATA)


def pictures_of(folder: str) -> int:
    """Number of pictures in a folder; 0 if it is not on this machine."""
    root = Path(folder).expanduser()
    files = root.iterdir() if root.is_dir() else ()
    return sum(path.suffix.lower() in PICTURES for path in files)


def folder_source(path: str) -> dict[str, Any]:
    """The section `source` of a folder."""
    return {"kind": "folder", "path": os.path.abspath(os.path.expanduser(path))}


def set_sources(translation: Translation, sources: dict[str, dict[str, Any]]) -> None:
    """Set the sources; what all of them share is set once. A single plain one is `source`."""
    parts = [source.setdefault("encode", {}) for source in sources.values()]
    for name, value in [*parts[0].items()]:
        if all(part.get(name) == value for part in parts):
            translation.set(f"encode.{name}", value)
            for part in parts:
                del part[name]
    rates = [source.get("caption_dropout_rate") for source in sources.values()]
    if rates[0] is not None and all(rate == rates[0] for rate in rates):
        translation.set("train.caption_dropout_rate", rates[0])
        for source in sources.values():
            del source["caption_dropout_rate"]
    plain = {
        name: {setting: value for setting, value in source.items() if value not in ({}, None)}
        for name, source in sources.items()
    }
    first = next(iter(plain.values()))
    if len(plain) == 1 and first.keys() == {"source"}:
        translation.recipe["source"] = first["source"]
    else:
        translation.recipe["sources"] = plain


def set_batch(translation: Translation, batch: int, pictures_per_sample: int = 1) -> None:
    """Set the batch of an optimizer step, and that of a forward pass where it is smaller.

    Args:
        pictures_per_sample: 2 if each sample of the other tool's batch has a class picture.
    """
    accumulated = int(translation.number("gradient_accumulation_steps", 1))
    processes = int(translation.number("num_processes", 1))
    micro = batch * pictures_per_sample
    translation.set("train.global_batch_size", micro * accumulated * processes)
    if accumulated > 1:
        translation.set("train.micro_batch_size", micro)


def set_length(translation: Translation, steps: int | None, epochs: float | None) -> None:
    """Set steps, or epochs without them."""
    if steps is not None:
        translation.set("train.steps", int(steps))
    elif epochs is not None:
        translation.set("train.epochs", epochs)


def set_evaluation(
    translation: Translation, prompts: Sequence[str], old: Sequence[str] = ()
) -> None:
    """Set what is drawn and measured: prompts of the new pictures and of the class."""
    drawn = {"images_per_prompt": 4}
    sets: dict[str, Any] = {"new": {**drawn, "prompts": [*dict.fromkeys(prompts)]}}
    if old:
        sets["old"] = {**drawn, "compare": False, "prompts": [*dict.fromkeys(old)]}
    own = translation.recipe.get("evaluate", {})
    translation.recipe["evaluate"] = {"clip": CLIP, "prompts": sets, **own}
    if translation.recipe.get("train", {}).get("mixed_precision") == "bf16":
        for section in ("encode", "evaluate"):
            translation.set(f"{section}.dtype", "bfloat16")
