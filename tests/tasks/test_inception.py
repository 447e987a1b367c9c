"""Metrics of Inception's features equal torch-fidelity's of the same pictures and weights."""

import json
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from inception_weights import in_fidelity, random_weights, require_fidelity
from kiln_command import is_running
from PIL import Image

from configs.errors import Away, Refused
from tasks.evaluate.distances import INCEPTION_DISTANCES, Resampling
from tasks.evaluate.inception import Inception, check_inception

pytestmark = pytest.mark.soak
COUNT = 24
#: Prints torch-fidelity's FID and KID of two folders, KID of all pictures at once.
THEIRS = """
from torch_fidelity import calculate_metrics
found = calculate_metrics(
    input1=sys.argv[1], input2=sys.argv[2], feature_extractor_weights_path=sys.argv[3],
    cuda=False, fid=True, kid=True, kid_subsets=1, kid_subset_size=int(sys.argv[4]),
    save_cpu_ram=True, cache=False, verbose=False,
)
print(json.dumps(found))
"""
NAMES = {
    "fd_inception": "frechet_inception_distance",
    "kid_inception": "kernel_inception_distance_mean",
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_fidelity()
    return random_weights(tmp_path_factory.mktemp("weights") / "inception.pth", 0)


@pytest.fixture(scope="module")
def network(weights: Path) -> Iterator[Inception]:
    opened = Inception(weights, "cpu")
    yield opened
    opened.close()


def picture(seed: int, height: int = 48, width: int = 64, contrast: float = 1.0) -> np.ndarray:
    """Coloured blocks: features of noise would hardly differ."""
    small = np.random.default_rng(seed).uniform(0, 255 * contrast, (3, 4, 3)).astype(np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def test_distances_equal_those_that_torch_fidelity_computes_from_folders(
    network: Inception, weights: Path, tmp_path: Path
) -> None:
    sets = {
        "drawn": [picture(n, contrast=0.7) for n in range(COUNT)],
        "held_out": [picture(n) for n in range(100, 100 + COUNT)],
    }
    for name, pictures in sets.items():
        (tmp_path / name).mkdir()
        for number, one in enumerate(pictures):
            Image.fromarray(one).save(tmp_path / name / f"{number:03}.png")
    folders = [tmp_path / name for name in sets]
    theirs = json.loads(in_fidelity(THEIRS, *folders, weights, COUNT))
    x, y = (network.images(pictures) for pictures in sets.values())
    assert x.shape == (COUNT, 2048) and x.dtype == np.float32
    assert set(NAMES) == set(INCEPTION_DISTANCES)
    for name, distance in INCEPTION_DISTANCES.items():
        expected = theirs[NAMES[name]]
        assert abs(expected) > 1e-3, "a value that can differ"
        assert distance(x, y, Resampling(2, 0)).value == pytest.approx(expected, rel=1e-3), name


def test_pictures_of_several_sizes_keep_their_order(network: Inception) -> None:
    pictures = [picture(0), picture(1, 64, 48), picture(2), picture(3, 32, 32)]
    found = network.images(pictures)
    for number, one in enumerate(pictures):
        np.testing.assert_allclose(found[number], network.images([one])[0], rtol=1e-4, atol=1e-6)
    spread = np.abs(found[0] - found[2]).max()
    assert spread > 1e-2, "features that can differ"
    assert network.images([]).shape == (0, 2048)


class _Touch:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_file_without_these_weights_is_refused_in_one_line(weights: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("text.pth", "other.pth", "code.pth")]
    files[0].write_text("a page of a captive network")
    torch.save({"fc.weight": torch.zeros(2, 2)}, files[1])
    files[2].write_bytes(pickle.dumps(_Touch(tmp_path / "ran")))
    for path in files:
        with pytest.raises(Refused, match="has no weights of torch-fidelity") as error:
            check_inception(path, "s3://bucket/weights.pth")  # which this is the copy of
        assert "s3://bucket/weights.pth has no" in str(error.value)
        assert str(path) not in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()
    check_inception(weights, str(weights))


def test_a_killed_process_is_a_transient_error(weights: Path) -> None:
    opened = Inception(weights, "cpu")
    os.kill(opened._process.pid, signal.SIGKILL)
    with pytest.raises(Away, match=r"^evaluate\.inception: its process ended with -9"):
        opened.images([picture(0)])


def test_the_process_ends_with_its_client(weights: Path) -> None:
    opened = Inception(weights, "cpu")
    pid = opened._process.pid
    del opened
    assert not is_running(pid)
