"""Mutations of valid inputs: of their bytes, and of the values of a JSON document."""

from __future__ import annotations

import json
from copy import deepcopy
from random import Random
from typing import Any

#: Strings that `encode` replaces by text that `json.dumps` cannot write.
DEEP, DEEP_OBJECT, LONG = "<deep>", "<deep object>", "<long integer>"
#: Levels of nesting; Python's own limit is near 1000.
DEPTHS = (80, 300, 700, 900, 950, 980, 3000)
#: Values of wrong types and extreme numbers.
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"), "1e400", "nan"),
    *("", "0", "a", "a.b", "\0", "\ud800", "\u202e", "\ufeff", "x" * 300, "x" * 5000, "é" * 200),
    *("../../etc/passwd", "./\0", "./" + "x" * 300, "/", "~", "a::b", "file://x", "*", "%00"),
    *("2026-13-45", "https://u:p@h/?a=b", "null", "[]", DEEP, DEEP_OBJECT, LONG),
    *([], {}, [[]], [None], [{}], {"": None}, {"a": {}}, [0], [1, 2, 3, 4], ["a", "b"]),
]
#: Pieces of text that are special in YAML, JSON, CSV or a tar.
PIECES = [
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc3", b"\r", b"\n", b"\r\n", b"\t"),
    *(b'"', b"'", b",", b":", b"{", b"}", b"[", b"]", b"\\", b'"\\ud800"', b"\\u0000", b"#", b"-"),
    *(b"&a ", b"*a", b"<<: *a\n", b"!!python/object:os.system ", b"!!binary ", b"!!int 0x", b"? "),
    *(b"!!timestamp 2026-13-45", b"2026-13-45", b"0b", b"---\n", b"...\n", b"%YAML 9.9\n", b"|\n"),
    *(b"NaN", b"Infinity", b".nan", b".inf", b"1e999", b"null", b"~", b"-0", b"9" * 5000, b"=: "),
    *(b"[" * 3000, b'{"a":' * 3000, b"{a: " * 300, b"\n- " * 300, b'"' + b"x" * 140_000),
]
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32", "utf-7", "latin-1")


def mutate(data: bytes, rng: Random) -> bytes:
    """One to three edits: flips, cuts, splices, special pieces, changed numbers."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(_EDITS)(data, rng)
    return data


def _flip(data: bytes, rng: Random) -> bytes:
    if not data:
        return data
    changed, at = bytearray(data), rng.randrange(len(data))
    changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _flip_near_start(data: bytes, rng: Random) -> bytes:
    return _flip(data[:512], rng) + data[512:]


def _truncate(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _delete(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + data[start + rng.randrange(1, 64) :]


def _splice(data: bytes, rng: Random) -> bytes:
    """A part of the input, copied to another place: repeats lines, keys and blocks."""
    start, to = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    return data[:to] + data[start : start + rng.randrange(1, 600)] + data[to:]


def _repeat_line(data: bytes, rng: Random) -> bytes:
    lines = data.splitlines(keepends=True)
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines or [b"\n"]))
    return b"".join(lines)


def _insert(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(PIECES) + data[at:]


def _overwrite(data: bytes, rng: Random) -> bytes:
    at, block = rng.randrange(len(data) + 1), rng.randbytes(rng.randrange(1, 9))
    return data[:at] + block + data[at + len(block) :]


def _recode(data: bytes, rng: Random) -> bytes:
    return data.decode(errors="replace").encode(rng.choice(ENCODINGS), errors="replace")


_EDITS = (
    *(_flip, _flip, _flip_near_start, _truncate, _truncate, _delete, _splice, _repeat_line),
    *(_insert, _insert, _overwrite, _recode),
)


def mutate_tree(tree: Any, rng: Random) -> Any:
    """A copy of a JSON document with one or two values replaced, removed, moved or added."""
    tree = deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2))):
        places = list(_places(tree))
        if not places:
            return rng.choice(VALUES)
        parent, key = rng.choice(places)
        change = rng.randrange(8)
        if change == 0:
            del parent[key]
        elif change == 1:
            other, name = rng.choice(places)
            parent[key] = deepcopy(other[name]) if name in _keys(other) else None
        elif change == 2 and isinstance(parent, dict):
            parent[rng.choice(("", "a", f"{key}s", "__metadata__", "\ud800"))] = parent.pop(key)
        else:
            parent[key] = deepcopy(rng.choice(VALUES))
    return tree


def _keys(parent: Any) -> Any:
    return parent.keys() if isinstance(parent, dict) else range(len(parent))


def _places(tree: Any) -> Any:
    """(parent, key) of every value within a document."""
    for key in list(_keys(tree)) if isinstance(tree, dict | list) else ():
        yield tree, key
        yield from _places(tree[key])


def encode(tree: Any, rng: Random) -> bytes:
    """The document as JSON text, which is YAML too; some of it with a key twice or recoded."""
    text = json.dumps(tree)
    depth = rng.choice(DEPTHS)
    text = text.replace(f'"{DEEP}"', "[" * depth + "]" * depth)
    text = text.replace(f'"{DEEP_OBJECT}"', '{"a":' * depth + "1" + "}" * depth)
    text = text.replace(f'"{LONG}"', "9" * 5000)
    if rng.randrange(10) == 0 and isinstance(tree, dict) and tree:
        name = rng.choice(list(tree))
        text = f"{text[:-1]}, {json.dumps(name)}: {json.dumps(rng.choice(VALUES[:20]))}}}"
    return _recode(text.encode(), rng) if rng.randrange(20) == 0 else text.encode()
