"""The champion that a retraining starts from, and the artifacts that it was made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from artifacts.store import Artifact, Store
from configs.errors import Failed, Refused
from configs.settings.recipe import Recipe
from tasks.encode.crop_to_bucket import settings_for_key
from tasks.pictures import Pictures, images_of, sources_of
from tasks.publish.promotion_gate import needs_champion
from tasks.publish.registry import Registry
from tasks.publish.stage import registry_of


@dataclass(frozen=True)
class Champion:
    """A champion's version and the keys of its artifacts.

    It holds no manifest, since Prefect traverses all values that tasks receive.
    """

    version: str  # v1, v2, ...
    uri: str
    digest: str  # of the published folder
    images: str  # key of all image shards of its source
    latents: str  # key of their latent shards
    trained: str
    compared_images: str  # key of the images with the held-out pictures of its evaluation
    compared_latents: str
    #: Source of a mixture -> keys of its images and latents.
    sources: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def of_source(self, name: str) -> Champion | None:
        """The champion with the data of one source alone; None if it was not trained on it."""
        if name not in self.sources:
            return None
        images, latents = self.sources[name]
        own = {"images": images, "latents": latents}
        compared = {"compared_images": images, "compared_latents": latents}
        return replace(self, **own, **compared, sources={})

    @property
    def by_source(self) -> list[Champion]:
        """The champion with each source's data; without a mixture, itself."""
        parts = (self.of_source(name) for name in self.sources)
        return [part for part in parts if part is not None] or [self]

    def load(self, store: Store, stage: str, key: str) -> Artifact:
        """One of its artifacts. Raises Refused if the store lacks it."""
        return _load(store, stage, key, self.version)

    def compared_pictures(self, store: Store) -> Pictures:
        """The pictures of its evaluation. Raises Refused if the store lacks them."""
        latents = self.load(store, "encode", self.compared_latents)
        return Pictures.of(latents, self.load(store, "download", self.compared_images))

    def comparison_set(
        self, recipe: Recipe, store: Store, encoded: Artifact
    ) -> tuple[Artifact, Artifact] | None:
        """Images and latents of its evaluation; None if the recipe encodes pictures otherwise.

        A new model is measured on them, so that rows added since do not change the comparison.
        Of a mixture, the champion is measured again on the new model's pictures.

        Args:
            encoded: latents of the new model's run.
        """
        images = self.load(store, "download", self.compared_images)
        latents = self.load(store, "encode", self.compared_latents)
        encoders = [a.manifest["inputs"].get("encoders") for a in (latents, encoded)]
        # What training leaves out does not change the held-out pictures.
        alike = latents.manifest["settings"] | {"leave_out_copies": recipe.encode.leave_out_copies}
        if alike != settings_for_key(recipe) or encoders[0] != encoders[1]:
            return None
        return images, latents


def find_champion(registry: Registry, store: Store) -> Champion | None:
    """The champion of a model, by its registry; None if there is none.

    Raises:
        Refused: the store lacks an artifact that it was made of.
    """
    version = registry.champion()
    if version is None:
        return None

    def parent(artifact: Artifact, name: str) -> Artifact:
        at = artifact.manifest["run"]["parents"][name]
        return _load(store, at["stage"], at["key"], version.name)

    parents = version.manifest["run"]["parents"]
    trained = _load(store, "train", parents["model"]["key"], version.name)
    evaluation = _load(store, "evaluate", parents["evaluation"]["key"], version.name)
    latents = parent(trained, "latents")
    is_mixture = "sources" in latents.summary
    if (
        not is_mixture and "latents" in latents.manifest["run"]["parents"]
    ):  # a selection of tasks.retrain.selection
        latents = parent(latents, "latents")
    compared = evaluation.manifest["run"]["parents"]
    parts = sources_of(latents) if is_mixture else {}
    sources = {name: (images_of(part).key, part.key) for name, part in parts.items()}
    return Champion(
        version=version.name,
        uri=version.uri,
        digest=version.manifest["digest"],
        images=compared["images"]["key"] if is_mixture else parent(latents, "images").key,
        latents=latents.key,
        trained=trained.key,
        compared_images=compared["images"]["key"],
        compared_latents=compared["latents"]["key"],
        sources=sources,
    )


def check_held_out(
    recipe: Recipe, store: Store, champion: Champion, *, continues: bool = False
) -> None:
    """Raise Refused if the recipe holds out pictures that the champion was trained on.

    On them, its weights look better than they are, and so do weights that continue from them.

    Args:
        continues: whether training starts from its weights; else only a rule of the gate counts.
    """
    if not continues and not needs_champion(recipe.publish.gate):
        return
    held_out = _held_out(store, champion)
    if recipe.encode.holdout > held_out:  # a lower share is a part of a higher share
        base = "set retrain.start: base and " if continues else ""
        raise Refused(
            f"encode.holdout: {recipe.encode.holdout:g} holds out pictures that the champion was "
            f"trained on: set {held_out:g}, as it had, or {base}remove the rules on the champion "
            "from publish.gate"
        )


def check_rivals_held_out(recipe: Recipe, store: Store, latents: Artifact) -> None:
    """Raise Refused as check_held_out does, for a model that is trained without a retraining.

    No picture is known to be held out here if the champion has another store or other pictures.

    Args:
        latents: those of the model.
    """
    if not needs_champion(recipe.publish.gate):
        return
    pairs = []
    try:
        champion = find_champion(registry_of(recipe), store)
        for rival in [] if champion is None else champion.by_source:
            for name, encoded in sources_of(latents).items():
                own = recipe.by_source[name]
                if own.encode.holdout <= _held_out(store, rival):
                    continue
                before = rival.load(store, "download", rival.images)
                if _pictures(before) & _pictures(images_of(encoded)):
                    pairs.append((own, rival))
    except Refused:  # it was published from another store
        return
    for own, rival in pairs:
        check_held_out(own, store, rival)


def _held_out(store: Store, champion: Champion) -> float:
    """The share of pictures that the champion was not trained on."""
    latents = champion.load(store, "encode", champion.latents)
    return float(latents.manifest["settings"]["holdout"])


def _pictures(images: Artifact) -> set[str]:
    """Hashes of the downloaded pictures, whatever their stored size; a sample by hash if many."""
    tars = [entry.path for entry in images.files if entry.path.endswith(".tar")]
    keys = [path.rpartition("/")[2].partition(".")[0] for path in tars]
    shards = images.store.committed_shards(images.stage, keys)
    return {value for shard in shards if shard is not None for value in shard.meta["hashes"]}


def check_start_is_champion(registry: Registry, start: str, model: str) -> None:
    """Raise Failed if another version is the champion now, for example after a rollback.

    Args:
        start: the version that a retraining started from.
        model: digest of the weights in publication. They may be the champion already, by an attempt
            that failed after its promotion.
    """
    now = registry.champion()
    if now is not None and (now.name == start or now.manifest["inputs"].get("model") == model):
        return
    name = "none" if now is None else now.name
    raise Failed(f"retrain: the champion was {start} at the start and is {name} now: run again")


def _load(store: Store, stage: str, key: str, version: str) -> Artifact:
    artifact = store.load(stage, key)
    if artifact is None:
        raise Refused(
            f"{store.url} has no artifact {stage} {key[:12]} of the champion {version}: "
            "publish a model from this store first (`kiln run`)"
        )
    return artifact
