"""What text encoders do not read: captions and prompts that are longer than their limits."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from runtimes.pipeline_folder.folder import Base

#: Text encoder -> {"tokens": its limit, "cut": captions above it}.
Cuts = dict[str, dict[str, int]]
SHOWN = 60  # characters of a prompt in the log
log = logging.getLogger("kiln")


def cuts_of(cut: Mapping[str, int], limits: Mapping[str, int]) -> Cuts:
    """The captions cut by each text encoder, beside its limit."""
    return {name: {"tokens": limits[name], "cut": count} for name, count in cut.items()}


def tell_cuts(stage: str, cuts: Cuts, total: int, what: str) -> None:
    """Log a line for each limit that captions exceed: a warning, or where one reads on, a note."""
    readers: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for name, facts in cuts.items():
        readers[facts["tokens"], facts["cut"]].append(name)
    furthest = max((facts["tokens"] for facts in cuts.values()), default=0)
    for (tokens, cut), names in readers.items():
        if cut:
            log.log(
                logging.WARNING if tokens == furthest else logging.INFO,
                "%s: %d of %d %s are cut at %d tokens, the limit of %s: shorten them, or have what "
                "matters come first",
                *(stage, cut, total, what, tokens, " and ".join(names)),
            )


def tell_cut_prompts(stage: str, base: Base, prompts: Iterable[str]) -> Cuts:
    """Count and log the distinct prompts that a pipeline cuts, and those that are then the same."""
    from runtimes.torch_models.tokenize import text_tokenizers  # seconds to import

    distinct = list(dict.fromkeys(prompts))
    tokenizers = text_tokenizers(base)
    limits = {tokenizer.encoder.component: tokenizer.length for tokenizer in tokenizers}
    counts = {t.encoder.component: np.array(t.counts(distinct)) for t in tokenizers}
    is_cut = {name: lengths > limits[name] for name, lengths in counts.items()}
    cuts = cuts_of({name: int(cut.sum()) for name, cut in is_cut.items()}, limits)
    tell_cuts(stage, cuts, len(distinct), "prompts")
    ids = np.concatenate([tokenizer.ids(distinct)[0] for tokenizer in tokenizers], axis=1)
    same: defaultdict[bytes, list[str]] = defaultdict(list)
    for number in np.flatnonzero(np.all([*is_cut.values()], axis=0)):
        same[ids[number].tobytes()].append(distinct[number])
    for alike in same.values():
        if len(alike) > 1:
            log.warning(
                "%s: %d prompts differ only behind the limit of %d tokens, so the model draws them "
                "alike: %.*s…",
                *(stage, len(alike), max(limits.values()), SHOWN, alike[0]),
            )
    return cuts


def cut_facts(cuts: Cuts) -> dict[str, Any]:
    """For people: the captions cut, by limit and text encoder."""
    return {f"cut at {facts['tokens']} by {name}": facts["cut"] for name, facts in cuts.items()}
