"""What a work pool cannot reach is refused, and a sent recipe is the sender's."""

from pathlib import Path
from typing import Any

import pytest

from configs.errors import Refused
from configs.load_recipe import RECIPES, load_recipe
from configs.secrets import hide_secrets
from configs.settings.recipe import PLACED_STAGES, STAGES
from tasks.beam.workers import _secret, check_places, received_recipe, settings_to_send

ON_GPU = {"place.train": "gpu", "store": "s3://bucket/store"}
SHARED = {**ON_GPU, "shared_folders": ["/mnt/shared"]}
PROMPTS = "/data/prompts.txt"
URLS = {"kind": "urls", "path": "s3://bucket/list.parquet", "format": "parquet"}
DATASET = {"kind": "dataset", "path": "somebody/pictures"}


@pytest.mark.parametrize(
    ("overrides", "setting", "why"),
    [
        ({"store": "store"}, "store", "a path relative to this folder"),
        ({"store": "/data/store"}, "store", "a folder of this machine"),
        ({"store": "memory://store"}, "store", "the memory of this process"),
        ({"model.path": "/models/sdxl"}, "model.path", "a folder of this machine"),
        ({"model.vae": "models/sdxl/vae/x"}, "model.vae", "a path relative to this folder"),
        ({"evaluate.clip": "/models/clip"}, "evaluate.clip", "a folder of this machine"),
        ({"evaluate.inception": "weights/it.pth"}, "evaluate.inception", "a path relative"),
        ({"evaluate.prompts.more.file": PROMPTS}, "evaluate.prompts.more.file", "a folder of"),
        ({"store": "new/store"}, "store", "a path relative to this folder"),
        ({"publish.registry": "registry"}, "publish.registry", "a path relative"),
        (
            {"train.init": "random", "train.denoiser_config": "/data/unet.json"},
            "train.denoiser_config",
            "a folder of this machine",
        ),
    ],
)
def test_what_a_pool_cannot_reach_is_refused(
    overrides: dict[str, Any], setting: str, why: str
) -> None:
    recipe = load_recipe("digits", {**ON_GPU, **overrides})
    with pytest.raises(Refused) as error:
        check_places(recipe, STAGES)
    message = str(error.value)
    assert message.startswith(f"{setting}: workers of pool gpu (place.train) cannot reach ")
    assert why in message and "\n" not in message
    check_places(recipe, ("download", "encode"))  # a run that does not train sends nothing


@pytest.mark.parametrize(
    ("source", "setting", "why"),
    [
        ({**URLS, "path": "/data/list.parquet"}, "source.path", "a folder of"),
        ({**URLS, "base_url": "http://127.0.0.1/"}, "source.base_url", "an address of"),
        ({**DATASET, "path": "/data/pictures"}, "source.path", "a folder of"),
    ],
)
def test_only_the_pool_of_the_download_must_reach_the_source(
    source: dict[str, Any], setting: str, why: str
) -> None:
    given = {**ON_GPU, "source": source}
    check_places(load_recipe("digits", given), STAGES)
    with pytest.raises(Refused) as error:
        check_places(load_recipe("digits", {**given, "place.download": "cpu"}), STAGES)
    message = str(error.value)
    assert message.startswith(f"{setting}: workers of pool cpu (place.download) cannot reach ")
    assert why in message


def test_only_the_pool_of_the_captions_must_reach_their_servers() -> None:
    endpoint = {"urls": ["http://127.0.0.1:8000/v1"], "model": "vlm"}
    given = {**ON_GPU, "caption": {"endpoint": endpoint}}
    check_places(load_recipe("digits", given), STAGES)
    with pytest.raises(Refused, match=r"caption.endpoint.urls.0: .* \(place.caption\) cannot"):
        check_places(load_recipe("digits", {**given, "place.caption": "gpu"}), STAGES)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"source": URLS},
        {"source": DATASET},
        {"model.path": "stabilityai/sdxl"},
        {"model.path": "/mnt/shared/sdxl"},
        {"store": "/mnt/shared/store"},
        {"place.train": "gpu/urgent"},
    ],
)
def test_what_a_pool_reaches_is_accepted(overrides: dict[str, Any]) -> None:
    check_places(load_recipe("digits", {**SHARED, **overrides}), STAGES)


def test_a_secret_is_not_sent() -> None:
    source = {**URLS, "path": "https://host.example/list.parquet?token=abc"}
    recipe = load_recipe("digits", {**ON_GPU, "source": source})
    with pytest.raises(Refused, match=r"^source\.path: a secret cannot be sent") as error:
        check_places(recipe, STAGES)
    assert "abc" not in str(error.value)


def test_the_secrets_that_the_receiver_refuses_are_not_sent() -> None:
    beam = {"token": "abc", "names": ["x", {"api_key": "abc"}], "password": ["abc"]}
    for name, value in beam.items():
        hidden = hide_secrets({"beam": {name: value}})
        assert "abc" not in str(hidden) and _secret(hidden, "")
    assert _secret(hide_secrets({"download": {"user_agent_token": "me"}})) is None


def test_without_a_place_nothing_is_refused() -> None:
    check_places(load_recipe("digits"), STAGES)


def test_the_received_recipe_is_the_senders_but_sends_nothing() -> None:
    pools = {f"place.{one}": "pool" for one in PLACED_STAGES}
    private = {"publish.signing_key": "/home/me/key.pem", "publish.hub": {"repo": "me/digits"}}
    recipe = load_recipe("digits", {**SHARED, **pools, **private, "train.steps": 7})
    got = received_recipe(settings_to_send(recipe))
    assert got.place.pools() == {}
    assert got.publish.signing_key is None and got.publish.hub is None
    same = {"place", "publish"}
    assert got.model_dump(exclude=same) == recipe.model_dump(exclude=same)


def test_shipped_models_are_those_of_the_receivers_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = settings_to_send(load_recipe("digits", ON_GPU))
    monkeypatch.setattr("tasks.beam.workers.RECIPES", tmp_path / "configs")
    got = received_recipe(sent)
    assert str(RECIPES.parent) not in str(sent)
    assert got.model.path == str(tmp_path / "demo/base")
