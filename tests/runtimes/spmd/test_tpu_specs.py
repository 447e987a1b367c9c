"""Slices and chips of TPUs: names, and what is known of each."""

import pytest

from configs.errors import Refused
from runtimes.spmd.tpu_sharding import parse_slice, peak_of


@pytest.mark.parametrize(
    ("name", "topology", "chips", "hosts"),
    [
        ("v5p-8", "v5p:2x2x1", 4, 1),  # v4 and v5p count cores, two a chip
        ("v4-32", "v4:2x2x4", 16, 4),
        ("v5e-8", "v5e:2x4", 8, 1),
        ("v5litepod-16", "v5e:4x4", 16, 4),
        ("v6e-256", "v6e:16x16", 256, 64),
    ],
)
def test_a_slice_is_known_by_the_name_it_is_rented_by(
    name: str, topology: str, chips: int, hosts: int
) -> None:
    found = parse_slice(name)
    assert (found.topology, found.chips, found.hosts) == (topology, chips, hosts)


@pytest.mark.parametrize(("name", "hint"), [("v5p-7", "v5p-8"), ("v9-8", "v5p"), ("v5p", "v5p-8")])
def test_another_is_refused_with_those_there_are(name: str, hint: str) -> None:
    with pytest.raises(Refused, match=hint):
        parse_slice(name)


def test_a_device_is_known_by_jax_s_name_for_its_kind() -> None:
    assert peak_of("TPU v5 lite") == 197e12
    assert peak_of("TPU v5p") == peak_of("TPU v5") == 459e12
    assert peak_of("TPU v6 lite") == 918e12
    assert peak_of("cpu") is None


def test_a_device_is_known_by_google_cloud_s_name_for_it() -> None:
    assert [peak_of(name) for name in ("v5litepod", "v5p", "v6e-8")] == [197e12, 459e12, 918e12]
