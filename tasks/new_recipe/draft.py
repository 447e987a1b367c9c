"""The recipe that the answers make, and its YAML with comments."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from configs.load_recipe import dump_yaml
from configs.settings.recipe import Recipe
from runtimes.torch_models.gpu_specs import GIB
from tasks.evaluate.metrics import metric_names
from tasks.new_recipe.bases import DEMO, Base, Goal
from tasks.new_recipe.machine import Machine
from tasks.new_recipe.pictures import Pictures
from tasks.publish.promotion_gate import LEAST_PROMPTS, parse_rule

#: Training samples of adapters, as docs/lora.md has them, in steps of BATCH pictures.
SAMPLES = {"subject": 2400, "style": 8000}
BATCH = 4
#: Passes over all pictures to learn everything, and the limits of the samples.
PASSES = 10
MOST_SAMPLES = 1_000_000
#: Held-out pictures that are enough, and the largest share of the pictures.
HELD_OUT = 250
MOST_HELD_OUT = {"subject": 0.2, "style": 0.15, "everything": 0.1}
#: Memory for the default captioner: 4 GiB of weights, the picture's tokens, CUDA's own.
CAPTIONER = 8 * GIB
#: Pictures above which captions by a model are a decision of their own.
MOST_CAPTIONED = 100_000
#: The word of a subject or style: rare, so that the base connects nothing with it.
RARE = "ohwx"
WIDTH = 100  # characters of a line with its comment
PLACES = (
    "{} on a beach",
    "{} in snow",
    "{} on a sofa",
    "{} in a city at night",
    "{} in a forest",
    "{} beside a bicycle",
    "a watercolour of {}",
    "a close-up of {}",
)
SCENES = (
    "a lighthouse at dusk",
    "a bowl of fruit",
    "a cat asleep on a windowsill",
    "a street market in the rain",
    "an old bicycle",
    "a river in a forest",
    "a woman reading a book",
    "a snowy village at night",
)


@dataclass(frozen=True)
class Answers:
    """What a person answered, or took as it was ready."""

    pictures: Pictures
    goal: Goal
    word: str | None  # of a subject or style; None: the captions have it
    machine: Machine
    base: Base
    prompts: tuple[str, ...]
    name: str
    price: float | None = None  # per hour and accelerator


def model_name(place: str) -> str:
    """A name of the registry from a folder's or list's; `mine` if it has no letter for one."""
    fixed = re.split(r"/[^/]*[*?\[{]", place)[0].rstrip("/")  # of a pattern, its folder
    stem = fixed.rpartition("/")[2].partition(".")[0]
    plain = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    name = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-")
    return name if re.search("[a-z]", name) else "mine"


def ready_goal(pictures: Pictures) -> Goal:
    """Some dozens of pictures show a subject, some hundreds a style."""
    count = pictures.count
    if pictures.word is not None or (count is not None and count <= 100):
        return "subject"
    return "style" if count is not None and count <= 5000 else "everything"


def ready_word(pictures: Pictures, goal: Goal) -> str:
    return pictures.word or (RARE if goal == "subject" else f"{RARE} style")


def ready_prompts(pictures: Pictures, goal: Goal, word: str | None) -> tuple[str, ...]:
    """Prompts worded like the captions: some of them, or what would be their words."""
    if word is not None and goal == "subject":
        photo = f"a photo of {word}"
        return tuple(place.format(photo if place[0] == "{" else word) for place in PLACES)
    if word is not None:
        return tuple(f"{scene} in {word}" for scene in SCENES)
    some = pictures.examples
    return some if len(some) >= LEAST_PROMPTS else SCENES


def samples_of(pictures: Pictures, goal: Goal, base: Base) -> int:
    """Training samples."""
    if base.name == DEMO:
        return base.samples
    if goal != "everything":
        return SAMPLES[goal]
    if pictures.count is None:
        return base.samples
    return min(max(PASSES * pictures.count, SAMPLES["style"]), MOST_SAMPLES)


def held_out_share(count: int | None, goal: Goal) -> float:
    """The share of the pictures to hold out, with one digit."""
    if not count:
        return 0.05
    return min(MOST_HELD_OUT[goal], float(f"{HELD_OUT / count:.0e}"))


@dataclass(frozen=True)
class Draft:
    """A recipe's own settings, the comments of its sections, and what extends it."""

    settings: dict[str, Any]
    comments: Mapping[str, str]
    head: tuple[str, ...]

    def text(self) -> str:
        """The recipe as YAML, with comments."""
        lines = [f"# {line}".rstrip() for line in self.head]
        for name, value in self.settings.items():
            section = _section(name, value)
            if comment := self.comments.get(name):
                beside = f"{section[0]:40}  # {comment}"
                if len(beside) <= WIDTH:
                    section[0] = beside
                else:
                    section.insert(0, f"# {comment}")
            lines += section
        return "\n".join(lines) + "\n"

    def with_settings(self, changes: Mapping[str, Any], why: str) -> Draft:
        """The draft with other settings, by their dotted names."""
        settings = dict(self.settings)
        comments = dict(self.comments)
        for dotted, value in changes.items():
            *sections, last = dotted.split(".")
            section = settings
            for part in sections:
                section[part] = dict(section.get(part) or {})
                section = section[part]
            section[last] = value
            first = dotted.partition(".")[0]
            if why not in comments.get(first, ""):
                comments[first] = "; ".join(filter(None, (comments.get(first), why)))
        return replace(self, settings=settings, comments=comments)


def _section(name: str, value: Any) -> list[str]:
    """The lines of a section: one, one for each source, or all that prompts take."""
    if name == "sources":
        return [f"{name}:", *(f"  {line}" for line in dump_yaml(value, flow=True).splitlines())]
    return dump_yaml({name: value}, flow=name != "evaluate").splitlines()


def draft(answers: Answers, folder: Path) -> Draft:
    """The recipe of the answers.

    Args:
        folder: of the recipe's file, by which paths below it are written.
    """
    pictures, base, goal = answers.pictures, answers.base, answers.goal
    shipped = base.shipped
    comments = {"extends": f"`kiln recipes {base.recipe}` shows all that it has"}
    settings: dict[str, Any] = {"extends": base.recipe, "name": answers.name}
    if base.model is not None:
        settings["model"] = {"path": _placed(base.model, folder)}
        if shipped.model.vae is not None:
            settings["model"]["vae"] = None
        comments["model"] = "its licence is not known: name it in publish.license"
    settings |= _sources(pictures, folder)
    if pictures.near_duplicates:
        settings |= {"describe": {}, "select": {"duplicates": {"perceptual": "hash"}}}
        comments["select"] = f"drops near-duplicates, about {pictures.near_duplicates} here"
    captions, why = _captions(answers)
    settings |= captions
    comments |= dict.fromkeys(captions, why)
    share = held_out_share(pictures.count, goal)
    settings["encode"] = {"holdout": share, **settings.get("encode", {})}
    held = "" if pictures.count is None else f"{share * pictures.count:,.0f} pictures "
    text = f"{held}are held back, to judge by"
    comments["encode"] = "; ".join(filter(None, (comments.get("encode"), text)))
    settings["train"], comments["train"] = _train(answers, shipped)
    settings["evaluate"] = {"prompts": {"new": {"prompts": [*answers.prompts]}}}
    comments["evaluate"] = "base and tuned model draw these"
    settings["publish"] = {"name": answers.name}
    if shipped.evaluate.judges:  # the demo's, which read digits
        settings["evaluate"]["judges"] = []
        settings["evaluate"]["prompts"]["old"] = None
        settings["publish"]["gate"] = _without_judges(shipped)
    if answers.machine.kind in ("npu", "hpu"):
        for section in ("encode", "train", "evaluate"):
            settings[section]["device"] = answers.machine.kind
    if pictures.count:
        settings["plan"] = {"pictures": pictures.count}
    if answers.price is not None:
        settings.setdefault("plan", {})["chip_hour_price"] = answers.price
    head = (f"{answers.name}: {goal} of {pictures.words}.", f"For {answers.machine.words}.")
    return Draft(settings, comments, head)


def _sources(pictures: Pictures, folder: Path) -> dict[str, Any]:
    placed = {}
    for name, entry in pictures.sources.items():
        source = entry["source"]
        placed[name] = {**entry, "source": {**source, "path": _placed(source["path"], folder)}}
    if set(placed) == {""}:
        return {"source": placed[""]["source"]}
    return {"sources": placed}


def _placed(place: str, folder: Path) -> str:
    """A path from the recipe's folder if it is below it, else from the root; URLs stay."""
    if "://" in place or not os.path.exists(re.split(r"[*?\[{]", place)[0] or place):
        return place
    path = Path(os.path.abspath(place))
    root = folder.resolve()
    return f"./{path.relative_to(root)}" if path.is_relative_to(root) else str(path)


def _captions(answers: Answers) -> tuple[dict[str, Any], str]:
    """The sections that give the pictures captions, and why; none if they have theirs."""
    pictures, word = answers.pictures, answers.word
    bare = (pictures.count or 0) - (pictures.captioned or 0)
    some_have = bool(pictures.captioned) and bare > 0
    if (pictures.has_captions and not some_have) or len(pictures.sources) > 1:
        return {}, ""  # entries of several sources have kohya's class tokens
    prefix = ""
    if word is not None:
        prefix = f"a photo of {word}, " if answers.goal == "subject" else f"in {word}, "
    memory = answers.machine.gpu.memory if answers.machine.gpu is not None else 0
    is_gpu = answers.machine.kind == "gpu" and memory >= CAPTIONER
    if is_gpu and bare <= MOST_CAPTIONED:
        each = "each picture without a caption" if some_have else "each picture"
        why = f"a model describes {each}" + (", after these words" if prefix else "")
        settings = {"only_missing": True} if some_have else {}
        return {"caption": settings | ({"prefix": prefix} if prefix else {})}, why
    if pictures.has_captions or word is None:
        return {}, ""
    every = f"a photo of {word}" if answers.goal == "subject" else f"a picture in {word}"
    return {"encode": {"captions": {"prompts": [every]}}}, "all pictures have this caption"


def _train(answers: Answers, shipped: Recipe) -> tuple[dict[str, Any], str]:
    samples = samples_of(answers.pictures, answers.goal, answers.base)
    is_demo = answers.base.name == DEMO
    few = shipped.train.method == "lora" and answers.goal != "everything" and not is_demo
    count = answers.machine.count
    batch = BATCH if few else shipped.train.global_batch_size
    batch = -(-batch // count) * count
    train: dict[str, Any] = {"steps": -(-samples // batch)}
    if batch != shipped.train.global_batch_size:
        train["global_batch_size"] = batch
    if count > 1:
        train["processes"] = count
    if answers.pictures.count:
        times = samples / answers.pictures.count
        words = f"each picture {times:,.0f} times" if times >= 1 else f"{times:.0%} of the pictures"
        return train, f"{samples:,} samples: {words}"
    return train, f"{samples:,} samples"


def _without_judges(shipped: Recipe) -> list[str]:
    """The rules of a shipped gate that need no judge, nor the shipped prompts."""
    evaluate = shipped.evaluate.model_copy(update={"judges": ()})
    known = metric_names(shipped.model_copy(update={"evaluate": evaluate}))
    return [rule for rule in shipped.publish.gate if parse_rule(rule).metric in known]


def split_prompts(text: str) -> Sequence[str]:
    """Prompts with | between them."""
    return [part.strip() for part in text.split("|") if part.strip()]
