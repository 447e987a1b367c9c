"""Compute the memory and FLOPs of training and sampling without a GPU, on fake tensors.

`python -P -m runtimes.torch.gpu_step_memory REQUEST.json` prints one JSON object, a StepMemory. The
step is the runtime's own (step.py); fake tensors have shapes and dtypes, and no data.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Container, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import diffusers
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from configs.settings.train import Train
from runtimes.contract import StepBatch
from runtimes.families import detect_family
from runtimes.pipeline_folder.describe_encoders import vae_path
from runtimes.pipeline_folder.read_configs import read_config, read_index
from runtimes.process.answer_planner import answer_planner
from runtimes.torch.channels_last import keep_channels_last
from runtimes.torch.clip_update_and_ema import Update
from runtimes.torch.cuda_on_cpu import cuda_on_cpu
from runtimes.torch.device_hooks import DeviceHooks
from runtimes.torch.gpu_step_memory_records import GpuStepRequest, StepMemory
from runtimes.torch.parallel import SingleProcess
from runtimes.torch.step import Step
from runtimes.torch.tensor_lifetimes import LiveMemory, prime_batch_size
from runtimes.torch_models.encode_images_and_captions import vae_dtype
from runtimes.torch_models.loading import empty_text_encoder
from runtimes.torch_models.micro_batches import Inputs
from runtimes.torch_models.network import Network
from runtimes.torch_models.planning_batch import sample_batch

CPU = torch.device("cpu")
#: bitsandbytes keeps moments of smaller arrays in float32.
SMALLEST_8BIT = 4096
BLOCK_8BIT = 256  # values per scale of the 8-bit moments


def step_memory(request: GpuStepRequest) -> StepMemory:
    """Run the request on fake tensors. Raises WrongInput."""
    since = time.monotonic()
    operators = cuda_on_cpu() if request.device == "cuda" else nullcontext()
    with operators:
        found = _sampling(request) if request.sampling_dtype else _training(request)
    return replace(found, seconds=time.monotonic() - since)


class _Device(DeviceHooks):
    """A device without data, which is not asked for the value of a norm."""

    def clip_grad_norm(self, parameters: Any, most: float) -> torch.Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm, foreach=True)
        return norm


def _training(request: GpuStepRequest) -> StepMemory:
    settings = Train(**request.train)
    network = Network.without_weights(request, settings)
    encoders = _encoders(request, settings.compute_dtype, network.parts)
    trained = network.trained()
    sizes = [parameter.numel() for parameter in trained.values()]
    samples = prime_batch_size(tensor.nbytes for tensor in _tensors(network))
    batch = _batch(request, network, text=network.encodes_text)
    live = LiveMemory(samples)
    with FakeTensorMode():
        _make_fake(network)
        keep_channels_last(network.train())
        weights = live.exclude(_tensors(network))
        optimizer = _run_step(network, settings, batch, live)
    return StepMemory(
        parameters=sum(sizes),
        weights=weights,
        encoders=encoders,
        optimizer=optimizer,
        optimizer_8bit=sum(map(_bytes_8bit, sizes)),
        ema=4 * (sum(sizes) + max(sizes)),
        largest=4 * max(sizes),
        moments=live.moments(accumulating=False),
        accumulating=live.moments(accumulating=True),
        flops_per_image=(live.flops - live.recomputed_flops) / samples,
        recomputed_flops_per_image=live.recomputed_flops / samples,
    )


def _run_step(network: Network, settings: Train, batch: StepBatch, live: LiveMemory) -> int:
    """Record a step; returns the bytes of the optimizer's state."""
    # The average and the 8-bit moments are computed by formula, and change nothing else in a step.
    optimizer = "adamw" if settings.optimizer == "adamw_8bit" else settings.optimizer
    settings = settings.model_copy(update={"ema_decay": None, "optimizer": optimizer})
    kind, parallel = _Device(CPU), SingleProcess()
    forward = parallel.wrap(network)
    masters = parallel.masters()
    for parameter in masters.values():
        parameter.register_post_accumulate_grad_hook(live.mark_gradient)
    update = Update(masters, settings, parallel, kind)
    state = update._optimizer.state_tensors()
    moments = live.exclude(tensor for group in state.values() for tensor in group.values())
    step = Step(network, forward, update, parallel, kind, settings, rank=0)
    with live:
        step(replace(batch, on_device=[_inputs(batch, live.samples)]), 1e-4)
    return moments


def _sampling(request: GpuStepRequest) -> StepMemory:
    """A denoising step with guidance, then the VAE's decoder, as the family's pipeline does."""
    assert request.sampling_dtype is not None
    dtype = getattr(torch, request.sampling_dtype)
    plain = Train(train_text_encoder=False).model_copy(
        update={name: request.train[name] for name in ("inpainting", "aesthetic_score")}
    )
    network = Network.without_weights(request, plain).requires_grad_(False)
    vae = _empty_vae(request)
    vae = vae.to(vae_dtype(vae.config, dtype)).requires_grad_(False)
    encoders = _encoders(request, request.sampling_dtype)
    fake_tensors = FakeTensorMode()
    with fake_tensors:
        for part in network.parts.values():
            _make_fake(part, dtype)  # a cast of real tensors would fill the host's memory
        _make_fake(network.frozen_clip)
        _make_fake(vae)
    samples = prime_batch_size(tensor.nbytes for tensor in (*_tensors(network), *_tensors(vae)))
    batch = _batch(request, network, text=False)
    live = LiveMemory(samples)
    with fake_tensors, torch.no_grad():
        weights = live.exclude(_tensors(network))
        offloaded = live.exclude(_tensors(vae)) + 2 * _largest_layer(network, request, dtype)
        offloaded += sum(tensor.nbytes for tensor in _tensors(network.frozen_clip))
        with live:
            passes = 1 if network.family.guidance_input else 2  # with and without the prompt
            inputs = _inputs(batch, passes * samples, dtype)
            network(inputs.noisy_latents, inputs.timesteps, inputs.conditioning)
            denoising = live.flops
            del inputs
            latents = torch.empty((samples, *batch.noisy_latents.shape[1:]), dtype=vae.dtype)
            network.family.decode_latents(vae, latents)
    moments = live.moments(accumulating=False)
    return StepMemory(
        weights=weights + encoders,
        offloaded=offloaded,
        encoders=encoders,
        moments=moments,
        accumulating=moments,
        flops_per_image=denoising / samples,
    )


def _batch(request: GpuStepRequest, network: Network, *, text: bool) -> StepBatch:
    size = request.drawn_size or (request.resolution, request.resolution)
    return sample_batch(request, network, size, text=text)


def _inputs(batch: StepBatch, samples: int, dtype: torch.dtype = torch.float32) -> Inputs:
    def send(array: Any) -> torch.Tensor:
        return torch.empty((samples, *array.shape[1:]), dtype=torch.from_numpy(array).dtype)

    return Inputs(batch, send, dtype=dtype)


def _encoders(request: GpuStepRequest, dtype: str, trained: Container[str] = ()) -> int:
    """Bytes of the pipeline's text encoders and VAE in a dtype, without `trained` ones."""
    kind, vae = getattr(torch, dtype), _empty_vae(request)
    parts = [part for name, part in _text_encoders(request) if name not in trained]
    total = sum(parameter.numel() for part in parts for parameter in part.parameters())
    of_vae = sum(parameter.numel() for parameter in vae.parameters())
    return total * kind.itemsize + of_vae * vae_dtype(vae.config, kind).itemsize


def _text_encoders(request: GpuStepRequest) -> Iterator[tuple[str, torch.nn.Module]]:
    """The pipeline's text encoders on `meta`, by name."""
    folder = request.model_folder
    index = read_index(folder)
    for encoder in detect_family(folder).text_encoders:
        if (index.get(encoder.component) or [None])[0]:
            yield encoder.component, empty_text_encoder(folder, encoder.component)


def _largest_layer(network: Network, request: GpuStepRequest, dtype: torch.dtype) -> int:
    """Bytes of the largest layer of the denoiser and the text encoders in a dtype."""
    models = (network.denoiser, *(part for _, part in _text_encoders(request)))
    layers = (layer for model in models for layer in model.modules())
    sizes = (sum(p.numel() for p in layer.parameters(recurse=False)) for layer in layers)
    return max(sizes) * dtype.itemsize


def _empty_vae(request: GpuStepRequest) -> Any:
    folder = vae_path(request.model_folder, request.vae_folder)
    with torch.device("meta"):
        vae_class = getattr(diffusers, detect_family(request.model_folder).vae_class)
        return vae_class.from_config(read_config(folder / "config.json"))


def _make_fake(module: torch.nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace the tensors of a module by fake ones, of a dtype if given, in a FakeTensorMode."""
    fake: dict[int, torch.Tensor] = {}  # shared weights stay shared
    for path, part in module.named_modules():
        adapter = "lora_" in path  # contiguous, as Network.place leaves them
        layout = torch.contiguous_format if adapter else torch.channels_last
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake.setdefault(id(tensor), _fake(tensor, dtype, layout))


def _fake(
    tensor: torch.Tensor, dtype: torch.dtype | None, layout: torch.memory_format
) -> torch.Tensor:
    cast = dtype is not None and tensor.is_floating_point()
    layout = layout if tensor.ndim == 4 else torch.contiguous_format
    made = torch.empty(tensor.shape, dtype=dtype if cast else tensor.dtype, memory_format=layout)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _bytes_8bit(size: int) -> int:
    """Bytes of both moments of an array with bitsandbytes' AdamW8bit."""
    return 2 * (4 * size if size < SMALLEST_8BIT else size + 4 * -(-size // BLOCK_8BIT))


if __name__ == "__main__":
    answer_planner(sys.argv[1], GpuStepRequest, step_memory)
