"""The planned peak memory of a step equals that of the real step, and needs no memory itself."""

import json
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from kiln_command import ROOT

from bench import planned_and_real_memory
from bench.planned_and_real_memory import VARIANTS, compare
from configs.errors import Refused
from configs.settings.train import Train
from runtimes.detect_hardware import peak_rss
from runtimes.pipeline_folder.folder import Base
from runtimes.process.job import TrainJob
from runtimes.process.questions import GpuStepRequest, StepMemory
from runtimes.process.questions import ask as ask_process
from runtimes.torch.gpu_step_memory import cuda_on_cpu, step_memory
from runtimes.torch.runtime import TheRuntime
from runtimes.torch_models.network import FlopCounter, Network, sample_batch

pytestmark = pytest.mark.slow

SDXL = ROOT / "bench/models/stable-diffusion-xl-base-1.0"
#: Variants of the planned peak in `make test`.
IN_TEST = ("full", "gradient checkpointing", "LoRA, bf16", "prior")


@pytest.fixture(autouse=True)
def _deterministic_mode_is_restored() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(train, id=name, marks=[pytest.mark.extended] * (name not in IN_TEST))
        for name, train in VARIANTS.items()
    ],
)
def test_the_planned_peak_is_within_a_tenth_of_the_real_one(
    tiny_sdxl: Path, train: dict[str, Any]
) -> None:
    found = compare(tiny_sdxl, 64, 16, **train)
    assert found["planned"] == pytest.approx(found["real"], rel=0.1), found


def test_the_frozen_copy_of_prior_targets_is_among_the_weights(tiny_sdxl: Path) -> None:
    train = Train(mixed_precision="bf16").model_dump(mode="json")
    plain, prior = (
        step_memory(GpuStepRequest(str(tiny_sdxl), train, 64, has_prior=has_prior))
        for has_prior in (False, True)
    )
    copy = (prior.weights - plain.weights) / (2 * plain.parameters)  # in bfloat16
    assert 1 < copy < 1.2, "the allocator rounds each array up to 512 bytes"


@pytest.mark.extended
def test_dora_of_convolutions_is_planned(tiny_sdxl: Path) -> None:
    """PEFT calls `.view` on its weights, which the runtime therefore keeps contiguous."""
    found = compare(tiny_sdxl, 64, 16, method="lora", lora={"dora": True, "target_modules": "all"})
    assert found["planned"] == pytest.approx(found["real"], rel=0.1), found


@pytest.mark.extended
def test_an_inpainting_unet_is_planned_with_its_text_encoders(tiny_sdxl: Path) -> None:
    train = Train(inpainting=True, train_text_encoder=True).model_dump(mode="json")
    assert step_memory(GpuStepRequest(str(tiny_sdxl), train, 64)).parameters


def test_weights_of_one_measurement_are_gone_before_the_next(
    tiny_sdxl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU they would count in its peak."""
    weights: list[weakref.ref[Any]] = []
    alive: list[list[bool]] = []

    class Watched(TheRuntime):
        def load(self, job: TrainJob, base: Base) -> None:
            alive.append([weight() is not None for weight in weights])
            super().load(job, base)
            weights.append(weakref.ref(next(self._network.denoiser.parameters())))

    monkeypatch.setattr(planned_and_real_memory, "TheRuntime", Watched)
    # The branch for CUDA, which has no collection after the first step. Not by torch.cuda itself:
    # a CUDA build without a GPU would look for a driver.
    cuda = SimpleNamespace(
        is_available=lambda: True,
        reset_peak_memory_stats=lambda: None,
        max_memory_allocated=lambda: 1,
    )
    monkeypatch.setattr(planned_and_real_memory, "torch", SimpleNamespace(cuda=cuda))
    train = Train(global_batch_size=2, device="cpu").model_dump(mode="json")
    job = TrainJob("torch", str(tiny_sdxl), "", train, "", "")
    for _ in range(2):
        planned_and_real_memory.real_peak(job, 64)
    assert alive == [[], [False]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        pytest.param("tiny_sd", marks=pytest.mark.extended),
        *(pytest.param(f, marks=pytest.mark.soak) for f in ("tiny_sd3", "tiny_flux")),
    ],
)
def test_so_it_is_for_each_family_with_trained_text_encoders(
    family: str, request: pytest.FixtureRequest
) -> None:
    found = compare(request.getfixturevalue(family), 64, 16, train_text_encoder=True)
    assert found["planned"] == pytest.approx(found["real"], rel=0.1), found


@pytest.mark.extended
@pytest.mark.slow
def test_frozen_text_encoders_of_the_step_are_planned_in_their_dtype(tiny_sdxl: Path) -> None:
    found = compare(tiny_sdxl, 64, 16, method="lora", text_dtype="float32")
    assert found["planned"] == pytest.approx(found["real"], rel=0.1), found
    without, half, full = (
        ask(tiny_sdxl, text_dtype=dtype) for dtype in (None, "bfloat16", "float32")
    )
    added = half.weights - without.weights
    assert full.weights - without.weights == pytest.approx(2 * added, rel=0.1) and added > 0
    assert full.parameters == without.parameters and full.optimizer == without.optimizer
    assert full.flops_per_image > without.flops_per_image
    asked = GpuStepRequest(str(tiny_sdxl), Train().model_dump(mode="json"), 64)
    drawing, measuring = (
        step_memory(replace(asked, sampling_dtype="bfloat16", text_dtype=dtype)).weights
        for dtype in (None, "float32")
    )
    assert measuring - drawing == full.weights - without.weights


def ask(model: Path, text_dtype: str | None = None, **train: Any) -> StepMemory:
    settings = Train(mixed_precision="bf16", **train).model_dump(mode="json")
    return step_memory(GpuStepRequest(str(model), settings, 64, text_dtype=text_dtype))


def test_attention_saves_no_logits(tiny_sdxl: Path) -> None:
    """Its memory grows with the number of tokens, not with its square."""
    settings = Train(mixed_precision="bf16").model_dump(mode="json")
    small, large = (
        step_memory(GpuStepRequest(str(tiny_sdxl), settings, size)).peak(64)["activations"]
        for size in (64, 128)
    )
    assert large < 4.2 * small


def test_references_count_as_tokens(tiny_flux2: Path) -> None:
    """A picture with three references of its size has the tokens of one with twice its sides."""
    settings = Train(mixed_precision="bf16").model_dump(mode="json")
    asked = GpuStepRequest(str(tiny_flux2), settings, 128)
    three = replace(asked, references=((128, 128),) * 3)
    plain, edit, large = map(step_memory, (asked, three, replace(asked, resolution=256)))
    assert edit.flops_per_image == pytest.approx(large.flops_per_image, rel=0.01)
    activations = [found.peak(64)["activations"] for found in (plain, edit, large)]
    assert activations[1] == pytest.approx(activations[2], rel=0.01)
    assert activations[1] > 1.5 * activations[0]
    drawn = [
        sum(step_memory(replace(each, sampling_dtype="bfloat16")).peak(64).values())
        for each in (asked, three)
    ]
    assert drawn[1] > drawn[0]


def test_norms_save_float32_inputs_on_cuda_alone(tiny_sdxl: Path) -> None:
    settings = Train(mixed_precision="bf16").model_dump(mode="json")
    cuda, cpu = (
        step_memory(GpuStepRequest(str(tiny_sdxl), settings, 64, device=device)).peak(64)[
            "activations"
        ]
        for device in ("cuda", "cpu")
    )
    assert cuda > 1.1 * cpu


def test_gradient_checkpointing_costs_flops_and_saves_activations(tiny_sdxl: Path) -> None:
    plain, checkpointed = ask(tiny_sdxl), ask(tiny_sdxl, gradient_checkpointing="blocks")
    assert plain.recomputed_flops_per_image == 0
    assert checkpointed.flops_per_image == plain.flops_per_image
    share = checkpointed.recomputed_flops_per_image / plain.flops_per_image
    assert 0.2 < share < 1 / 3  # at most the forward pass
    assert checkpointed.peak(64)["activations"] < plain.peak(64)["activations"] / 2


def test_an_8_bit_base_has_half_the_memory_and_equal_flops(tiny_sdxl: Path) -> None:
    """Of bfloat16 weights. Recomputed products are no products of the step."""
    lora: dict[str, Any] = {"method": "lora", "gradient_checkpointing": "blocks"}
    plain, int8 = ask(tiny_sdxl, **lora), ask(tiny_sdxl, **lora, lora={"base_precision": "int8"})
    assert int8.flops_per_image == plain.flops_per_image
    recomputed = int8.recomputed_flops_per_image / plain.recomputed_flops_per_image
    assert 1 <= recomputed < 1.1  # PyTorch stops before a block's last plain product
    request = GpuStepRequest(str(tiny_sdxl), {}, 64)
    network = Network.without_weights(request, Base.of(request), Train(method="lora"))
    layers = {n: m for n, m in network.named_modules() if isinstance(m, torch.nn.Linear)}
    rounded = sum(
        layer.weight.numel() - 4 * layer.out_features
        for name, layer in layers.items()
        if "lora_" not in name and any(part.isdigit() for part in name.split("."))
    )
    assert plain.weights - int8.weights == pytest.approx(rounded, rel=0.3)  # sizes are rounded up


def test_offloaded_layers_leave_the_vae_and_two_layers(tiny_sdxl: Path) -> None:
    train = Train(mixed_precision="bf16").model_dump(mode="json")
    found = step_memory(GpuStepRequest(str(tiny_sdxl), train, 64, sampling_dtype="float32"))
    pipe = DiffusionPipeline.from_pretrained(tiny_sdxl)
    models = (pipe.unet, pipe.text_encoder, pipe.text_encoder_2)
    largest = max(
        sum(p.nbytes for p in layer.parameters(recurse=False))
        for model in models
        for layer in model.modules()
    )
    vae = sum(parameter.nbytes for parameter in pipe.vae.parameters())
    assert found.offloaded == pytest.approx(vae + 2 * largest, rel=0.2)  # sizes are rounded up
    assert found.offloaded < found.weights / 2


@pytest.mark.extended
def test_selective_recomputation_keeps_products_and_recomputes_the_rest(tiny_sdxl: Path) -> None:
    plain, blocks, selective = (
        ask(tiny_sdxl, gradient_checkpointing=what) for what in ("none", "blocks", "selective")
    )
    assert selective.flops_per_image == plain.flops_per_image
    assert selective.recomputed_flops_per_image < blocks.recomputed_flops_per_image / 10
    kept = [found.peak(64)["activations"] for found in (plain, selective, blocks)]
    assert kept[0] > 1.2 * kept[1] > 1.2 * kept[2]


@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.extended), "bf16"])
def test_flops_are_those_of_the_training_loop(tiny_sdxl: Path, precision: str) -> None:
    settings = Train(mixed_precision=precision, gradient_checkpointing="blocks")
    request = GpuStepRequest(str(tiny_sdxl), settings.model_dump(mode="json"), 64)
    network = Network.without_weights(request, Base.of(request), settings)
    batch = sample_batch(Base.of(request), network, (64, 64), text=False)
    counted = FlopCounter(network).of(batch)
    assert counted is not None
    # Fused attention computes its logits again in the backward pass, which the loop does not count.
    assert counted < step_memory(request).flops_per_image < 1.03 * counted


def test_gradients_of_an_earlier_micro_batch_exist_beside_the_activations(tiny_sdxl: Path) -> None:
    found = ask(tiny_sdxl)
    one, several = found.peak(64), found.peak(64, accumulating=True)
    assert one["activations"] == several["activations"]
    assert several["gradients"] > 4 * found.parameters > 2 * one["gradients"]


def test_eight_bit_moments_need_a_quarter(tiny_sdxl: Path) -> None:
    found = ask(tiny_sdxl)
    assert found.optimizer == pytest.approx(8 * found.parameters, rel=0.3)  # 512 bytes at least
    assert 2 * found.parameters < found.optimizer_8bit < 4 * found.parameters


def test_adafactor_has_a_plan_in_which_its_moments_are_small(tiny_sdxl: Path) -> None:
    found = ask(tiny_sdxl, optimizer="adafactor")
    assert 0 < found.optimizer < 2 * found.parameters  # 512 bytes at least


def test_sampling_needs_the_weights_of_denoiser_and_vae_and_no_gradients(tiny_sdxl: Path) -> None:
    train = Train().model_dump(mode="json")
    found = step_memory(GpuStepRequest(str(tiny_sdxl), train, 64, sampling_dtype="bfloat16"))
    pipe = DiffusionPipeline.from_pretrained(tiny_sdxl)
    parameters = [*pipe.unet.parameters(), *pipe.vae.parameters()]  # prompts are encoded before
    assert found.weights == pytest.approx(sum(2 * p.numel() for p in parameters), rel=0.3)
    one, two = found.peak(1), found.peak(2)
    assert one["activations"] == one["gradients"] == 0
    assert one["temporaries"] < two["temporaries"] <= 2 * one["temporaries"]


def test_sampling_needs_the_memory_of_the_size_that_is_drawn(tiny_sdxl: Path) -> None:
    def temporaries(size: tuple[int, int] | None, resolution: int = 64) -> int:
        train = Train().model_dump(mode="json")
        given = {"sampling_dtype": "bfloat16", "drawn_size": size}
        found = step_memory(GpuStepRequest(str(tiny_sdxl), train, resolution, **given))  # type: ignore[arg-type]
        return found.peak(1)["temporaries"]

    assert temporaries((64, 64), resolution=32) == temporaries(None)
    assert temporaries((128, 64)) == temporaries((64, 128)) > 1.9 * temporaries((64, 64))


def test_encoding_needs_text_encoders_and_vae(tiny_sd3: Path) -> None:
    def found(precision: str | None) -> StepMemory:
        asked = {"encoding_dtype": "float32", "text_precision": precision}
        return step_memory(GpuStepRequest(str(tiny_sd3), {}, 64, **asked))

    plain, int8 = map(found, (None, "int8"))
    pipe = DiffusionPipeline.from_pretrained(tiny_sd3)
    vae = sum(p.nbytes for p in pipe.vae.parameters())
    encoders = [pipe.text_encoder, pipe.text_encoder_2, pipe.text_encoder_3]
    tensors = [t for model in encoders for t in (*model.parameters(), *model.buffers())]
    assert plain.weights - plain.pinned == pytest.approx(vae, rel=0.2)  # sizes are rounded up
    assert plain.pinned == pytest.approx(sum(t.nbytes for t in tensors), rel=0.2)
    assert plain.pinned > int8.pinned
    assert vae < plain.offloaded < plain.weights
    assert plain.captions_peak(2) > plain.captions_peak(1) > 0
    one, two = (sum(plain.peak(pictures).values()) for pictures in (1, 2))
    assert one < two <= 2 * one


#: GiB in bfloat16 of a batch of 4 pictures of 1024 x 1024, and of 32 of the longest captions.
ENCODING = [
    ("FLUX.1-dev", None, 9.3 + 5.1, 0.7 + 5.1, 9.1),
    ("FLUX.1-dev", "nf4", 3.1 + 5.1, 0.7 + 5.1, 2.9),
    ("Qwen-Image", None, 15.7 + 7.6, 2.3 + 7.6, 15.5),
    ("Qwen-Image", "nf4", 6.1 + 7.6, 2.3 + 7.6, 5.9),
    ("Z-Image", None, 7.65 + 5.1, 1.6 + 5.1, 7.5),
]


@pytest.mark.parametrize(("model", "precision", "resident", "offloaded", "host"), ENCODING)
def test_encoding_at_true_size(
    model: str, precision: str | None, resident: float, offloaded: float, host: float
) -> None:
    asked = {"encoding_dtype": "bfloat16", "text_precision": precision}
    found = step_memory(GpuStepRequest(str(ROOT / "bench/models" / model), {}, 1024, **asked))
    batch = max(sum(found.peak(4).values()), found.captions_peak(32))
    planned = [found.weights + batch, found.offloaded + batch, found.pinned]
    assert [size / 2**30 for size in planned] == pytest.approx([resident, offloaded, host], abs=0.1)


def test_a_plan_leaves_the_operators_of_the_process_as_they_were() -> None:
    x, weight = torch.randn(2, 4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16)

    def normalized() -> torch.dtype:
        with torch.autocast("cpu"):
            return torch.nn.functional.layer_norm(x, (4,), weight).dtype

    assert normalized() == torch.bfloat16
    with cuda_on_cpu():
        assert normalized() == torch.float32
    assert normalized() == torch.bfloat16


def test_the_module_answers_in_json_also_for_wrong_input(tiny_sdxl: Path, tmp_path: Path) -> None:
    def answer(model: Path) -> dict[str, Any]:
        request = json.dumps(asdict(GpuStepRequest(str(model), {}, 64)))
        return ask_process("-m", "runtimes.torch.gpu_step_memory", request)

    assert StepMemory.from_json(answer(tiny_sdxl)).parameters > 0
    with pytest.raises(Refused, match=r"model_index\.json"):
        answer(tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("optimizer", "fused", "gigabytes"),
    [("adafactor", True, 15.9), ("adamw_8bit", True, 19.9), ("adamw_8bit", False, 24.3)],
)
def test_full_training_of_sdxl_fits_24_gb_with_a_fused_backward_pass(
    optimizer: str, fused: bool, gigabytes: float
) -> None:
    train = Train(
        optimizer=optimizer,
        fused_backward=fused,
        max_grad_norm=None,
        mixed_precision="bf16",
        gradient_checkpointing="blocks",
        global_batch_size=1,
    )
    found = step_memory(GpuStepRequest(str(SDXL), train.model_dump(mode="json"), 1024))
    state = found.weights + found.optimizer_state(optimizer)
    assert (state + sum(found.peak(1).values())) / 2**30 == pytest.approx(gigabytes, abs=0.1)


@pytest.mark.extended
@pytest.mark.slow
def test_a_plan_of_sdxl_needs_no_memory_for_its_weights(tiny_sdxl: Path) -> None:
    """A real network would have 9 GB of float32 weights."""
    tiny = json.loads((tiny_sdxl / "unet/config.json").read_text(encoding="utf-8"))
    inputs = ("cross_attention_dim", "addition_time_embed_dim")
    inputs += ("projection_class_embeddings_input_dim", "sample_size")
    config = json.loads((SDXL / "unet/config.json").read_text(encoding="utf-8")) | {
        name: tiny[name] for name in inputs
    }
    train = Train(mixed_precision="bf16", init="random", denoiser_config="given")
    before = peak_rss()
    settings = train.model_dump(mode="json")
    found = step_memory(GpuStepRequest(str(tiny_sdxl), settings, 512, denoiser_config=config))
    assert found.parameters > 2e9
    assert peak_rss() - before < 2 * 2**30
