"""For any values: content keys, and records that are read back."""

import itertools
import json
from random import Random
from typing import Any

import fsspec
import pytest
from hypothesis import strategies as st
from property_tests import JSON, holds_for

from artifacts.records import FileEntry, canonical_json, digest_json, read_record, write_record


def typed(value: Any) -> Any:
    """A value that differs wherever its JSON does: 1, 1.0, true and "1" are four values."""
    if isinstance(value, dict):
        return {name: typed(item) for name, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return (type(value).__name__, repr(value))


def shuffled(value: Any, random: Random) -> Any:
    """The same value, its names in another order."""
    if isinstance(value, dict):
        items = list(value.items())
        random.shuffle(items)
        return {name: shuffled(item, random) for name, item in items}
    return [shuffled(item, random) for item in value] if isinstance(value, list) else value


def test_a_value_json_cannot_say_exactly_has_no_key() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json({"a": float("nan")})


@holds_for(value=JSON, number=st.integers(0, 9))
def test_the_order_of_names_does_not_change_a_key(value: Any, number: int) -> None:
    assert digest_json(shuffled(value, Random(number))) == digest_json(value)


@holds_for(value=JSON)
def test_canonical_json_is_read_back_with_its_types(value: Any) -> None:
    text = canonical_json(value)
    assert typed(json.loads(text)) == typed(value)
    assert canonical_json(json.loads(text)) == text


@holds_for(one=JSON, other=JSON)
def test_values_that_differ_have_keys_that_differ(one: Any, other: Any) -> None:
    assert (digest_json(one) == digest_json(other)) == (typed(one) == typed(other))


@pytest.mark.parametrize(
    ("one", "other"), itertools.combinations((1, 1.0, "1", True, [1], {"1": 1}, None), 2)
)
def test_no_two_types_have_one_key(one: Any, other: Any) -> None:
    assert digest_json(one) != digest_json(other)
    assert digest_json({"a": [one]}) != digest_json({"a": [other]})


@holds_for(
    summary=st.dictionaries(st.text(), JSON, max_size=4),
    size=st.integers(0, 2**60),
    meta=st.dictionaries(st.text(), JSON, max_size=3),
    path=st.text(min_size=1),
)
def test_a_record_is_read_back_as_it_was_written(
    summary: dict[str, Any], size: int, meta: dict[str, Any], path: str
) -> None:
    fs = fsspec.filesystem("memory")
    files = [FileEntry(path, size, "0" * 64, meta), FileEntry("b", 0, "1" * 64, etag="e")]
    write_record(fs, "/records/manifest.json", {"summary": summary, "files": files})
    found = read_record(fs, "/records/manifest.json")
    assert found is not None and found["files"] == files
    assert typed(found["summary"]) == typed(summary)
    assert set(found) == {"summary", "files"}


@holds_for(40, summary=st.dictionaries(st.text(), JSON, max_size=3), bit=st.integers(0, 2**20))
def test_a_record_with_any_bit_flipped_is_refused(summary: dict[str, Any], bit: int) -> None:
    fs = fsspec.filesystem("memory")
    write_record(fs, "/records/manifest.json", {"summary": summary, "files": []})
    data = bytearray(fs.cat_file("/records/manifest.json"))
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    fs.pipe_file("/records/manifest.json", bytes(data))
    with pytest.raises(ValueError, match="not a readable record"):
        read_record(fs, "/records/manifest.json")
