"""A training starts from the adapters of an earlier one, instead of new ones."""

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import MakeJob
from store_servers import UrlOf
from training import history, train

from configs.errors import Refused
from runtimes.adapters.lora_files import LORA_WEIGHTS, read_adapters
from runtimes.process.job import TrainJob
from runtimes.train.training_loop import start_from_adapters

pytestmark = pytest.mark.slow
LORA: dict[str, Any] = {"method": "lora", "lora": {"rank": 2, "dora": True}, "learning_rate": 1e-2}
LORA |= {"train_text_encoder": True, "ema_decay": 0.5, "steps": 4}


def adapters(job: TrainJob) -> Path:
    return Path(job.out) / LORA_WEIGHTS


def test_training_starts_from_the_adapters_of_a_file(make_job: MakeJob) -> None:
    before = make_job("before", **LORA)
    train(before)
    still = make_job("still", **{**LORA, "learning_rate": 1e-30, "steps": 1})
    train(replace(still, adapters=str(adapters(before))))
    first, then = read_adapters(adapters(before)), read_adapters(adapters(still))
    assert {"unet", "text_encoder"} < first.keys() and first.keys() == then.keys()
    for part, layers in first.items():
        for name, adapter in layers.items():
            for field in ("down", "up", "magnitude"):
                arrays = (getattr(one, field) for one in (adapter, then[part][name]))
                np.testing.assert_allclose(*arrays, atol=1e-25, rtol=0)
    assert history(still)[0]["loss"] != history(before)[0]["loss"]


def test_adapters_of_a_store_that_is_away_are_not_refused(
    url_of: UrlOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.EBUSY, "Slow down")

    monkeypatch.setattr("runtimes.train.training_loop.read_arrays", busy)
    with pytest.raises(OSError, match="Slow down"):
        start_from_adapters(f"{url_of('memory')}/{LORA_WEIGHTS}", None)  # type: ignore[arg-type]
    with pytest.raises(Refused, match="no valid adapter file"):
        start_from_adapters(f"/tmp/{LORA_WEIGHTS}", None)  # type: ignore[arg-type]


def test_wrong_adapters_are_refused(make_job: MakeJob, tmp_path: Path) -> None:
    before, other = make_job("before", **LORA), make_job("other", **{**LORA, "lora": {"rank": 4}})
    train(before)
    with pytest.raises(Refused, match="does not have this model's weights"):  # no magnitudes
        train(replace(other, adapters=str(adapters(before))))
    (tmp_path / "damaged").write_bytes(adapters(before).read_bytes()[:100])
    with pytest.raises(Refused, match="damaged is no valid adapter file"):
        train(replace(before, work=other.work, adapters=str(tmp_path / "damaged")))
