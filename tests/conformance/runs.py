"""What conformance tests do with jobs and with what jobs leave."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import chips
import numpy as np
import pytest
import torch
from conformance.reference_training import Figures, Plain, Weights, read_weights
from numpy.typing import NDArray
from peft import LoraConfig
from PIL import Image
from tolerances import LOSS, NORM, WEIGHTS
from training import history

from configs.errors import Refused
from configs.settings.train import Train
from runtimes.adapters.lora import initial_down
from runtimes.pipeline_folder.folder import Base, trained_config
from runtimes.process.job import Events, TrainJob
from runtimes.process.launcher import Stop
from runtimes.registry import check_family
from runtimes.torch_models.loading import load_denoiser
from runtimes.train import training_loop

Once = Callable[[str, Callable[[Path], None]], Path]
Reference = tuple[list[Figures], Weights]


def subjects(
    *, without: str = "", extended: str = "", soak: str = "", only: str = ""
) -> pytest.MarkDecorator:
    """Parametrize the fixture `runtime` by the variants of chips.VARIANTS.

    Args:
        without: names of variants that the test is not for.
        extended: names of those that only `make extended` tests so.
        soak: names of those that only `make soak` tests so.
        only: the test is for these alone.
    """
    params = []
    for name in chips.VARIANTS:
        if name in without.split() or (only and name not in only.split()):
            continue
        marks = [pytest.mark.xdist_group(f"conformance-{name}")]
        marks += [pytest.mark.extended] * (name in extended.split())
        marks += [pytest.mark.soak] * (name in soak.split())
        params.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("runtime", params, indirect=True)


def subjects_and_families(extended: str = "") -> pytest.MarkDecorator:
    """Parametrize `runtime` and `family` by the families that each variant goes through.

    Args:
        extended: names of variants that only `make extended` tests so.
    """
    params = []
    for name, variant in chips.VARIANTS.items():
        group = pytest.mark.xdist_group(f"conformance-{name}")
        first = [group] + [pytest.mark.extended] * (name in extended.split())
        params += [pytest.param(name, family, marks=first) for family in variant.families]
        soak = [group, pytest.mark.soak]
        params += [pytest.param(name, family, marks=soak) for family in variant.more_families]
    return pytest.mark.parametrize(("runtime", "family"), params, indirect=["runtime"])


def result(job: TrainJob) -> dict[str, Weights]:
    """What a run has left: file -> arrays."""
    out = Path(job.out)
    files = sorted([*out.glob("*.safetensors"), *out.glob("*/*.safetensors")])
    return {str(path.relative_to(job.out)): read_weights(path) for path in files}


def assert_follows(job: TrainJob, expected: list[Figures]) -> None:
    """The job's losses and gradient norms are those of the reference."""
    for name, tolerance in (("loss", LOSS), ("grad_norm", NORM)):
        found, wanted = ([line[name] for line in lines] for lines in (history(job), expected))
        assert found == pytest.approx(wanted, rel=tolerance), (
            f"{name}: {largest_difference(found, wanted)}"
        )


def largest_difference(found: Sequence[float | None], expected: Sequence[float | None]) -> str:
    """Where two lists of figures differ most, relative to what is expected."""
    pairs = zip(found, expected, strict=True)
    apart = [abs(a - b) / abs(b) if a and b else float(a != b) for a, b in pairs]
    step = apart.index(max(apart))
    return f"{apart[step]:.2g} at step {step} ({found[step]}, not {expected[step]})"


def assert_close(found: Weights, expected: Weights, tolerance: float = WEIGHTS) -> None:
    """What was trained is the same; what else a part needs (SD3's positions) is there beside it."""
    assert found.keys() >= expected.keys()
    for name, array in expected.items():
        furthest = np.abs(found[name] - array).max()
        assert furthest <= tolerance * max(np.abs(array).max(), 1e-3), name


def reference(once: Once, name: str, make: Callable[[], Plain]) -> Reference:
    """Figures and weights of a plain run, made once for all variants."""

    def trained(folder: Path) -> None:
        plain = make()
        (folder / "figures.json").write_text(json.dumps(plain.train()))
        np.savez(folder / "weights.npz", **plain.weights())

    folder = once(f"reference-{name}", trained)
    with np.load(folder / "weights.npz") as weights:
        return json.loads((folder / "figures.json").read_text()), dict(weights)


def plain_denoiser(job: TrainJob) -> Plain:
    """The whole denoiser, trained plainly."""
    base, settings = Base.of(job), Train(**job.train)
    config = trained_config(base.denoiser, settings, job.denoiser_config)
    loaded = load_denoiser(base.denoiser_folder, config=config, seed=settings.seed)
    return Plain(job, loaded.requires_grad_(True), copy.deepcopy(loaded).requires_grad_(False))


def plain_adapters(job: TrainJob) -> Plain:
    """PEFT's adapters on the attention layers, started as every runtime starts them."""
    lora = Train(**job.train).lora
    base = Base.of(job)
    denoiser = load_denoiser(base.denoiser_folder).requires_grad_(False)
    frozen = copy.deepcopy(denoiser)
    attention = [".to_q", ".to_k", ".to_v", ".to_out.0"]
    attention += [".add_q_proj", ".add_k_proj", ".add_v_proj", ".to_add_out"]  # stream of text
    attention += [".to_qkv_mlp_proj", ".attn.to_out"]  # FLUX.2's single blocks
    targets = [
        name
        for name, layer in denoiser.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.endswith(tuple(attention))
    ]
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets)
    denoiser.add_adapter(config)
    for name, parameter in denoiser.named_parameters():
        if name.endswith(".lora_A.default.weight"):
            layer = f"{base.family.denoiser}.{name.removesuffix('.lora_A.default.weight')}"
            start = initial_down(job.train["seed"], layer, parameter.shape)
            parameter.data = torch.from_numpy(start)
    return Plain(job, denoiser, frozen)


class _Start(Events):
    """Keeps the step that training began at."""

    step: int | None = None

    def emit(self, event: str, **fields: Any) -> None:
        if event == "start":
            self.step = fields["step"]


def train_here(job: TrainJob) -> int | None:
    """Do a job of runtime torch in this process; the step that it began at."""
    events = _Start()
    assert training_loop.train(job, events, Stop())
    return events.step


def run_of_torch(once: Once, name: str, make: Callable[[str], TrainJob]) -> Path:
    """The folder of a job that runtime torch has done, once for all that are held to it.

    Args:
        make: the job that works in a folder.
    """

    def trained(folder: Path) -> None:
        train_here(make(str(folder)))

    return once(f"torch-{name}", trained)


def skip_unless_known(runtime: str, family: str) -> None:
    """Skip what the registry says that a runtime does not know."""
    try:
        check_family(chips.VARIANTS[runtime].runtime, family)
    except Refused as error:
        pytest.skip(str(error))


def pictures(folder: Path) -> NDArray[np.int64]:
    """The pictures of a drawing, [N, H, W, 3], in levels of 0 to 255."""
    return np.stack(
        [np.asarray(Image.open(path)).astype(int) for path in sorted(folder.glob("*.png"))]
    )
