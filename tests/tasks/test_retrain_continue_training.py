"""Training continues from the champion's weights, and from nothing else of it."""

from dataclasses import replace
from pathlib import Path

import pytest
from toy_recipes import base_of

from artifacts.models import digest_model
from artifacts.store import Artifact, KeyParts, Store
from configs.errors import Refused
from configs.load_recipe import load_recipe
from configs.settings.recipe import Recipe
from runtimes.pipeline_folder.folder import Base
from tasks import train
from tasks.retrain.decision import check_start, starting_model


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe("digits", {"store": str(tmp_path / "store")})


def trained(recipe: Recipe, parts: KeyParts, weights: bytes = b"weights") -> Artifact:
    store = Store(recipe.store)
    with store.lock(parts.stage, parts.key) as lock:
        draft = store.draft(parts, lock)
        draft.write("unet/config.json", b"{}")
        draft.write("unet/diffusion_pytorch_model.safetensors", weights)
        draft.write("scheduler/scheduler_config.json", b"{}")
        return draft.commit({}, {})


def parts_of(recipe: Recipe) -> KeyParts:
    inputs = {"latents": "l", "base": train.digest_base(recipe.train, base_of(recipe))}
    return KeyParts(train.STAGE, train.VERSION, train.settings_for_key(recipe), inputs)


def test_the_start_is_the_base_with_the_trained_parts_but_its_own_scheduler(recipe: Recipe) -> None:
    base, start = base_of(recipe), trained(recipe, parts_of(recipe))
    with starting_model(base, start) as model:
        weights = model.denoiser_folder / "diffusion_pytorch_model.safetensors"
        assert weights.read_bytes() == b"weights"
        for name in ("scheduler/scheduler_config.json", "vae/config.json", "model_index.json"):
            assert (model.folder / name).read_bytes() == (base.folder / name).read_bytes()
        digest = digest_model(model.folder)
    other = trained(recipe, replace(parts_of(recipe), inputs={}), b"others")
    with starting_model(base, other) as model:
        assert digest_model(model.folder) not in (digest, digest_model(base.folder))


def test_the_start_is_an_input_of_the_training(recipe: Recipe) -> None:
    latents = trained(recipe, KeyParts("encode", 1, {}, {}))
    starts = [trained(recipe, replace(parts_of(recipe), inputs={"n": n}), n.encode()) for n in "ab"]
    base = base_of(recipe)
    about = (recipe, latents, base, base.folder)
    keys = [train.TrainStage(*about, start).parts for start in (None, *starts)]
    assert [key.inputs.get("start") for key in keys] == [None, *(one.digest for one in starts)]
    assert len({key.inputs["base"] for key in keys}) == 1


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"train.prediction_type": "epsilon"}, "train.prediction_type"),
        ({"train.train_text_encoder": True}, "train.train_text_encoder, model"),
        ({"train.method": "lora", "train.lora.rank": 4}, "train.method, train.lora"),
        ({"train.method": "lora"}, r"\(train.method\)"),
    ],
)
def test_a_start_of_another_kind_is_refused(
    recipe: Recipe, settings: dict[str, object], named: str
) -> None:
    base, start = base_of(recipe), trained(recipe, parts_of(recipe))
    check_start(recipe, base, start)
    others = load_recipe("digits", {"train.steps": 5, "train.init": "random"})
    check_start(others, base, start)
    with pytest.raises(Refused, match=f"{named}.*set retrain.start: base"):
        check_start(load_recipe("digits", settings), base, start)


@pytest.mark.parametrize(
    "train", [{"prediction_type": "v_prediction"}, {"zero_terminal_snr": True}]
)
def test_settings_of_the_base_written_out_are_no_other_kind(
    recipe: Recipe, train: dict[str, object]
) -> None:
    base = base_of(recipe)
    written = load_recipe("digits", {"train": train, "store": recipe.store})
    check_start(written, base, trained(recipe, parts_of(recipe)))
    check_start(recipe, base, trained(written, parts_of(written)))


def test_adapters_of_another_rank_are_refused() -> None:
    lora = {"train.method": "lora", "train.lora.rank": 4}
    given = load_recipe("digits", {**lora, "store": "memory://start-of-adapters"})
    base = base_of(given)
    check_start(given, base, start := trained(given, parts_of(given)))
    with pytest.raises(Refused, match=r"\(train\.lora\): set retrain.start: base"):
        check_start(load_recipe("digits", {**lora, "train.lora.rank": 8}), base, start)


def test_a_start_of_another_base_is_refused(recipe: Recipe, tiny_sdxl: Path) -> None:
    start = trained(recipe, parts_of(recipe))
    with pytest.raises(Refused, match=r"model.*set retrain.start: base"):
        check_start(recipe, Base.open(tiny_sdxl), start)
