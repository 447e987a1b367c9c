"""Digests and canonical JSON."""

import pytest

from artifacts.hashing import canonical_json, digest_json


def test_equal_values_have_equal_keys_whatever_their_order() -> None:
    assert digest_json({"b": [1, 2.5], "a": "é"}) == digest_json({"a": "é", "b": [1, 2.5]})
    assert digest_json({"a": 1}) != digest_json({"a": "1"})


def test_a_value_json_cannot_say_exactly_is_refused() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json({"a": float("nan")})
