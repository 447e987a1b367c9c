"""What became of the pictures, for people: counts by reason, histograms, and examples.

The page has at most PICTURES small pictures and their references, from at most SHARDS image shards:
its size does not depend on that of the data set. Captions are escaped where panels are rendered.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BytesIO
from itertools import chain
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
from PIL import Image

from artifacts.image_shards import Sample, read_tar
from artifacts.store import Artifact
from configs.settings.recipe import Recipe
from tasks.data_set import IMAGES, DataSet, Encoded, numbers
from tasks.download.listed import SIZES
from tasks.download.rows import literal
from tasks.encode.crop_to_bucket import Size, area_mean, decode, transform
from tasks.encode.near_duplicates import SUFFIX, mirror_parts
from tasks.encode.near_duplicates import THUMBNAIL as THUMBNAIL_ROW
from tasks.panels import Chart, Gallery, Panel, Table, human, render_html
from tasks.panels_charts import histogram_chart
from tasks.reference_examples import reference_examples
from tasks.select.selection import read_selection
from tasks.sql_condition import Threshold, quoted

PICTURES = 200
SHARDS = 24
FEW_SHARDS = 4  # in Prefect's UI
THUMBNAIL = 128  # pixels of the longer side
HIDDEN = (220, 20, 60)  # the colour of what a mask hides from the loss
TINT = 0.7  # its share there
ROW = 8  # pictures of a gallery
GROUPS = 6  # of duplicates, and buckets
LONGEST = 160  # characters of a caption
BINS = 40
HISTOGRAMS = 12
HELD_OUT = 500  # pictures whose nearest neighbours are searched


class Entry(NamedTuple):
    """A picture to show, and what is said of it."""

    tar: str
    row: int
    text: str
    bucket: Size | None = None  # pixels, to show it as it is trained on; None: whole


class Examples:
    """Galleries to fill: they name entries first, whose pictures are then read once."""

    def __init__(self) -> None:
        self.galleries: dict[str, list[Entry]] = {}
        self.left = PICTURES

    def add(self, title: str, entries: Iterable[Entry]) -> None:
        chosen = [*entries][: self.left]
        if chosen:
            self.galleries[title] = chosen
            self.left -= len(chosen)

    def panels(self, data: DataSet) -> Iterator[Panel]:
        entries = [*chain.from_iterable(self.galleries.values())]
        thumbnails = read_thumbnails(data, entries)
        references = reference_examples(data, {(e.tar, e.row) for e in entries}, _small)
        for title, chosen in self.galleries.items():
            pictures: list[tuple[bytes, str]] = []
            for entry in chosen:
                shown = thumbnails.get((entry.tar, entry.row, entry.bucket))
                if shown is not None:
                    pictures.append((shown, entry.text))
                    own = references.get((entry.tar, entry.row), ())
                    pictures += [(data, f"its reference {n}") for n, data in enumerate(own, 1)]
            if pictures:
                yield Gallery(title, pictures)


def read_thumbnails(
    data: DataSet, entries: Iterable[Entry]
) -> dict[tuple[str, int, Size | None], bytes]:
    """(tar, row, bucket) -> a small WebP. Raises Damaged if a tar that is read to its end is."""
    wanted = defaultdict[str, dict[int, set[Size | None]]](lambda: defaultdict(set))
    for entry in entries:
        wanted[entry.tar][entry.row].add(entry.bucket)
    images = data.artifacts[IMAGES]
    found: dict[tuple[str, int, Size | None], bytes] = {}
    for file in images.files:
        rows = wanted.get(file.sha256, {}) if file.path.endswith(".tar") else {}
        last = max(rows, default=-1)
        for row, sample in enumerate(read_tar(images.url(file.path)) if rows else ()):
            for bucket in rows.get(row, ()):
                if bucket is None:
                    found[file.sha256, row, bucket] = _small(sample.image)
                else:
                    found[file.sha256, row, bucket] = _as_trained_on(data, sample, bucket)
            if row == last:
                break
    return found


def _small(data: bytes) -> bytes:
    with Image.open(BytesIO(data)) as picture:
        picture.draft("RGB", (THUMBNAIL, THUMBNAIL))
        return _webp(picture.convert("RGB"))


def _webp(picture: Image.Image) -> bytes:
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    picture.save(buffer := BytesIO(), "WEBP", quality=70)
    return buffer.getvalue()


def _as_trained_on(data: DataSet, sample: Sample, bucket: Size) -> bytes:
    """The cropped picture; what its mask hides from the loss is red, latent by latent."""
    settings = data.transform
    mask = None if sample.mask is None else Image.open(BytesIO(sample.mask))
    image = decode(sample.image, settings.max_pixels)
    seen = transform(image, sample.source_sha256, sample.meta, settings, [bucket], mask)[0]
    pixels = (seen.pixels.transpose(1, 2, 0) + 1) * 127.5
    if seen.mask is not None:
        scale = data.pixels_per_latent
        latents = area_mean(seen.mask, (bucket[0] // scale, bucket[1] // scale))
        shown = np.kron(latents / 255, np.ones((scale, scale)))[..., None]
        pixels *= shown + (1 - shown) * (1 - TINT)
        pixels += (1 - shown) * TINT * np.array(HIDDEN)
    return _webp(Image.fromarray(pixels.round().astype(np.uint8)))


def counts(recipe: Recipe, data: DataSet) -> dict[str, dict[str, int] | None]:
    """Stage -> reason -> number of pictures, of the stages up to `encode`; None: not built.

    Of a mixture, `STAGE SOURCE` -> those of the source.
    """
    found: dict[str, dict[str, int] | None] = {}
    parts = recipe.by_source
    for name, own in data.by_source.items():
        stages = parts.get(name, recipe).stages
        for stage in stages[: stages.index("encode") + 1]:
            artifact = own.artifacts.get(stage)
            of_stage = None if artifact is None else COUNTS[stage](artifact.summary)
            found[f"{stage} {name}".strip()] = of_stage
    return found


def _of_download(summary: Mapping[str, Any]) -> dict[str, int]:
    dropped = {"dropped by source.where": summary["dropped"]} if "dropped" in summary else {}
    outcomes = Counter(summary["outcomes"])
    downloaded = {"downloaded": outcomes.pop("success", 0)}
    return {**downloaded, **dropped, **dict(outcomes.most_common())}


def _of_encode(summary: Mapping[str, Any]) -> dict[str, int]:
    copies = summary.get("copies_left_out", 0)
    train = summary["samples"] - summary["holdout"] - copies
    held_out = {"trained on": train, "held out": summary["holdout"]}
    left = {"left out, as copies of held-out pictures": copies} if copies else {}
    bad: dict[str, int] = {f"bad: {why}": n for why, n in summary["bad"].items()}
    return {**held_out, **left, **bad}


def _of_describe(summary: Mapping[str, Any]) -> dict[str, int]:
    bad = {
        f"without values of {name}: {why}": count
        for name, reasons in summary["bad"].items()
        for why, count in reasons.items()
    }
    return {"pictures": summary["pictures"], **bad}


def _of_select(summary: Mapping[str, Any]) -> dict[str, int]:
    return {"kept": summary["kept"], **summary["reasons"]}


def _of_caption(summary: Mapping[str, Any]) -> dict[str, int]:
    good = {f"good captions, {prompt}": n for prompt, n in summary["good"].items()}
    bad = {f"bad captions: {why}": n for why, n in summary["bad"].items()}
    return {"captioned": summary["kept"], **good, **bad, "without a good one": summary["without"]}


COUNTS = {
    IMAGES: _of_download,
    "describe": _of_describe,
    "select": _of_select,
    "caption": _of_caption,
    "encode": _of_encode,
}


def missing(recipe: str, stage: str) -> str:
    """The command that builds a stage."""
    return f"kiln run {recipe} --until {stage}"


def write_page(recipe: Recipe, name: str, data: DataSet) -> str:
    """The page as HTML: one file with all pictures in it.

    Args:
        name: the recipe, as commands name it.
    """
    rows = count_rows(counts(recipe, data), name)
    sections: dict[str, list[Panel]] = {"Counts": [Table("Pictures by stage", rows)]}
    for source, own in data.by_source.items():
        for title, panels in _sections([*panels_of(own)]).items():
            sections[f"{source}: {title}" if source else title] = panels
    return render_html("data_page.html.jinja", name=recipe.name, sections=sections)


def count_rows(by_stage: Mapping[str, Mapping[str, int] | None], name: str) -> list[dict[str, Any]]:
    """The counts as rows of a table; a stage that is not built has the command that builds it.

    Args:
        name: the recipe, as commands name it.
    """
    rows: list[dict[str, Any]] = []
    for stage, by_reason in by_stage.items():
        if by_reason is None:
            rows.append(
                {"stage": stage, "pictures": "not built", "what": missing(name, stage.split()[0])}
            )
        for why, number in (by_reason or {}).items():
            rows.append({"stage": stage, "pictures": number, "what": why})
    return rows


def _sections(panels: Sequence[Panel]) -> dict[str, list[Panel]]:
    charts: list[Panel] = [panel for panel in panels if isinstance(panel, Chart)]
    others: list[Panel] = [panel for panel in panels if not isinstance(panel, Chart)]
    named = {"Histograms": charts, "Pictures": others}
    return {title: group for title, group in named.items() if group}


def panels_of(data: DataSet) -> Iterator[Panel]:
    """Histograms with thresholds, and galleries."""
    with data.opened() as db:
        thresholds = data.thresholds
        yield from histograms(db, thresholds)
        tars = [entry.sha256 for entry in data.artifacts[IMAGES].files if _is_tar(entry.path)]
        sample = _sampled(db, tars, SHARDS)
        scores = _columns(thresholds) or numbers(db, _SIZES)[:2]
        examples = Examples()
        for threshold in thresholds:
            _near_threshold(db, data, threshold, scores, examples)
        _dropped(db, data, scores, examples)
        _groups(db, data, scores, examples)
        _rejected(db, examples)
        encoded = [*data.encoded(sample)]
        _across_split(db, data, encoded, examples)
        _by_bucket(db, data, encoded, scores, examples)
    yield from examples.panels(data)
    if len(sample) < len(tars):
        words = {"image shards": len(tars), "with pictures on this page": len(sample)}
        yield Table("Examples are of some image shards", [words])


def selection_panels(selected: Artifact) -> Iterator[Panel]:
    """Histograms of the columns in a selection's condition, and some dropped pictures."""
    data = DataSet.before(selected)
    with duckdb.connect() as db:
        db.register("selection", read_selection(selected))
        db.execute(
            "create view entries as select *, null as caption, null as captions, null as bad "
            "from selection"
        )
        thresholds = data.thresholds
        yield from histograms(db, thresholds)
        tars = [entry.sha256 for entry in data.artifacts[IMAGES].files if _is_tar(entry.path)]
        _sampled(db, tars, FEW_SHARDS)
        examples = Examples()
        _dropped(db, data, _columns(thresholds), examples)
    yield from examples.panels(data)


def _columns(thresholds: Iterable[Threshold]) -> list[str]:
    return [*dict.fromkeys(threshold.column for threshold in thresholds)]


def _sampled(db: duckdb.DuckDBPyConnection, tars: Sequence[str], count: int) -> Sequence[str]:
    """Evenly spaced image shards, whose entries are the table `shown`."""
    sample = tars[:: max(1, -(-len(tars) // count))]
    db.register("sampled", pa.table({"tar": pa.array(sample, pa.string())}))
    db.execute("create temp table shown as from entries where tar in (from sampled)")
    return sample


_SIZES = (*SIZES, "caption_length")


def _is_tar(path: str) -> bool:
    return path.endswith(".tar")


def histograms(db: duckdb.DuckDBPyConnection, thresholds: Sequence[Threshold]) -> Iterator[Panel]:
    """Columns with thresholds first, then the scores, then the sizes."""
    known = numbers(db)
    named = [t.column for t in thresholds if t.column in known]
    order = dict.fromkeys([*named, *(n for n in known if n not in _SIZES), *known])
    for column in [*order][:HISTOGRAMS]:
        own = [(t.operator, t.value) for t in thresholds if t.column == column]
        if (svg := _histogram(db, column, own)) is not None:
            yield Chart(column, svg)


def _histogram(
    db: duckdb.DuckDBPyConnection, column: str, thresholds: Sequence[tuple[str, float]]
) -> str | None:
    value = f"{quoted(column)}::double"
    [(low, high, is_whole)] = db.execute(
        f"select min({value}), max({value}), bool_and({value} = trunc({value})) "
        f"from entries where isfinite({value})"
    ).fetchall()
    if low == high:  # or null
        return None
    width = (high - low) / BINS
    width = max(1.0, math.ceil(width)) if is_whole else width
    bins = min(BINS, math.floor((high - low) / width) + 1)
    number = f"least(floor(({value} - ?) / ?)::int, ?)"
    binned = db.execute(
        f"select {number} as bin, kept, count(*) from entries where isfinite({value}) group by all",
        [low, width, bins - 1],
    ).fetchall()
    bars = {True: [0] * bins, False: [0] * bins}
    for place, kept, count in binned:
        bars[bool(kept)][place] += count
    edges = [low + width * n for n in range(bins + 1)]
    return histogram_chart(column, edges, bars[True], bars[False], thresholds)


def _entries(
    db: duckdb.DuckDBPyConnection,
    data: DataSet,
    where: str,
    order: str,
    scores: Sequence[str],
    limit: int = ROW,
) -> list[Entry]:
    """Some entries of the sample, with their scores, why they were dropped, and their captions."""
    own = ("tar", "row", "reason", "caption", "captions", "bad")
    chosen = ", ".join(map(quoted, (*own, *scores)))
    rows = db.execute(
        f"select {chosen} from shown where {where} order by {order}, tar, row limit {limit}"
    ).fetchall()
    entries = []
    for tar, row, reason, caption, made, bad, *values in rows:
        pairs = zip(scores, values, strict=True)
        said = [f"{name} {human(value)}" for name, value in pairs if value is not None]
        said += [f"dropped: {reason.partition(': ')[0]}"] if reason else []
        read = (caption or "",) if reason else data.captions(caption, made, bad)
        said.append(" / ".join(filter(None, map(shortened, read))) or "no caption")
        entries.append(Entry(tar, row, " · ".join(said)))
    return entries


def shortened(text: str) -> str:
    """A caption on one line, at most LONGEST characters of it."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"


def _near_threshold(
    db: duckdb.DuckDBPyConnection,
    data: DataSet,
    threshold: Threshold,
    scores: Sequence[str],
    examples: Examples,
) -> None:
    column, operator, value = threshold
    name = quoted(column)
    order = f"abs({name}::double - {value!r})"
    words = f"{column} {operator} {human(value)}"
    meets = f"{name}::double {operator} {value!r}"
    examples.add(f"Just inside {words}", _entries(db, data, meets, order, scores))
    examples.add(f"Just outside {words}", _entries(db, data, f"not {meets}", order, scores))


def _dropped(
    db: duckdb.DuckDBPyConnection, data: DataSet, scores: Sequence[str], examples: Examples
) -> None:
    reasons = db.execute(
        "select reason from shown where not kept group by reason order by count(*) desc, reason"
    ).fetchall()
    for (reason,) in reasons[:GROUPS]:
        where = f"not kept and reason = {literal(reason)}"
        examples.add(f"Dropped: {reason}", _entries(db, data, where, "id", scores))


def _groups(
    db: duckdb.DuckDBPyConnection, data: DataSet, scores: Sequence[str], examples: Examples
) -> None:
    """The largest groups of duplicates; the one that is kept comes first."""
    groups = db.execute(
        'select "group" from shown where "group" is not null group by "group" '
        'having count(*) > 1 order by count(*) desc, "group"'
    ).fetchall()
    for (number,) in groups[:GROUPS]:
        entries = _entries(db, data, f'"group" = {number}', "kept desc", scores)
        examples.add(f"Duplicates, group {number}", entries)


def _rejected(db: duckdb.DuckDBPyConnection, examples: Examples) -> None:
    """Pictures with a rejected caption, and why."""
    rows = db.execute(
        "select tar, row, captions, bad from shown where bad is not null and bad <> '{}' "
        f"order by id, tar, row limit {2 * ROW}"
    ).fetchall()
    entries = []
    for tar, row, captions, bad in rows:
        texts = json.loads(captions)
        said = (f"{p}: {why}: {shortened(texts.get(p, ''))}" for p, why in json.loads(bad).items())
        entries.append(Entry(tar, row, " · ".join(said)))
    examples.add("Rejected captions", entries)


def _by_bucket(
    db: duckdb.DuckDBPyConnection,
    data: DataSet,
    encoded: Sequence[Encoded],
    scores: Sequence[str],
    examples: Examples,
) -> None:
    """Pictures that are trained on, by the bucket of their latents."""
    buckets = defaultdict[str, list[bytes]](list)
    for picture in encoded:
        if picture.split == "train" and picture.left_out is None:
            height, width = (int(side) for side in picture.group.partition("/")[2].split("x"))
            scale = data.pixels_per_latent
            buckets[f"{height * scale} x {width * scale}"].append(picture.id)
    if not buckets:
        examples.add("Some of the kept pictures", _entries(db, data, "kept", "id", scores, 4 * ROW))
    largest = sorted(buckets, key=lambda bucket: -len(buckets[bucket]))
    has_masks = bool(encoded) and "masked" in data.artifacts["encode"].summary
    for bucket in largest[:GROUPS]:
        ids = pa.table({"id": pa.array(sorted(buckets[bucket])[: 4 * ROW], pa.binary())})
        db.register("of_bucket", ids)
        entries = _entries(db, data, "kept and id in (from of_bucket)", "id", scores, 2 * ROW)
        title = f"Trained on, bucket {bucket} (height x width)"
        if has_masks:
            height, width = map(int, bucket.split(" x "))
            entries = [entry._replace(bucket=(height, width)) for entry in entries]
            title += "; masks hide what is red from the loss"
        examples.add(title, entries)


def _across_split(
    db: duckdb.DuckDBPyConnection, data: DataSet, encoded: Sequence[Encoded], examples: Examples
) -> None:
    """The training pictures that are nearest to held-out ones, by their thumbnails."""
    latents = data.artifacts.get("encode")
    tables = [] if latents is None else [f for f in latents.files if f.path.endswith(SUFFIX)]
    of = {picture.id: picture for picture in encoded}
    thumbnails = [np.load(BytesIO(latents.read(f.path))) for f in tables[:SHARDS] if latents]
    rows = np.concatenate([np.zeros(0, THUMBNAIL_ROW), *thumbnails])
    rows = rows[[i in of for i in rows["id"].tolist()]]
    is_held_out = np.array([of[i].split == "holdout" for i in rows["id"].tolist()], bool)
    held_out = rows[is_held_out][:HELD_OUT]
    training = rows[~is_held_out]
    if not len(held_out) or not len(training):
        return
    kept, negated = mirror_parts(training["grey"])
    pairs = []
    for number, (same, mirrored) in enumerate(zip(*mirror_parts(held_out["grey"]), strict=True)):
        correlations = kept @ same + np.abs(negated @ mirrored)
        nearest = int(correlations.argmax())
        pairs.append((float(correlations[nearest]), number, nearest))
    shown = []
    for correlation, number, nearest in sorted(pairs, reverse=True)[:ROW]:
        near = training["id"][nearest].item()
        what = "trained on" if of[near].left_out is None else "left out"
        shown += [(held_out["id"][number].item(), "held out")]
        shown += [(near, f"{what}; correlation of thumbnails {correlation:.3f}")]
    db.register("neighbours", pa.table({"id": pa.array([i for i, _ in shown], pa.binary())}))
    places = {
        picture: (tar, row)
        for picture, tar, row in db.execute(
            "select id, tar, row from shown where id in (from neighbours) order by kept, tar, row"
        ).fetchall()
    }
    entries = [Entry(*places[picture], text) for picture, text in shown if picture in places]
    examples.add("Held-out pictures, each before the nearest training picture", entries)
