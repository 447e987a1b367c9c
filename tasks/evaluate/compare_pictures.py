"""Pictures of the same prompts and noise by each model of an evaluation, as a panel."""

from __future__ import annotations

from PIL import Image

from artifacts.store import Artifact, Store
from tasks.evaluate import before_after_grid, draw_pictures
from tasks.panels import Comparison
from tasks.picture_grid import to_png
from tasks.result_files import GRID

SHOWN = 20  # maximum number of prompts


def compare_pictures(artifact: Artifact, champion: Artifact | None) -> Comparison:
    """The first picture of each prompt, by each model.

    Args:
        champion: a comparable evaluation of the champion.
    """
    prompts, chosen = list[str](), list[int]()
    sets = artifact.manifest["settings"]["prompts"].values()
    for given in sets:
        share = max(1, SHOWN // len(sets))
        chosen += [len(prompts) + n for n in before_after_grid.choose(given, share)]
        prompts += given
    drawn = artifact.summary["drawn"]  # model -> key of its shard
    if champion is not None:
        own = {"champion": champion.summary["drawn"]["tuned"]}
        drawn = {"base": drawn["base"], **own, "tuned": drawn["tuned"]}
    found = [_pictures(artifact.store, key, set(chosen)) for key in drawn.values()]
    rows = [(prompts[n], [pictures[n] for pictures in found]) for n in chosen]
    return Comparison("Before and after", tuple(drawn), rows, artifact.read(GRID))


def _pictures(store: Store, key: str, numbers: set[int]) -> dict[int, bytes]:
    """Number -> PNG of some pictures of a shard."""
    shard = store.shard(draw_pictures.STAGE, key)
    if shard is None:
        raise FileNotFoundError(f"the pictures {key[:12]} are missing")
    chosen = draw_pictures.read_chosen(store, shard, numbers)
    return {number: to_png(Image.fromarray(picture)) for number, picture in chosen.items()}
