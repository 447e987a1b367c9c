"""What became of one picture at each stage, from the artifacts of a recipe's newest runs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from artifacts.latent_shards import NOT_SELECTED
from artifacts.records import digest_bytes
from configs.errors import Refused
from configs.secrets import without_secrets
from configs.settings.data import UrlSource
from configs.settings.recipe import Recipe
from tasks.data_page import shortened
from tasks.data_set import IMAGES, OF_STAGES, DataSet, Encoded
from tasks.download.listed import OWN_COLUMNS, failures
from tasks.download.lists import MalformedList
from tasks.download.rows import literal
from tasks.download.sources import UrlList
from tasks.panels import human
from tasks.sql_condition import quoted

SHA256 = re.compile(r"(sha256:)?([0-9a-f]{64})")
#: Columns of `entries` that are told with the stage that they belong to, or identify the picture.
TOLD = {*OWN_COLUMNS, *OF_STAGES}


class Told(NamedTuple):
    """What one stage did with a picture."""

    stage: str  # `source` before the first
    text: str


def tell(recipe: Recipe, data: DataSet, what: str) -> list[list[Told]]:
    """What each stage did, for each entry or row of a picture.

    Args:
        what: URL (as listed), file or sha256 (hex) of the picture as it was downloaded.

    Raises:
        Refused: neither the source nor the pictures have it.
    """
    named = SHA256.fullmatch(what)
    digest = named[2] if named else None
    if digest is None and Path(what).is_file():
        digest = digest_bytes(Path(what).read_bytes())
    url = without_secrets(what) if digest is None else f"sha256:{digest}"
    same = f"url = {literal(url)}" if digest is None else f"id = unhex('{digest}')"
    where = f"list_side.{same}"
    with data.opened(where) as db:
        found = db.execute("from entries")
        columns = [column[0] for column in found.description or ()]
        entries = [dict(zip(columns, row, strict=True)) for row in found.fetchall()]
    encoded = _encoded(data, entries)
    stories = [list(_story(data, entry, encoded[entry["id"]])) for entry in entries]
    stories += [_failed(row) for row in failures(data.artifacts[IMAGES], url)]
    return stories or [[_in_source(recipe, what)]]


def _encoded(data: DataSet, entries: Iterable[dict[str, Any]]) -> dict[bytes, list[Encoded]]:
    found: dict[bytes, list[Encoded]] = {entry["id"]: [] for entry in entries}
    tars = {entry["tar"] for entry in entries}
    for picture in data.encoded(tars) if tars else ():
        if picture.id in found:
            found[picture.id].append(picture)
    return found


def _failed(row: dict[str, Any]) -> list[Told]:
    requests = f", after {row['attempts']} requests" if row["attempts"] else ""
    why = f"no picture: {row['error_message']}{requests}"
    return [Told("source", f"{row['url']}, {row['caption']!r}"), Told(IMAGES, why)]


def _in_source(recipe: Recipe, what: str) -> Told:
    """Whether the list has a URL that no run has downloaded."""
    source = recipe.source
    if isinstance(source, UrlSource):
        same = f"{quoted(source.url_column)} = {literal(what)}"
        listed = source.model_copy(update={"where": same})
        if _count(listed):
            both = f"({same}) and (\n{source.where or 'true'}\n)"
            if _count(source.model_copy(update={"where": both})):
                return Told("source", "a row of the list that the newest run did not download")
            return Told("source", f"dropped by source.where: {source.where}")
    raise Refused(
        f"{what}: no picture of recipe {recipe.name}: neither its source nor its newest run has it"
    )


def _count(source: UrlSource) -> int:
    count = 0
    for piece in UrlList(source).pieces():
        try:
            count += sum(map(len, piece.read()))
        except MalformedList:
            count += sum(map(len, piece.read_malformed()))
    return count


def _story(data: DataSet, entry: dict[str, Any], encoded: list[Encoded]) -> Iterator[Told]:
    described = data.described
    values = {name: _shown(value) for name, value in entry.items() if name not in TOLD}
    listed = "".join(f", {n} {text}" for n, text in values.items() if n not in described)
    yield Told("source", f"{entry['url']}, {shortened(entry['caption'])!r}{listed}")
    stored = f"stored with {entry['width']} x {entry['height']} pixels"
    original = f"{entry['original_width']} x {entry['original_height']}"
    place = f"row {entry['row']} of the image shard {entry['tar'][:12]}"
    yield Told(IMAGES, f"{stored}, downloaded with {original}; {place}; sha256 {entry['id'].hex()}")
    if described:
        words = (f"{name} {text}" for name, text in values.items() if name in described)
        yield Told("describe", ", ".join(words))
    if "select" in data.artifacts:
        group = "" if entry["group"] is None else f"; in group {entry['group']} of duplicates"
        yield Told("select", f"{_choice(entry)}{group}")
    if entry["bad"] is not None:
        made = json.loads(entry["captions"])
        bad = json.loads(entry["bad"])
        for prompt, text in made.items():
            why = f"rejected ({bad[prompt]}): " if prompt in bad else ""
            yield Told("caption", f"{prompt}: {why}{shortened(text)!r}")
        for prompt in bad.keys() - made.keys():
            yield Told("caption", f"{prompt}: none: {bad[prompt]}")
        if all(picture.split == "train" for picture in encoded):
            read = data.captions(entry["caption"], entry["captions"], entry["bad"])
            texts = " / ".join(repr(shortened(text)) for text in read)
            yield Told("caption", f"training reads {texts or 'none of them'}")
    if "encode" not in data.artifacts:
        return
    if not encoded:
        yield Told("encode", "no latents" if entry["kept"] else "no latents, since it was dropped")
    for picture in encoded:
        split, _, size = picture.group.partition("/")
        height, width = (int(side) * data.pixels_per_latent for side in size.split("x"))
        place = f"row {picture.row} of the latent shard {picture.shard[:12]}"
        yield Told("encode", f"{split}, bucket {height} x {width}; {place}")
        if picture.left_out is not None:
            is_copy = picture.left_out != NOT_SELECTED
            why = "a near-duplicate of a held-out picture" if is_copy else "not selected"
            yield Told("train", f"left out: {why}")
        elif split == "train":
            has = "trained on" if "train" in data.artifacts else "will be trained on"
            yield Told("train", has)
        else:
            yield Told("train", "held out: the evaluation measures with it")


def _choice(entry: dict[str, Any]) -> str:
    return "kept" if entry["kept"] else f"dropped: {entry['reason']}"


def _shown(value: Any) -> str:
    return "unknown" if value is None else human(value) if isinstance(value, float) else str(value)
