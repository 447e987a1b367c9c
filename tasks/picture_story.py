"""What became of one picture at each stage, from the artifacts of a recipe's newest runs."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from artifacts.latent_shards import BAD_REFERENCE, NOT_SELECTED
from artifacts.records import digest_bytes
from configs.errors import Refused
from configs.secrets import without_secrets
from configs.settings.data import UrlSource
from configs.settings.recipe import Recipe
from tasks.data_page import shortened
from tasks.data_set import IMAGES, OF_STAGES, DataSet, Encoded
from tasks.download import shard_plan
from tasks.download.listed import OWN_COLUMNS, failures
from tasks.download.lists import MalformedList
from tasks.download.rows import literal
from tasks.download.shard import place_of, shard_key
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
    """What each stage did, for each entry or row of a picture, in each source of a mixture.

    Args:
        what: URL (as listed), file or sha256 (hex) of the picture as it was downloaded.

    Raises:
        Refused: neither the source nor the pictures have it.
    """
    parts = recipe.by_source
    stories = [
        [told._replace(stage=f"{told.stage} {name}".strip()) for told in story]
        for name, own in data.by_source.items()
        for story in _stories(parts.get(name, recipe), own, what)
    ]
    return stories or [[_in_source(recipe, what)]]


def _stories(recipe: Recipe, data: DataSet, what: str) -> list[list[Told]]:
    """What each stage did, for each entry or row of a picture of one source."""
    named = SHA256.fullmatch(what)
    digest = named[2] if named else None
    if digest is None and Path(what).is_file():
        digest = digest_bytes(Path(what).read_bytes())
    url = without_secrets(what) if digest is None else f"sha256:{digest}"
    same = f"url = {literal(url)}" if digest is None else f"id = unhex('{digest}')"
    where = f"list_side.{same}"
    if "select" in data.artifacts:  # the pictures of its group, too
        of = f'select "group" from selection join list_side using (tar, row) where {where}'
        where += f' or selection."group" in ({of})'
    with data.opened(where) as db:
        found = db.execute(f"select *, {same} as is_asked from entries order by tar, row")
        columns = [column[0] for column in found.description or ()]
        group = [dict(zip(columns, row, strict=True)) for row in found.fetchall()]
    _name_files(recipe, data, group)
    group.sort(key=lambda entry: not entry["kept"])
    entries = [entry for entry in group if entry.pop("is_asked")]
    encoded = _encoded(data, entries)
    stories = [list(_story(data, entry, group, encoded)) for entry in entries]
    name = what if Path(what).is_file() else url
    return stories + [_failed(row, name) for row in failures(data.artifacts[IMAGES], url)]


def _name_files(recipe: Recipe, data: DataSet, entries: Sequence[dict[str, Any]]) -> None:
    """Set the URL of embedded pictures to their file in the source, if this machine planned it.

    Args:
        entries: all of the same bytes, in the order of their tars and rows.
    """
    plan = data.artifacts.get("plan")
    if plan is None or not shard_plan.is_readable(plan):
        return
    tars = {entry["tar"] for entry in entries}
    files = [file for file in data.artifacts[IMAGES].files if file.path.endswith(".tar")]
    tar_of = {PurePosixPath(file.path).name.partition(".")[0]: file.sha256 for file in files}
    names = defaultdict[tuple[str, str], list[str]](list)
    for shard in shard_plan.read_plan(plan, shard_key(recipe.download)).shards:
        tar = tar_of.get(shard.key, "")
        if tar in tars:
            for row in shard_plan.read_spans(shard.spans, shard_plan.plan_key()).to_pylist():
                names[tar, row["url"]].append(place_of(row["file"], row["row"]))
    for entry in entries:
        if entry["url"].startswith("sha256:") and (named := names[entry["tar"], entry["url"]]):
            entry["url"] = named.pop(0)


def _encoded(data: DataSet, entries: Iterable[dict[str, Any]]) -> dict[bytes, list[Encoded]]:
    found: dict[bytes, list[Encoded]] = {entry["id"]: [] for entry in entries}
    tars = {entry["tar"] for entry in entries}
    for picture in data.encoded(tars) if tars else ():
        if picture.id in found:
            found[picture.id].append(picture)
    return found


def _failed(row: dict[str, Any], name: str) -> list[Told]:
    count = row["attempts"]
    requests = f", after {count} request{'s' if count > 1 else ''}" if count else ""
    why = f"no picture: {row['error_message']}{requests}"
    return [Told("source", f"{name}, {row['caption']!r}"), Told(IMAGES, why)]


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


def _story(
    data: DataSet,
    entry: dict[str, Any],
    group: Sequence[dict[str, Any]],
    encoded: dict[bytes, list[Encoded]],
) -> Iterator[Told]:
    """What each stage did with an entry.

    Args:
        group: the entries of its group of duplicates, those that are kept first.
        encoded: by the id of an entry.
    """
    described = data.described
    latents = encoded[entry["id"]]
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
        yield Told("select", f"{_choice(entry)}{_duplicates(entry, group)}")
    if entry["bad"] is not None:
        made = json.loads(entry["captions"])
        bad = json.loads(entry["bad"])
        for prompt, text in made.items():
            why = f"rejected ({bad[prompt]}): " if prompt in bad else ""
            yield Told("caption", f"{prompt}: {why}{shortened(text)!r}")
        for prompt in bad.keys() - made.keys():
            yield Told("caption", f"{prompt}: none: {bad[prompt]}")
    elif "caption" in data.artifacts and entry["kept"]:
        yield Told("caption", "not captioned: it keeps the source's caption")
    captioned = entry["bad"] is not None or ("caption" in data.artifacts and entry["kept"])
    if captioned and all(picture.split == "train" for picture in latents):
        read = data.captions(entry["caption"], entry["captions"], entry["bad"])
        texts = " / ".join(repr(shortened(text)) for text in read)
        yield Told("caption", f"training reads {texts or 'none of them'}")
    if "encode" not in data.artifacts:
        return
    if entry is not next(other for other in group if other["id"] == entry["id"]):
        yield Told("encode", "see its entry above, which has the same bytes")
        return
    if not latents:
        yield Told("encode", "no latents" if entry["kept"] else "no latents, since it was dropped")
    for picture in latents:
        split, _, size = picture.group.partition("/")
        height, width = (int(side) * data.pixels_per_latent for side in size.split("x"))
        place = f"row {picture.row} of the latent shard {picture.shard[:12]}"
        yield Told("encode", f"{split}, bucket {height} x {width}; {place}")
        if picture.left_out is not None:
            reasons = {NOT_SELECTED: "not selected", BAD_REFERENCE: "a reference is missing"}
            why = reasons.get(picture.left_out, "a near-duplicate of a held-out picture")
            yield Told("train", f"left out: {why}")
        elif split == "train":
            has = "trained on" if "train" in data.artifacts else "will be trained on"
            yield Told("train", has)
        else:
            yield Told("train", "held out: the evaluation measures with it")


def _duplicates(entry: dict[str, Any], group: Sequence[dict[str, Any]]) -> str:
    """The duplicates of an entry, by the URL or file of the one that is kept."""
    alike = [other for other in group if other["group"] == entry["group"] is not None]
    if not alike:
        return ""
    if entry["kept"]:
        return f"; of {len(alike)} duplicates"
    kept = alike[0]["url"] if alike[0]["kept"] else "none"
    return f"; of {len(alike)} duplicates, {kept} is kept"


def _choice(entry: dict[str, Any]) -> str:
    return "kept" if entry["kept"] else f"dropped: {entry['reason']}"


def _shown(value: Any) -> str:
    return "unknown" if value is None else human(value) if isinstance(value, float) else str(value)
