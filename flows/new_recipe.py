"""`kiln new`: five questions, a recipe that is proven to fit, and what it will take."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import typer

from configs.checks import collect
from configs.errors import Refused, UserError
from configs.load_recipe import recipe_names
from flows.command_errors import import_prefect
from flows.show_plan import gpu_plan_facts, shared_facts, slice_plan_facts
from tasks.new_recipe import bases, draft
from tasks.new_recipe.bases import Base, Goal
from tasks.new_recipe.draft import Answers
from tasks.new_recipe.fit import Proven, prove
from tasks.new_recipe.machine import EXAMPLES, Machine, find_machine, parse_machine
from tasks.new_recipe.pictures import Pictures, look
from tasks.plan.gpu import GpuPlan
from tasks.plan.tpu import SlicePlan
from tasks.progress import bytes_in_words, gib, hours_in_words
from tasks.publish.promotion_gate import LEAST_PROMPTS

Answer = TypeVar("Answer")
READY = "ready ones"


@dataclass(frozen=True)
class Given:
    """The options of the command; None: the question is asked."""

    pictures: str | None
    teach: str | None
    word: str | None
    machine: str | None
    base: str | None
    prompts: tuple[str, ...]
    price: float | None
    output: Path | None
    yes: bool


def new(given: Given, *, as_json: bool) -> None:
    """Ask what is not given, prove the recipe, write it, and say what it takes.

    Raises:
        Refused: an answer is wrong or missing and nobody can be asked, or nothing fits.
    """
    asker = Asker(given.yes or as_json)
    if given.output is not None:
        _check_output(given.output)
    pictures = asker.ask(
        "1. Pictures: a folder, list or owner/name", "PICTURES", given.pictures, None, look
    )
    asker.say(f"   {pictures.words}", *(f"   {note}" for note in pictures.notes))
    goal = asker.ask(
        "2. Teach a subject, a style, or everything",
        "--teach",
        given.teach,
        draft.ready_goal(pictures),
        _goal,
    )
    word = _word(asker, given, pictures, goal)
    found = find_machine()
    machine = asker.ask(
        f"3. Machine ({EXAMPLES})" if found is None else "3. Machine",
        "--gpu",
        given.machine,
        None if found is None else found.name,
        lambda text: found if found is not None and text == found.name else parse_machine(text),
    )
    asker.say(f"   {machine.words}")
    output = given.output or _free_file(draft.model_name(pictures.place))
    name = draft.model_name(output.name)
    proven = None
    base_given = given.base
    while proven is None:
        base = _base(asker, base_given, pictures, goal, machine)
        prompts = _prompts(asker, given, pictures, goal, word)
        answers = Answers(pictures, goal, word, machine, base, prompts, name, given.price)
        proven = _proven(asker, answers, output.parent, is_given=base_given is not None)
        base_given = None
    _write(output, proven.draft.text())
    problems = _problems(proven, output) if machine == found or machine.kind == "cpu" else []
    if as_json:
        print(json.dumps(_facts(answers, proven, output) | {"problems": problems}))
        return
    for row, text in _rows(answers, proven, output, problems):
        print(f"{row:9} {text}")


def _problems(proven: Proven, output: Path) -> list[str]:
    """What `kiln doctor` finds of the recipe on this machine."""
    import_prefect()
    from flows.doctor import recipe_checks

    findings = collect(recipe_checks(proven.recipe, [str(output)]))
    return [finding.words for finding in findings if finding.level == "problem"]


class Asker:
    """Questions at a terminal, with ready answers; a wrong answer is asked again, with the reason.

    Args:
        takes_ready: take the ready answers, and ask nothing.
    """

    def __init__(self, takes_ready: bool) -> None:
        self.takes_ready = takes_ready
        self.can_ask = not takes_ready and sys.stdin.isatty()

    def ask(
        self,
        question: str,
        option: str,
        given: str | None,
        ready: str | None,
        parse: Callable[[str], Answer],
    ) -> Answer:
        """The answer that is given by an option, ready or typed.

        Raises Refused if the given one is wrong, or nobody can be asked.
        """
        if given is not None:
            return parse(given)
        if self.takes_ready and ready is not None:
            return parse(ready)
        if not self.can_ask:
            why = "no answer is ready" if ready is None else "there is no terminal to ask at"
            end = "" if ready is None else ", or --yes for the ready answers"
            raise Refused(f"{question.partition('. ')[2]}: {why}: add {option}{end}")

        def checked(text: str) -> Answer:
            try:
                return parse(text)
            except UserError as error:
                raise typer.BadParameter(str(error)) from None

        return typer.prompt(question, default=ready, value_proc=checked)

    def say(self, *lines: str) -> None:
        """Lines beside the questions; scripts do not need them."""
        if not self.takes_ready:
            print(*lines, sep="\n", file=sys.stderr if not self.can_ask else None)


def _goal(text: str) -> Goal:
    goals: tuple[Goal, ...] = get_args(Goal)
    chosen = [goal for goal in goals if text.strip() and goal.startswith(text.strip().lower())]
    if not chosen:
        raise Refused(f"{text}: write {', '.join(goals[:-1])} or {goals[-1]}")
    return chosen[0]


def _word(asker: Asker, given: Given, pictures: Pictures, goal: Goal) -> str | None:
    """The word that stands for the subject or style; captions have one of their own."""
    if goal == "everything" or (pictures.has_captions and given.word is None):
        return None
    kind = "a rare word and the kind of thing" if goal == "subject" else "a rare word"
    question = f"   Its word in prompts, {kind}"
    return asker.ask(question, "--word", given.word, draft.ready_word(pictures, goal), _text)


def _text(text: str) -> str:
    if not text.strip():
        raise Refused("it is empty: write a word, such as ohwx dog")
    return " ".join(text.split())


def _base(
    asker: Asker, given: str | None, pictures: Pictures, goal: Goal, machine: Machine
) -> Base:
    known = bases.offers(machine, goal)
    if not known and given is None and not asker.can_ask:
        raise Refused(f"no shipped recipe to teach {goal} fits {machine.words}: see docs/choose.md")
    if given is None and known:
        samples = draft.samples_of(pictures, goal, known[0])
        asker.say(*(f"   {line}" for line in bases.listed(known, machine, samples)))
    ready = known[0].name if known else None
    question = "4. Base: one of these, or a model by path or hub id"
    return asker.ask(
        question, "--base", given, ready, partial(bases.choose, machine=machine, goal=goal)
    )


def _prompts(
    asker: Asker, given: Given, pictures: Pictures, goal: Goal, word: str | None
) -> tuple[str, ...]:
    ready = draft.ready_prompts(pictures, goal, word)
    if given.prompts:
        return _checked_prompts(given.prompts)

    def parse(text: str) -> tuple[str, ...]:
        return ready if text == READY else _checked_prompts(draft.split_prompts(text))

    asker.say(*(f"   {prompt}" for prompt in ready))
    return asker.ask("5. Prompts to judge by, with | between them", "--prompt", None, READY, parse)


def _checked_prompts(prompts: Sequence[str]) -> tuple[str, ...]:
    count = len(set(prompts))
    if count < LEAST_PROMPTS:
        raise Refused(f"{count} prompts tell the gate too little: write {LEAST_PROMPTS} or more")
    return tuple(dict.fromkeys(prompts))


def _proven(asker: Asker, answers: Answers, folder: Path, *, is_given: bool) -> Proven | None:
    """The proven recipe; None if it does not fit and another base can be asked for."""
    proven = prove(draft.draft(answers, folder), answers.machine, folder, _progress)
    if proven.refusal is None:
        return proven
    if not asker.can_ask:
        raise Refused(f"{answers.base.name} does not fit, and nothing is written: {proven.refusal}")
    asker.say(f"   {proven.refusal}")
    return None


def _progress(text: str) -> None:
    print(f"   {text}", file=sys.stderr)


def _free_file(name: str) -> Path:
    """The file of a new recipe here, which neither exists nor hides a shipped recipe."""
    names = (name, *(f"{name}-{number}" for number in range(2, 1000)))
    free = (n for n in names if n not in recipe_names() and not os.path.exists(f"{n}.yaml"))
    return Path(f"{next(free)}.yaml")


def _check_output(path: Path) -> None:
    if path.suffix not in (".yaml", ".yml"):
        raise Refused(f"--output {path}: a recipe's name ends in .yaml")
    if path.exists():
        raise Refused(f"--output {path}: it exists: name another file, or delete it")
    if not path.parent.is_dir():
        raise Refused(f"--output {path}: there is no folder {path.parent}")


def _write(path: Path, text: str) -> None:
    """Write a recipe that another one does not replace. Raises Refused."""
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise Refused(f"{path}: it cannot be written ({error.strerror})") from None


def _rows(
    answers: Answers, proven: Proven, output: Path, problems: Sequence[str]
) -> list[tuple[str, str]]:
    """What the recipe takes, and how to go on: name and text."""
    plan = proven.plan
    rows = [("recipe", f"{output}, which extends {answers.base.recipe}")]
    if isinstance(plan, GpuPlan):
        fits = f"fits: {gib(plan.peaks.largest, 1)} of {gib(plan.gpu.usable, 1)} on {plan.gpu.name}"
    else:
        fits = f"fits {plan.where.name}"
    rows.append(("memory", fits))
    rows.append(("time", _time(plan, answers.machine)))
    if proven.disk is not None:
        rows.append(("disk", f"about {bytes_in_words(proven.disk)}"))
    doubts = proven.gate()
    if not doubts:
        rows.append(("gate", "can tell a better model from a worse one"))
    rows += [("gate", line) for line in doubts]
    rows += [("problem", text) for text in problems]
    rows.append(("next", f"kiln run {shlex.quote(str(output))}"))
    return rows


def _time(plan: GpuPlan | SlicePlan, machine: Machine) -> str:
    if plan.hours is None:
        is_named = machine.kind != "gpu" or (machine.gpu is not None and machine.gpu.spec)
        return "not known for it" if is_named else "not known: name the GPU, not its memory"
    text = f"{hours_in_words(plan.hours)} of training"
    return text if plan.cost is None else f"{text}, price {plan.cost:,.2f}"


def _facts(answers: Answers, proven: Proven, output: Path) -> dict[str, Any]:
    plan = proven.plan
    own = gpu_plan_facts(plan) if isinstance(plan, GpuPlan) else slice_plan_facts(plan)
    pictures = answers.pictures
    return {
        "recipe": str(output),
        "extends": answers.base.recipe,
        "pictures": {
            "place": pictures.place,
            "count": pictures.count,
            "captioned": pictures.captioned,
            "near_duplicates": pictures.near_duplicates,
            "unreadable": pictures.unreadable,
            "shorter_sides": pictures.sides,
        },
        "teach": answers.goal,
        "word": answers.word,
        "machine": answers.machine.name,
        "prompts": answers.prompts,
        "settings": proven.draft.settings,
        "plan": own | shared_facts(plan),
        "disk_bytes": proven.disk,
        "gate": proven.gate(),
        "next": ["kiln", "run", str(output)],
    }
