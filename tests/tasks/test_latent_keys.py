"""The key of a latent shard has all its inputs."""

from dataclasses import fields, replace
from typing import Any

import pytest

from configs.settings.data import Encode
from tasks.encode.crop_to_bucket import TransformSettings, shard_key

SETTINGS = TransformSettings(64, False, 16, 2.0, "center", False, 0, 0.1, 10**6)
GIVEN: dict[str, Any] = {
    "tar_sha256": "t",
    "encoders": "e",
    "encode": Encode(),
    "settings": SETTINGS,
}


@pytest.mark.parametrize(
    "change",
    [
        *({"tar_sha256": "u"}, {"encoders": "f"}, {"encode": Encode(dtype="float16")}),
        *({"encode": Encode(batch_size=4)}, {"encode": Encode(text="token_ids")}),
        {"encode": Encode(text_precision="int8")},
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
