"""A mixture of sources: at each stage of the data, an artifact that names those of the sources.

It has metadata alone. The one of the pictures lists the image shards of the sources to learn; the
one of the latents has what the encoded sources share.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from artifacts.latent_shards import INFO, MIXTURE
from artifacts.store import Artifact, Draft, Store
from configs.errors import Failed
from configs.settings.recipe import StageName
from tasks.build_or_reuse import Stage, recent_artifacts
from tasks.panels import Panel
from tasks.pictures import sources_of
from tasks.progress import Report

log = logging.getLogger("kiln")


@dataclass(frozen=True)
class MixtureStage(Stage):
    """The artifacts of one stage, of some sources of a mixture."""

    name: StageName  # type: ignore[misc]
    sources: Mapping[str, Artifact]

    version = 1

    @property
    def settings(self) -> dict[str, Any]:
        """None: shares and weights are settings of the training."""
        return {}

    @property
    def inputs(self) -> dict[str, str]:
        """The artifact of each source."""
        return {name: artifact.digest for name, artifact in self.sources.items()}

    @property
    def parents(self) -> dict[str, Artifact]:
        """The artifact of each source."""
        return dict(self.sources)

    def build(self, draft: Draft, progress: Report) -> dict[str, Any]:
        """Name the artifacts. Raises Failed if encoded sources do not fit one model."""
        keys = {name: artifact.key for name, artifact in sorted(self.sources.items())}
        draft.write(MIXTURE, json.dumps(keys, indent=1).encode())
        if self.name == "download":
            for artifact in self.sources.values():
                shards = (file for file in artifact.files if file.path.startswith("../"))
                draft.files |= {file.path: file for file in shards}
        if self.name == "encode":
            draft.write(INFO, json.dumps(self._info(), indent=1, sort_keys=True).encode())
            self._tell_changes(draft.store)
        summaries = {name: artifact.summary for name, artifact in self.sources.items()}
        totals = Counter[str]()
        for summary in summaries.values():  # `masked` is of sources with masks alone
            totals.update({n: count for n, count in summary.items() if isinstance(count, int)})
        return {**totals, "sources": summaries}

    def _info(self) -> dict[str, Any]:
        """What all latents.json have; captions are padded to the longest."""
        infos = {name: json.loads(latents.read(INFO)) for name, latents in self.sources.items()}
        tokens = max(info.pop("tokens") for info in infos.values())
        first, *others = infos
        for name in others:
            if odd := [
                fact for fact in infos[first] if infos[name].get(fact) != infos[first][fact]
            ]:
                raise Failed(f"encode: {', '.join(odd)} of sources {first} and {name} differ")
        return {**infos[first], "tokens": tokens}

    def _tell_changes(self, store: Store) -> None:
        """Say which sources are new, or have grown since the newest mixture of some of them."""
        before: dict[str, Any] = next(
            (
                recent.summary["sources"]
                for recent in recent_artifacts(store, self.name)
                if recent is not None and self.sources.keys() & recent.summary.get("sources", {})
            ),
            {},
        )
        for name, latents in self.sources.items():
            count = latents.summary["samples"]
            known = before.get(name, {}).get("samples", 0)
            if before and count != known:
                words = "encode: source %s has %s pictures, %s before"
                log.info(words, name, f"{count:,}", f"{known:,}")


def show_each(show: Callable[..., list[Panel]], artifact: Artifact, **known: Any) -> list[Panel]:
    """The panels of a stage's artifact, or of each source of a mixture under its name.

    Args:
        known: keyword arguments of `show`, such as the champion's evaluation.
    """
    return [
        replace(panel, title=f"{name}: {panel.title}") if name else panel
        for name, part in sources_of(artifact).items()
        for panel in show(part, **known)
    ]
