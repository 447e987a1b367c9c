"""Settings of the section `sources`: a mixture of named sources, and the share of each.

A source of a mixture has sections of its own over those of the recipe. Shares are exact fractions
of the numbers of training samples, which only the encoded sources have.
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Literal

from pydantic import PositiveFloat

from configs.settings import base_section
from configs.settings.base_section import Section, setting

#: Pattern of a source's name: it is in names of metrics, beside those of noise levels.
NAME = "(?!level[1-8]$)[a-z][a-z0-9_-]*"
#: Settings of `encode` in which the sources of a mixture may differ.
ENCODE_SETTINGS = {
    *("resolution", "aspect_buckets", "bucket_step", "max_aspect", "crop", "flip", "seed"),
    *("holdout", "leave_out_copies", "batch_size", "max_bad", "captions", "reference_pixels"),
}
#: Sections of a source, over those of the recipe.
SECTIONS = ("source", "download", "describe", "select", "caption", "encode")
OwnSection = dict[str, Any]


class MixtureSource(Section):
    """A source of a mixture: its pictures, what differs from the recipe's sections, its share."""

    source: OwnSection = setting({}, not_in_key="content")
    """Its pictures, with the settings of section `source`."""
    like: str | None = setting(None, not_in_key="content")
    """Another source, whose sections it has; its own are over them. null: `source` is set."""
    download: OwnSection = setting({})
    """Settings over those of section `download`."""
    describe: OwnSection | None = setting({})
    """Settings over those of section `describe`; null: none of its pictures are described."""
    select: OwnSection | None = setting({})
    """Settings over those of section `select`; null: all of its pictures are chosen."""
    caption: OwnSection | None = setting({})
    """Settings over those of section `caption`; null: the source's captions."""
    encode: OwnSection = setting({})
    """Settings over those of section `encode`: resolution, buckets, crop, flip, seed, holdout,
    leave_out_copies, batch_size, max_bad, captions, reference_pixels."""
    weight: PositiveFloat | None = None
    """Share of the samples. If each source has a weight, shares are the weights over their sum;
    otherwise the sum is below 1, and the other sources share the rest. null: by repeats."""
    repeats: PositiveFloat | None = setting(
        None, aka="num_repeats repeats dataset_repeats (KS): times per epoch"
    )
    """Times per epoch that each picture is seen; null: once or, with `regularisation: images`, so
    often that an epoch has as many of these samples as of the sources without regularisation."""
    loss_weight: PositiveFloat = setting(1.0, aka="prior_loss_weight (DK)")
    """Factor of the loss of its samples."""
    caption_dropout_rate: base_section.Fraction | None = None
    """Probability that a sample trains without caption; null: train.caption_dropout_rate."""
    regularisation: Literal["images", "prior"] | None = setting(
        None, aka="class_data_dir with_prior_preservation reg_data_dir is_reg (DK): images"
    )
    """What keeps the base's knowledge. images: pictures of what the base knows; prior: the target
    is the prediction of the frozen base; null: the source is learnt."""

    def faults(self) -> Iterator[str]:
        if not self.source and self.like is None:
            yield "source is missing: set source, or like to the name of another source"
        if self.weight is not None and self.repeats is not None:
            yield "weight and repeats: set one, the share of the samples or the times per epoch"


def own_sections(sources: Mapping[str, MixtureSource], name: str) -> dict[str, Any]:
    """Section -> the settings of a source over the recipe's, with those of the source it is like.

    Raises KeyError if that is unknown.
    """
    source = sources[name]
    own = {section: value for section in SECTIONS if (value := getattr(source, section)) != {}}
    return own if source.like is None else merged(own_sections(sources, source.like), own)


def merged(base: Any, own: Any) -> Any:
    """`base` with the values of `own`, section by section; one of another kind is replaced."""
    if not isinstance(base, dict) or not isinstance(own, dict):
        return own
    if own.get("kind", base.get("kind")) != base.get("kind"):
        return own
    return {**base, **{name: merged(base.get(name), value) for name, value in own.items()}}


def faults_between(sources: Mapping[str, MixtureSource]) -> Iterator[str]:
    """What is wrong with sources that are valid one by one."""
    for name, source in sources.items():
        seen = [name]
        while source.like is not None:
            if source.like not in sources:
                known = ", ".join(other for other in sources if other != name)
                where = f"sources.{seen[-1]}.like"
                yield f"{where}: there is no source {source.like}: name one of {known}"
                return
            if source.like in seen:
                yield f"sources.{name}.like: {' is like '.join((*seen, source.like))}: set source"
                return
            seen.append(source.like)
            source = sources[source.like]
        own = own_sections(sources, name).get("encode", {})
        for shared in sorted(own.keys() - ENCODE_SETTINGS):
            where = f"sources.{name}.encode.{shared}"
            yield f"{where}: all sources of a mixture have the same: set encode.{shared}"
        if "emphasis" in (own.get("captions") or {}):  # prompts have no source
            where = f"sources.{name}.encode.captions.emphasis"
            yield f"{where}: all sources have the same: set encode.captions.emphasis"
    weights = [source.weight for source in sources.values() if source.weight is not None]
    if len(weights) < len(sources) and sum(weights) >= 1:
        yield (
            f"sources: the weights sum to {sum(weights):g}, and leave nothing to the sources "
            "without weight: lower them to below 1, or set all"
        )
    if all(source.regularisation for source in sources.values()):
        yield "sources: all have regularisation: leave it out of the sources to learn"


def samples_per_epoch(
    mixture: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int]
) -> dict[str, Fraction]:
    """Source -> its samples in an epoch, exactly.

    Args:
        mixture: name -> weight, repeats and regularisation, as Recipe.mixture.
        counts: name -> training samples of the source.
    """
    weights = {
        name: Fraction(str(source["weight"]))
        for name, source in mixture.items()
        if source["weight"] is not None
    }
    if len(weights) == len(mixture):
        total = Fraction(sum(counts[name] for name in mixture))
        return {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    repeated = {
        name: counts[name] * Fraction(str(source["repeats"] or 1))
        for name, source in mixture.items()
        if name not in weights
    }
    learnt = sum(n for name, n in repeated.items() if mixture[name]["regularisation"] is None)
    filling = [
        name
        for name in repeated
        if mixture[name]["regularisation"] == "images" and mixture[name]["repeats"] is None
    ]
    pictures = sum(counts[name] for name in filling)
    if learnt and pictures:  # kohya's rule: as many as of the sources to learn
        repeated |= {name: learnt * Fraction(counts[name], pictures) for name in filling}
    total = sum(repeated.values(), Fraction()) / (1 - sum(weights.values()))
    return {name: total * weights[name] if name in weights else repeated[name] for name in mixture}
