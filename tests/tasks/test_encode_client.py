"""Encoders in another process return what they return in this one."""

from pathlib import Path

import chips
import numpy as np
import pytest

from runtimes.contract import WrongInput
from runtimes.process.job import EncodeJob
from runtimes.torch_models.vae_and_text_encoders import Encoder
from tasks.encode.encoder_client import EncoderLost, ServedEncoder

pytestmark = pytest.mark.slow
CAPTIONS = ["a red cat", "", "a dog"]


def pictures(count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (count, 3, 32, 32)).astype(np.float32)


@pytest.fixture(scope="module")
def served(tiny_sdxl: Path) -> ServedEncoder:
    """Shared by the tests, since it takes seconds to start; the last test kills it."""
    return ServedEncoder(EncodeJob("torch", str(tiny_sdxl), device="cpu"))


def test_arrays_come_back_as_they_are(served: ServedEncoder, tiny_sdxl: Path) -> None:
    here = Encoder(tiny_sdxl, device="cpu")
    assert served.info == here.info
    for found, expected in (
        (served.images(pictures(3)), here.images(pictures(3))),
        (served.texts(CAPTIONS), here.texts(CAPTIONS)),
        ([served.input_ids(CAPTIONS)], [here.input_ids(CAPTIONS)]),
    ):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
            assert one.dtype == other.dtype
    assert served.token_counts(CAPTIONS) == here.token_counts(CAPTIONS)


def test_the_error_of_a_dead_process_has_its_last_line(served: ServedEncoder) -> None:
    assert len(served.texts(["a"])[0]) == 1
    with pytest.raises(EncoderLost, match=r"ended with 1: RuntimeError: .*3 channels"):
        served.images(np.zeros((1, 5, 32, 32), np.float32))  # of five colours
    with pytest.raises(EncoderLost):
        served.texts(["a"])


def test_a_wrong_model_is_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"model_index\.json"):
        ServedEncoder(EncodeJob("torch", str(tmp_path), device="cpu"))


#: The one family of a runtime, or of a variant of one, that is encoded in `make test`.
ONCE = {"jax": "sdxl", "xla": "sd", "mindspore": "sdxl", "hpu-lazy": "sd"}
OTHER_CAPTIONS = ["a blue cat", "two", "a fog"]


@pytest.mark.parametrize(
    ("runtime", "family"),
    [
        pytest.param(name, family, marks=[] if ONCE.get(name) == family else pytest.mark.soak)
        for name in chips.VARIANTS
        for family in ("sd", "sdxl")
        if name != "torch"
    ],
)
def test_every_runtime_encodes_alike(
    runtime: str, family: str, tiny_sd: Path, tiny_sdxl: Path
) -> None:
    """Whole batches and a last, smaller one; other pictures and captions give other numbers."""
    on = chips.VARIANTS[runtime]
    chips.require(runtime)
    folder = {"sd": tiny_sd, "sdxl": tiny_sdxl}[family]
    with chips.standing_in(runtime):
        job = EncodeJob(on.runtime, str(folder), batch_size=4, device=on.device)
        served = ServedEncoder(job)
    here = Encoder(folder, device="cpu")
    given = pictures(4)
    expected = (*here.images(given), *here.texts(CAPTIONS))
    for count in (4, 3):
        found = (*served.images(given[:count]), *served.texts(CAPTIONS))
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)  # as SD's pooled embeddings are
            if one is not None and other is not None:
                np.testing.assert_allclose(one, other[: len(one)], rtol=1e-4, atol=1e-4)
    others = (*here.images(given[::-1].copy()), *here.texts(OTHER_CAPTIONS))
    for one, other in zip(expected, others, strict=True):
        if one is not None and other is not None:
            assert np.abs(one - other).max(axis=tuple(range(1, one.ndim))).min() > 0.1
