"""Caption the pictures of an image shard, and check the captions.

What earlier tables have of the same picture and prompt is used again, and what a captioner has
answered of a shard is kept in a journal until the shard is committed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from PIL import Image

from artifacts.errors import caching
from artifacts.image_shards import read_tar
from artifacts.models import cache_folder, digest_model, fetch_model
from configs.settings.caption import Caption
from tasks.caption.captioner import Answer, Captioner, Decoding, Question
from tasks.caption.checks import CUT_OFF, NO_ANSWER, UNREADABLE, clean, fault_of
from tasks.caption.tables import SUFFIX, CaptionedSample, read_captions, write_captions
from tasks.describe.describers import Spec
from tasks.describe.tables import read_table
from tasks.devices.processes import Facts, Worker
from tasks.encode.crop_to_bucket import BadSample, decode
from tasks.evaluate.features import Clip
from tasks.evaluate.judges import cosine
from tasks.pictures import PictureShard

STAGE: Final = "caption"
#: Raised when the meaning of tables changes.
VERSION = 1
Answers = dict[tuple[int, str], Answer | None]  # (row, prompt's name)


@dataclass(frozen=True)
class CaptioningPlan:
    """The captioner and its settings, as devices.processes.Plan."""

    settings: dict[str, Any]  # configs.settings.caption.Caption, dumped
    prompts: dict[str, str]  # name -> digest of all that its captions depend on
    max_pixels: int
    model: str | None  # local folder; None: an endpoint captions
    model_digest: str = ""
    model_url: str | None = None  # of a copy in the store, for workers without `model`
    clip: Spec | None = None  # describer whose embeddings checks.min_likeness compares with
    #: Of the endpoint; remote workers have it in their environment.
    key: str | None = field(default=None, repr=False)
    device: str = "auto"

    stage = STAGE
    runtime = "torch"

    def fetched(self) -> CaptioningPlan:
        """The plan with the models of this machine. Raises Refused."""
        plan = self if self.clip is None else replace(self, clip=self.clip.fetched())
        if self.model_url is None:
            return plan
        return replace(
            plan, model=str(fetch_model(self.model_url, self.model_digest, digest_model))
        )

    def on(self, device: str, processes: int) -> CaptioningPlan:
        """The plan of one of several processes of this machine."""
        return replace(self, device=device)

    def open(self) -> Worker:
        """Load the model in this process. Raises Refused."""
        settings = Caption.model_validate(self.settings)
        clip = None
        if self.clip is not None:
            assert self.clip.model is not None
            clip = Clip(Path(self.clip.model), self.device, dtype=self.clip.transform["dtype"])
        return ShardCaptioner(self._captioner(settings), settings, self, clip)

    def _captioner(self, settings: Caption) -> Captioner:
        decoding = Decoding(settings.max_new_tokens, settings.temperature, settings.seed)
        if settings.endpoint is not None:
            from tasks.caption.endpoint import KEY, EndpointCaptioner

            key = self.key or os.environ.get(KEY, "").strip()
            return EndpointCaptioner(settings.endpoint, decoding, settings.prompts, key)
        from tasks.caption.vision_language import VisionLanguageModel

        assert self.model is not None
        model = Path(self.model), self.device, settings.dtype
        return VisionLanguageModel(*model, decoding, settings.prompts, settings.batch_size)


@dataclass
class _Known:
    """What earlier tables have of the pictures of an image shard."""

    ids: list[bytes] = field(default_factory=list)  # of all samples; empty: unknown
    by_row: Answers = field(default_factory=dict)  # of the same image shard
    #: (id, prompt's name) -> answer, of image shards that are gone
    by_id: dict[tuple[bytes, str], Answer] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardCaptioner:
    """Captions shards, as devices.processes.Worker."""

    captioner: Captioner
    settings: Caption
    plan: CaptioningPlan
    clip: Clip | None

    def __call__(self, request: dict[str, Any], folder: str) -> Facts:
        """Write the table of a `caption_request`.

        The facts are {"tar": sha256, "prompts": as of the plan, "kept": pictures, "good": {prompt:
        captions}, "bad_reasons": {reason: captions}, "without": pictures without a good caption}.
        """
        journal = Journal(request["sha256"])
        known = self._known(request)
        ids = known.ids
        answers: Answers = known.by_row | journal.read(self.plan.prompts)
        rows = request["rows"]
        if not ids or {(row, n) for row in rows for n in self.plan.prompts} - answers.keys():
            ids = self._ask(request, answers, known, journal)
        samples = [CaptionedSample(sample_id, {}) for sample_id in ids]
        likeness = self._likeness(request["described"], rows, answers)
        for row in rows:
            samples[row] = self._checked(row, ids[row], answers, likeness)
        write_captions(Path(folder, request["key"] + SUFFIX), [*self.plan.prompts], samples)
        journal.delete()
        facts = {"tar": request["sha256"], "prompts": self.plan.prompts}
        return {request["key"]: facts | _counts(samples, self.plan.prompts)}

    def _known(self, request: dict[str, Any]) -> _Known:
        """What earlier tables have of the image shard's pictures."""
        known = _Known()
        for table in request["known"]:
            before = {digest: name for name, digest in table["prompts"].items()}
            names = {n: before[d] for n, d in self.plan.prompts.items() if d in before}
            samples = read_captions(table["url"], table["sha256"])
            is_same = table["tar"] == request["sha256"]
            if is_same:
                known.ids = [sample.id for sample in samples]
            for row, sample in enumerate(samples):
                for name, old in names.items():
                    if old in sample.texts:
                        answer = Answer(sample.texts[old], old in sample.cut)
                        if is_same:
                            known.by_row[row, name] = answer
                        else:
                            known.by_id[sample.id, name] = answer
        return known

    def _ask(
        self, request: dict[str, Any], answers: Answers, known: _Known, journal: Journal
    ) -> list[bytes]:
        """Add the answers that are missing; return the ids of all samples."""
        ids: list[bytes] = []
        rows = set(request["rows"])
        size = self.settings.image_size

        def questions() -> Iterator[Question]:
            for row, sample in enumerate(read_tar(request["tar"], request["sha256"])):
                ids.append(sample.source_sha256)
                if row not in rows:
                    continue
                for name in self.plan.prompts:
                    if (earlier := known.by_id.get((ids[row], name))) is not None:
                        answers.setdefault((row, name), earlier)
                missing = tuple(n for n in self.plan.prompts if (row, n) not in answers)
                if not missing:
                    continue
                with suppress(BadSample):
                    picture = decode(sample.image, self.plan.max_pixels)
                    picture.thumbnail((size, size), Image.Resampling.LANCZOS)
                    yield Question(row, picture, missing)

        def keep(row: int, name: str, answer: Answer | None) -> None:
            if answer is not None:
                answer = Answer(clean(answer.text), answer.is_cut)
                journal.add(row, self.plan.prompts[name], answer)
            answers[row, name] = answer

        self.captioner.caption(questions(), keep)
        return ids

    def _likeness(
        self, described: dict[str, Any] | None, rows: Sequence[int], answers: Answers
    ) -> dict[tuple[int, str], float]:
        """(row, prompt) -> 100 times the cosine of the CLIP embeddings of caption and picture."""
        if self.clip is None or described is None:
            return {}
        rows_of = read_table(described["url"], described["sha256"], ["row", "value_"]).to_pylist()
        pictures = {r["row"]: r["value_"] for r in rows_of if r["value_"] is not None}
        given = {
            key: answer.text
            for row in rows
            for name in self.plan.prompts
            if (answer := answers.get(key := (row, name))) is not None and row in pictures
        }
        if not given:
            return {}
        embeddings = np.asarray([pictures[row] for row, _ in given], np.float32)
        cosines = cosine(embeddings, self.clip.texts([*given.values()]))
        return dict(zip(given, (100 * cosines).tolist(), strict=True))

    def _checked(
        self,
        row: int,
        sample_id: bytes,
        answers: Answers,
        likeness: Mapping[tuple[int, str], float],
    ) -> CaptionedSample:
        """The captions of a picture, and what is bad about them."""
        checks = self.settings.checks
        texts: dict[str, str] = {}
        cut: list[str] = []
        reasons: dict[str, str] = {}
        for name in self.plan.prompts:
            answer = answers.get((row, name))
            if answer is None:
                reasons[name] = NO_ANSWER if (row, name) in answers else UNREADABLE
                continue
            texts[name] = answer.text
            if answer.is_cut:
                cut.append(name)
            if fault := fault_of(answer.text, checks, likeness.get((row, name))):
                reasons[name] = fault
            elif answer.is_cut and checks.cut_off:
                reasons[name] = CUT_OFF
        return CaptionedSample(sample_id, texts, cut, reasons)


def caption_request(
    key: str,
    shard: PictureShard,
    known: Sequence[dict[str, Any]] = (),
    described: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What ShardCaptioner needs.

    Args:
        key: of the table.
        shard: the pictures to caption.
        known: earlier tables with some of its pictures, as of tables_of.
        described: url and sha256 of the table with the pictures' CLIP embeddings.
    """
    place = {"tar": shard.tar, "sha256": shard.sha256}
    rows = [row for row, is_chosen in enumerate(shard.mask) if is_chosen]
    return {"key": key, **place, "rows": rows, "known": list(known), "described": described}


def _counts(samples: Iterable[CaptionedSample], prompts: Iterable[str]) -> dict[str, Any]:
    captioned = [sample for sample in samples if sample.reasons is not None]
    bad = Counter(reason for sample in captioned for reason in (sample.reasons or {}).values())
    good = Counter(n for s in captioned for n in s.texts if n not in (s.reasons or {}))
    return {
        "kept": len(captioned),
        "good": {name: good[name] for name in prompts},
        "bad_reasons": dict(sorted(bad.items())),
        "without": sum(not sample.good for sample in captioned),
    }


class Journal:
    """The answers about an image shard so far, in this machine's cache; one process writes."""

    def __init__(self, sha256: str) -> None:
        self._path = cache_folder() / "captions" / f"{sha256}.jsonl"

    def read(self, prompts: Mapping[str, str]) -> Answers:
        """The answers to prompts, of name -> digest; a line that is cut off is left out."""
        names = {digest: name for name, digest in prompts.items()}
        answers: Answers = {}
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            with suppress(ValueError):
                row, digest, text, is_cut = json.loads(line)
                if digest in names:
                    answers[row, names[digest]] = Answer(text, is_cut)
        return answers

    def add(self, row: int, digest: str, answer: Answer) -> None:
        """Append an answer."""
        with caching(cache_folder()):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps([row, digest, answer.text, answer.is_cut]) + "\n")

    def delete(self) -> None:
        """Delete the answers: a table has them."""
        self._path.unlink(missing_ok=True)
