"""Recipes and images of the encode stage, and what it built."""

from pathlib import Path

from picture_bytes import noise_picture
from shortest_recipe import shortest_recipe

from artifacts.image_shards import Sample, write_tar
from artifacts.records import digest_bytes
from artifacts.store import Artifact, KeyParts, Store
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.folder import Base
from tasks.encode.stage import EncodeStage

Pictures = dict[str, tuple[bytes, tuple[str, ...]]]  # sample key -> (picture, captions)


def encode_recipe(store: Path | str, model: Path, **settings: object) -> Recipe:
    encode = {"resolution": 32, "holdout": 0.25, "batch_size": 4, "device": "cpu", **settings}
    return shortest_recipe(store=str(store), model={"path": str(model)}, encode=encode)


def picture_of(seed: int, width: int = 40, height: int = 32) -> bytes:
    return noise_picture(seed, width, height, compress_level=0)


def pictures_of(shards: int = 3, each: int = 7) -> list[Pictures]:
    return [
        {f"{s:02}{i:03}": (picture_of(100 * s + i), (f"picture {i % 3}",)) for i in range(each)}
        for s in range(shards)
    ]


def samples_of(pictures: Pictures) -> list[Sample]:
    return [
        Sample(key, data, "png", texts, {"sha256": digest_bytes(data)})
        for key, (data, texts) in sorted(pictures.items())
    ]


def images_of(store: Store, shards: list[Pictures], tmp_path: Path) -> Artifact:
    draft = store.draft(
        KeyParts("download", 1, {}, {"pictures": digest_bytes(repr(shards).encode())})
    )
    for pictures in shards:
        path = tmp_path / "shard.tar"
        samples = samples_of(pictures)
        write_tar(path, samples)
        local = {".tar": str(path)}
        key = digest_bytes(path.read_bytes())
        draft.add_shard(store.commit_shard("download", key, local, {"samples": len(samples)}))
    return draft.commit({}, {})


def encode_images(
    recipe: Recipe, images: Artifact, vae: Path | None = None, seen: list | None = None
) -> Artifact:
    model = Path(recipe.model.path)
    store = Store(recipe.store)
    stage = EncodeStage(recipe, images, Base.open(model, vae))
    draft = store.draft(stage.parts)

    def progress(done: int, total: int, text: str = "") -> None:
        if seen is not None:
            seen.append((done, total))

    return draft.commit(stage.build(draft, progress), {})


def digests_of(artifact: Artifact) -> dict[str, str]:
    return {e.path: e.sha256 for e in artifact.files if e.path.endswith(".safetensors")}
