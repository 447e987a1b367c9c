"""The table of describers, and what each needs. A new describer is a class and a row here.

A describer's digest is that of its kind, settings, model and transform. Its name in the recipe is
no part of it.
"""

from __future__ import annotations

import difflib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from PIL import Image

from artifacts.models import (
    check_file_available,
    check_model_available,
    digest_model,
    digest_model_file,
    fetch_model,
    model_files,
    put_model,
    resolve_file,
    resolve_model,
)
from artifacts.records import digest_json
from artifacts.store import Store
from configs.checks import Check, Finding, fine
from configs.errors import Refused, naming
from configs.secrets import without_secrets
from configs.settings.describe import Describe

#: Increment when decoding changes.
DECODING = 1
#: Kind -> module and class.
KINDS = {
    "hash": ("tasks.describe.pixels", "Hash"),
    "quality": ("tasks.describe.pixels", "Quality"),
    "clip": ("tasks.describe.clip", "Clip"),
    "aesthetic": ("tasks.describe.clip", "Aesthetic"),
    "classifier": ("tasks.describe.classifiers", "Classifier"),
    "onnx": ("tasks.describe.classifiers", "Onnx"),
    "text": ("tasks.describe.text", "Text"),
}
#: Kinds whose models are folders of `transformers`, and those whose models are files.
FOLDERS = ("clip", "classifier")
FILES = {"onnx": "model", "aesthetic": "head"}
#: Maximum number of columns of a classifier.
MOST_LABELS = 100


@dataclass(frozen=True)
class Spec:
    """A describer without its name, as JSON for processes of its stage."""

    kind: str
    settings: dict[str, Any]  # those in keys
    transform: dict[str, Any]  # max_pixels and Describer.transform
    version: int = 1
    model: str | None = None  # local folder or file
    model_digest: str | None = None  # sha256 hex
    model_url: str | None = None  # of a copy in the store, for workers without `model`
    of: str | None = None  # digest of the describer whose embeddings it reads

    @property
    def digest(self) -> str:
        """sha256 (hex) of all that determines its values of a picture."""
        facts = {"kind": self.kind, "version": self.version, "settings": self.settings}
        facts |= {"transform": self.transform, "model": self.model_digest, "of": self.of}
        return digest_json(facts)

    def put(self, store: Store) -> Spec:
        """The spec with a copy of its model in the store, for remote workers."""
        if self.model is None or self.model_digest is None:
            return self
        path = Path(self.model)
        names = model_files(path) if path.is_dir() else {path.name: path}
        return replace(self, model_url=put_model(store, self.model_digest, names))

    def fetched(self) -> Spec:
        """The spec with this machine's copy of its model. Raises Refused."""
        if self.model_url is None or self.model is None or self.model_digest is None:
            return self
        name = Path(self.model).name if self.kind in FILES else ""
        digest = digest_model_file if self.kind in FILES else digest_model
        copy = fetch_model(self.model_url, self.model_digest, lambda copy: digest(copy / name))
        return replace(self, model=str(copy / name))


@dataclass(frozen=True)
class Picture:
    """What a describer may read of a picture."""

    image: Image.Image  # RGB
    caption: str  # the first one; "" without captions


class Describer(ABC):
    """Computes values of pictures; opened once per process.

    Args:
        spec: kind, settings and model.
        device: of the model, as describe.device.

    Raises:
        Refused: the model cannot be opened.
    """

    version: ClassVar[int] = 1  # raised when values change
    reads_captions: ClassVar[bool] = False
    #: Whether a batch is filled up to its full size: a model's kernels depend on it.
    fixed_batch: ClassVar[bool] = True

    def __init__(self, spec: Spec, device: str) -> None:
        self.spec = spec
        self.device = device

    @classmethod
    def transform(cls, dtype: str) -> dict[str, Any]:
        """What determines values besides settings and model. Raises Refused.

        Args:
            dtype: describe.dtype.
        """
        return {}

    @classmethod
    def check(cls, spec: Spec, setting: str, of: Spec | None) -> None:
        """Raise Refused for a model or settings that cannot work; weights may stay unread.

        Args:
            setting: of the describer, for errors.
            of: the describer whose embeddings it reads.
        """
        return

    @classmethod
    @abstractmethod
    def values(cls, spec: Spec) -> dict[str, pa.DataType]:
        """Name -> type of its values; the name "" is that of the describer itself."""

    @abstractmethod
    def prepare(self, source: Any) -> Any:
        """What `describe` needs of a Picture, or of an embedding (f16 [D]); in several threads."""

    @abstractmethod
    def describe(self, prepared: Sequence[Any]) -> Sequence[tuple[Any, ...]]:
        """The values of each picture of a batch, in the order of `values`."""


def has_cuda() -> bool:
    """Whether onnxruntime computes on NVIDIA GPUs."""
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def kind_of(spec: Spec) -> type[Describer]:
    """The class of a describer."""
    module, name = KINDS[spec.kind]
    kind: type[Describer] = getattr(import_module(module), name)
    return kind


def specs_of(chosen: Describe, max_pixels: int) -> dict[str, Spec]:
    """Name -> describer; remote models are fetched. Raises Refused or Away.

    Args:
        max_pixels: as download.max_pixels.
    """
    specs = dict[str, Spec]()
    # Those that read embeddings come last: their digests have that of their source.
    for name in sorted(chosen.describers, key=lambda n: chosen.describers[n].kind == "aesthetic"):
        specs[name] = _spec(chosen, name, max_pixels, specs)
    return {name: specs[name] for name in chosen.describers}


def _spec(chosen: Describe, name: str, max_pixels: int, before: Mapping[str, Spec]) -> Spec:
    describer: Any = chosen.describers[name]
    settings = describer.key_settings()
    kind = settings.pop("kind")
    transform: dict[str, Any] = {"decoding": DECODING, "max_pixels": max_pixels}
    spec = Spec(kind, settings, transform)
    with naming(f"describe.describers.{name}"):
        if kind in FOLDERS:
            folder = resolve_model(describer.model, revision=describer.revision)
            spec = replace(spec, model=str(folder), model_digest=digest_model(folder))
        elif kind in FILES:
            file = resolve_file(getattr(describer, FILES[kind]))
            spec = replace(spec, model=str(file), model_digest=digest_model_file(file))
        if kind == "aesthetic":
            spec = replace(spec, of=before[describer.of].digest)
        transform |= kind_of(spec).transform(chosen.dtype)
        return replace(spec, version=kind_of(spec).version, transform=transform)


def checks(chosen: Describe, max_pixels: int, *, fetch: bool) -> Iterator[Check]:
    """The checks of describers before work.

    Args:
        max_pixels: as download.max_pixels.
        fetch: whether remote models are downloaded; otherwise they must be there to be fetched, and
            are not opened.
    """
    for setting, place in chosen.models.items():
        find = partial(_available, chosen, setting, fetch=fetch)
        yield Check(setting, find, remote="://" in place)
    if fetch or are_local(chosen):
        yield Check("describers", partial(check_describers, chosen, max_pixels))


def are_local(chosen: Describe) -> bool:
    """Whether the describers' models are here."""
    return all(map(os.path.exists, chosen.models.values()))


def _available(chosen: Describe, setting: str, *, fetch: bool) -> Iterator[Finding]:
    if fetch:
        return
    place = chosen.models[setting]
    describer: Any = chosen.describers[setting.split(".")[2]]
    with naming(setting):
        if describer.kind in FILES:
            where = check_file_available(place)
        else:
            where = check_model_available(place, revision=describer.revision)
    yield fine(f"{setting}: {without_secrets(place)} ({where})")


def check_describers(chosen: Describe, max_pixels: int) -> None:
    """Raise Refused for describers that cannot work; few weights are read."""
    specs = specs_of(chosen, max_pixels)
    by_digest = {spec.digest: spec for spec in specs.values()}
    for name, spec in specs.items():
        of = None if spec.of is None else by_digest[spec.of]
        kind_of(spec).check(spec, f"describe.describers.{name}", of)
    columns: dict[str, str] = {}
    for name, spec in specs.items():
        for column in columns_of(name, spec):
            if (other := columns.setdefault(column, name)) != name:
                raise Refused(
                    f"the describers {other} and {name} both have a column {column}: rename one",
                    setting=f"describe.describers.{name}",
                )


def columns_of(name: str, spec: Spec) -> dict[str, pa.DataType]:
    """Column -> type of a describer with a name."""
    values = kind_of(spec).values(spec)
    return {column_name(name, value): kind for value, kind in values.items()}


def column_name(name: str, value: str) -> str:
    """The column of a describer's value, such as `clip` or `clip_likeness`."""
    return f"{name}_{value}" if value else name


def label_values(labels: Iterable[str]) -> dict[str, pa.DataType]:
    """The values of a classifier: its labels as names, f32."""
    return {label_name(label): pa.float32() for label in labels}


def label_name(label: str) -> str:
    """A label in the letters of a column, such as `not_safe` of `Not Safe`."""
    return re.sub("[^a-z0-9]+", "_", label.lower()).strip("_")


def check_labels(labels: Sequence[str], asked: Sequence[str], setting: str) -> None:
    """Raise Refused for labels that a model lacks, or for too many or equal columns."""
    for label in asked:
        if label not in labels:
            near = difflib.get_close_matches(label, labels, n=1, cutoff=0.0)
            hint = f"did you mean {near[0]}?" if near else "it has none"
            raise Refused(f"the model has no label {label} ({hint})", setting=f"{setting}.labels")
    chosen = asked or labels
    if len(chosen) > MOST_LABELS:
        raise Refused(
            f"the model has {len(chosen)} labels, more than {MOST_LABELS} columns: name some",
            setting=f"{setting}.labels",
        )
    if len(label_values(chosen)) < len(chosen):
        raise Refused("two labels have the same column: name others", setting=f"{setting}.labels")
