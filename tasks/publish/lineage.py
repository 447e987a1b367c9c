"""The lineage of a published model: its artifacts and their inputs, as nodes of a graph."""

from __future__ import annotations

from artifacts.store import Artifact
from tasks.panels_charts import Node

#: Input -> its title, where an input is no artifact of the store.
TITLES = {"source": "source", "encoders": "encoders", "base": "base model", "clip": "judge: CLIP"}

CHAMPION_EVALUATION = "champion_evaluation"  # a parent's name


def lineage_nodes(artifact: Artifact) -> dict[str, Node]:
    """Id -> node of an artifact and everything it was made from, as far as the store has it."""
    nodes: dict[str, Node] = {}
    _add(artifact, nodes)
    return nodes


def _add(artifact: Artifact, nodes: dict[str, Node]) -> str:
    if artifact.key in nodes:
        return artifact.key
    parents, inputs = artifact.manifest["run"].get("parents", {}), []
    for name, digest in sorted(artifact.manifest["inputs"].items()):
        parent = parents.get(name)
        found = artifact.store.load(parent["stage"], parent["key"]) if parent else None
        if found is not None:
            inputs.append(_add(found, nodes))
        elif parent is not None or name in TITLES:
            # One box per input and digest: training and evaluation may read other parts of a base.
            leaf = f"{name} {digest}"
            nodes.setdefault(leaf, Node(TITLES.get(name, name), digest[:12]))
            inputs.append(leaf)
    if (champion := remeasured_champion(artifact)) is not None:
        inputs.append(_add(champion, nodes))
    nodes[artifact.key] = Node(artifact.stage, artifact.digest[:12], tuple(dict.fromkeys(inputs)))
    return artifact.key


def remeasured_champion(artifact: Artifact) -> Artifact | None:
    """The evaluation of the champion that a published model was compared with.

    It is no input, since only the build finds whether the champion must be measured again.
    """
    parent = artifact.manifest["run"].get("parents", {}).get(CHAMPION_EVALUATION)
    return artifact.store.load(parent["stage"], parent["key"]) if parent else None
