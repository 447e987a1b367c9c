"""Encoders in another process give what they give in this one."""

from pathlib import Path

import chips
import numpy as np
import pytest

from runtimes.base import WrongInput
from runtimes.job import EncodeJob
from runtimes.torch.encode import Encoder
from tasks.encode.served import EncoderLost, ServedEncoder

CAPTIONS = ["a red cat", "", "a dog"]


def pictures(count: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (count, 3, 32, 32)).astype(np.float32)


def test_arrays_come_back_as_they_are(tiny_sdxl: Path) -> None:
    served = ServedEncoder(EncodeJob("torch", str(tiny_sdxl), device="cpu"))
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


def test_sd_pools_nothing(tiny_sd: Path) -> None:
    assert ServedEncoder(EncodeJob("torch", str(tiny_sd), device="cpu")).texts(["a"])[1] is None


def test_a_wrong_model_is_wrong_input(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"model_index\.json"):
        ServedEncoder(EncodeJob("torch", str(tmp_path), device="cpu"))


def test_a_process_that_dies_says_its_last_line(tiny_sd: Path) -> None:
    served = ServedEncoder(EncodeJob("torch", str(tiny_sd), device="cpu"))
    with pytest.raises(EncoderLost, match=r"ended with 1: RuntimeError: .*3 channels"):
        served.images(np.zeros((1, 5, 32, 32), np.float32))  # of five colours
    with pytest.raises(EncoderLost):
        served.texts(["a"])


@pytest.mark.slow
@pytest.mark.parametrize("runtime", [name for name in chips.VARIANTS if name != "torch"])
@pytest.mark.parametrize("family", ["sd", "sdxl"])
def test_every_runtime_encodes_alike(
    runtime: str, family: str, tiny_sd: Path, tiny_sdxl: Path
) -> None:
    """Whole batches and a last, smaller one."""
    on = chips.VARIANTS[runtime]
    chips.require(runtime)
    folder = {"sd": tiny_sd, "sdxl": tiny_sdxl}[family]
    with chips.standing_in(runtime):
        job = EncodeJob(on.runtime, str(folder), batch_size=4, device=on.device)
        served = ServedEncoder(job)
    here = Encoder(folder, device="cpu")
    for count in (4, 3):
        for one, other in zip(
            (*served.images(pictures(count)), *served.texts(CAPTIONS)),
            (*here.images(pictures(count)), *here.texts(CAPTIONS)),
            strict=True,
        ):
            assert (one is None) == (other is None)  # as SD's pooled embeddings are
            if one is not None and other is not None:
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
