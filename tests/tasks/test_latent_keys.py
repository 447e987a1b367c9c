"""The key of a latent shard has all its inputs."""

from dataclasses import fields, replace
from typing import Any

import pytest

from artifacts.records import digest_json
from configs.load_recipe import load_recipe
from tasks.encode.transform import TransformSettings, settings_for_key, shard_key

SETTINGS = TransformSettings(64, False, 16, 2.0, "center", False, 0, 0.1, 10**6)
#: Digests of the release before `encode.text`: of settings_for_key for recipe digits, of GIVEN.
RECIPE_BEFORE = "fc4ad0f6f015fa4ccc6fbc9a14fa6ed2cdbe2ec28f2563e04bbed218cd8cbd42"
SHARD_BEFORE = "8a42b91d0dba5bacbd11a917dee4dd870d8be7b91a965bc70bf0a525f5f811e6"
GIVEN: dict[str, Any] = {
    "tar_sha256": "t",
    "encoders": "e",
    "dtype": "float32",
    "batch_size": 8,
    "settings": SETTINGS,
}


@pytest.mark.parametrize(
    "change",
    [
        *({"tar_sha256": "u"}, {"encoders": "f"}, {"dtype": "float16"}, {"batch_size": 4}),
        {"text": "token_ids"},
    ],
)
def test_the_key_has_every_input_of_a_latent_shard(change: dict[str, Any]) -> None:
    assert shard_key(**{**GIVEN, **change}) != shard_key(**GIVEN)


@pytest.mark.parametrize("name", [field.name for field in fields(TransformSettings)])
def test_the_key_has_every_setting_of_the_transform(name: str) -> None:
    value = getattr(SETTINGS, name)
    others = {"crop": "random", "download_reshapes": "border"}
    other = others.get(name) or (not value if isinstance(value, bool) else value + 1)
    changed = replace(SETTINGS, **{name: other})
    assert shard_key(**{**GIVEN, "settings": changed}) != shard_key(**GIVEN)


def test_the_form_of_captions_leaves_keys_at_its_default_as_they_were() -> None:
    """The shards of a user's store are found again."""
    plain, tokens = load_recipe("digits"), load_recipe("digits", {"encode.text": "token_ids"})
    assert digest_json(settings_for_key(plain)) == RECIPE_BEFORE
    assert shard_key(**GIVEN) == SHARD_BEFORE
    assert settings_for_key(tokens) == {**settings_for_key(plain), "text": "token_ids"}
