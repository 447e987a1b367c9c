"""Plan a step for a GPU on a machine without one: memory and FLOPs by fake tensors.

`python -P -m runtimes.torch.gpu_step_memory REQUEST` (JSON) prints one JSON object, a StepMemory.
The step is the runtime's own (step.py); fake tensors have shapes and dtypes, and no data.
`LiveMemory` records which tensors live when, to compute the peak memory for any batch size.

PyTorch without CUDA cannot run autograd on fake CUDA tensors. A plan therefore uses fake CPU
tensors, and lets them save for backward what CUDA tensors would: autocast for the CPU has other
lists of operators, and another attention kernel.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import diffusers
import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from configs.settings.train import Train
from runtimes.contract import StepBatch
from runtimes.pipeline_folder.folder import Base
from runtimes.process.questions import KINDS, GpuStepRequest, Moment, StepMemory, answer
from runtimes.torch.kernels import DeviceHooks
from runtimes.torch.parallel import SingleProcess
from runtimes.torch.step import Step, Update, keep_channels_last
from runtimes.torch.stream_blocks import streaming_bytes
from runtimes.torch_models.activation_memory import Inputs
from runtimes.torch_models.loading import empty_text_encoder
from runtimes.torch_models.network import Network, sample_batch
from runtimes.torch_models.offload import aligned
from runtimes.torch_models.quantized import QuantizedLinear, quantize_blocks
from runtimes.torch_models.vae_text_encoders import encode_ids, frozen_states, vae_dtype

_aten: Any = torch.ops.aten
_FLASH = "_scaled_dot_product_flash_attention"
#: Formulas of FLOPs by operator; PyTorch's table lacks the CPU's attention.
FLOPS: dict[Any, Any] = flop_registry | {
    getattr(_aten, f"{_FLASH}_for_cpu{end}"): flop_registry[getattr(_aten, f"{_FLASH}{end}")]
    for end in ("", "_backward")
}
ALIGNMENT = 512  # bytes; PyTorch's CUDA allocator rounds sizes up to it
#: Batch sizes whose peak is exact; between them it is interpolated from above.
BATCH_SIZES = (*range(1, 65), *(2**n for n in range(7, 13)))


class LiveMemory(TorchDispatchMode):
    """Within the context, records each storage from its first tensor until it is freed.

    Storages whose size is a multiple of `samples` grow with the batch. `samples` is therefore a
    prime number that divides no size of a weight, such as 13.

    It also counts FLOPs; those of gradient checkpointing's recomputation separately.

    Args:
        samples: the batch size of the recorded step.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.samples = samples
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}  # storage address -> number
        self._kinds: list[int] = []  # of each storage, by its number
        self._bytes: list[int] = []
        self._events: list[int] = []  # number of the storage; -1 - number: it is freed
        self._constant: set[int] = set()  # addresses of storages that are not recorded
        self.flops = 0
        self.recomputed_flops = 0

    def exclude(self, tensors: Iterable[torch.Tensor]) -> int:
        """Do not record the storages of these tensors; returns their bytes."""
        total = 0
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata not in self._constant:
                self._constant.add(storage._cdata)
                total += aligned(storage.nbytes(), ALIGNMENT)
        return total

    def mark_gradient(self, parameter: torch.Tensor) -> None:
        """Count a parameter's gradient as such; a hook of `post_accumulate_grad`."""
        assert parameter.grad is not None
        number = self._alive.get(parameter.grad.untyped_storage()._cdata)
        if number is not None:
            self._kinds[number[0]] = KINDS.index("gradients")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # Prodigy reads sums, which a fake tensor does not have
        out = func(*args, **kwargs)
        backward = torch._C._current_graph_task_id() != -1
        if func._overloadpacket in FLOPS:
            flops = FLOPS[func._overloadpacket](*args, **kwargs, out_val=out)
            self.flops += flops
            if backward and (torch.is_grad_enabled() or _in_quantized_linear()):
                self.recomputed_flops += flops
        forward = not backward and (torch.is_grad_enabled() or _in_quantized_linear())
        kind = "activations" if forward else "temporaries"
        if func is torch.ops.aten._to_copy.default:
            source = args[0].untyped_storage()._cdata
            kind = "compute_weights" if source in self._constant else kind
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._record(tensor.untyped_storage(), KINDS.index(kind))
        return out

    def _record(self, storage: Any, kind: int) -> None:
        address = storage._cdata
        if address in self._alive or address in self._constant:
            return
        number = len(self._kinds)
        self._kinds.append(kind)
        self._bytes.append(storage.nbytes())
        self._events.append(number)

        def freed(_: Any) -> None:
            self._alive.pop(address)
            self._events.append(-1 - number)

        self._alive[address] = (number, weakref.ref(storage, freed))

    def moments(self, *, accumulating: bool) -> list[Moment]:
        """The moments with the most live memory, one or more for each of BATCH_SIZES.

        Args:
            accumulating: whether the gradients of an earlier micro-batch exist from the start.
        """
        live = self._live()
        if accumulating:
            # A micro-batch's own gradient exists only until it has been added.
            own = live[:, 0]
            live[:, 0] = own.max(axis=0) + np.maximum(np.diff(own, axis=0, prepend=0), 0)
        fixed, each = live.sum(axis=1).T
        rows = {int(np.argmax(fixed + size * each)) for size in BATCH_SIZES}
        return [
            Moment({kind: (int(f), int(s)) for kind, (f, s) in zip(KINDS, live[row], strict=True)})
            for row in sorted(rows)
        ]

    def _live(self) -> Any:
        """Live memory after each event: [events, kind, (fixed bytes, bytes per sample)]."""
        numbers = np.array(self._events)
        signs = np.where(numbers < 0, -1, 1)
        numbers = np.where(numbers < 0, -1 - numbers, numbers)
        size = np.array(self._bytes)[numbers]
        grows = size % self.samples == 0
        changes = np.zeros((len(numbers), len(KINDS), 2), np.int64)
        rows = np.arange(len(numbers)), np.array(self._kinds)[numbers]
        changes[(*rows, 0)] = signs * np.where(grows, 0, aligned(size, ALIGNMENT))
        changes[(*rows, 1)] = signs * np.where(grows, size // self.samples, 0)
        return changes.cumsum(axis=0)


def _in_quantized_linear() -> bool:
    """Whether a quantized layer's forward pass runs; its autograd function disables gradients."""
    frame = sys._getframe()
    code = QuantizedLinear.forward.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def prime_batch_size(sizes: Iterable[int]) -> int:
    """The smallest prime above 10 that divides none of these sizes."""
    sizes = list(sizes)
    primes = (n for n in range(11, 1000) if all(n % d for d in range(2, 32) if d < n))
    return next(n for n in primes if all(size % n for size in sizes))


#: Operators that CUDA's autocast computes in float32 and the CPU's does not, as far as denoisers
#: and text encoders use them; see "CUDA Ops that can autocast to float32" in PyTorch's manual.
FLOAT32 = (
    "group_norm",
    "layer_norm",
    "rms_norm",
    "softmax.int",
    "pow.Tensor_Scalar",
    "rsqrt",
    "upsample_nearest2d",
)


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Within the context, autocast for the CPU selects dtypes and attention as on CUDA.

    It changes the operators of the whole process.
    """
    library = Library("aten", "IMPL")
    try:
        for name in FLOAT32:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, _in_float32(operator), "AutocastCPU")
        name = "scaled_dot_product_attention"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Overriding a previously registered kernel"
            library.impl(name, _attention, "AutocastCPU", allow_override=True)
        yield
    finally:
        library._destroy()


def _in_float32(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return operator(*_cast(args, torch.float32), **kwargs)

    return run


def _attention(
    query: torch.Tensor,  # [B, heads, T, D]
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Flash attention, which saves its inputs, its output and a logsumexp per row.

    CUDA's kernels for masks and its cuDNN kernel save the same.
    """
    dtype = torch.get_autocast_dtype("cpu")
    options.pop("enable_gqa", None)
    with torch.autocast("cpu", enabled=False):
        return _aten._scaled_dot_product_flash_attention(
            *_cast((query, key, value), dtype), dropout_p, is_causal, False, **options
        )[0]


def _cast(args: Any, dtype: torch.dtype) -> list[Any]:
    return [
        arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg
        for arg in args
    ]


CPU = torch.device("cpu")
#: bitsandbytes keeps moments of smaller arrays in float32.
SMALLEST_8BIT = 4096
BLOCK_8BIT = 256  # values per scale of the 8-bit moments


def step_memory(request: GpuStepRequest) -> StepMemory:
    """Run the request on fake tensors. Raises Refused."""
    since = time.monotonic()
    operators = cuda_on_cpu() if request.device == "cuda" else nullcontext()
    with operators:
        base = Base.of(request)
        if request.encoding_dtype is not None:
            memory = _encoding(request, base)
        else:
            memory = (_sampling if request.sampling_dtype else _training)(request, base)
    return replace(memory, seconds=time.monotonic() - since)


class _Device(DeviceHooks):
    """A device without data, which is not asked for the value of a norm."""

    def clip_grad_norm(self, masters: Any, most: float) -> torch.Tensor:
        gradients = [master.grad for master in masters if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        torch.nn.utils.clip_grads_with_norm_(masters, most, norm, foreach=True)
        return norm


def _training(request: GpuStepRequest, base: Base) -> StepMemory:
    settings = Train(**request.train)
    network = Network.without_weights(request, base, settings)
    sizes = [parameter.numel() for parameter in network.trained().values()]
    samples = prime_batch_size(tensor.nbytes for tensor in _tensors(network))
    batch = _batch(request, base, network, text=network.encodes_text)
    live = LiveMemory(samples)
    prior = network
    if request.has_prior:
        batch = replace(batch, is_prior=np.ones(1, np.bool_))
        if settings.method == "full":
            prior = Network.without_weights(request, base, settings)
    with FakeTensorMode():
        _make_fake(network)
        keep_channels_last(network.train())
        if prior is not network:  # as `prior_network` copies real ones
            for part in prior.requires_grad_(False).parts.values():
                _make_fake(part, getattr(torch, settings.compute_dtype))
            prior.frozen_clip = network.frozen_clip
        weights = live.exclude((*_tensors(network), *_tensors(prior)))
        optimizer = _run_step(network, prior, settings, batch, live)
    return StepMemory(
        parameters=sum(sizes),
        weights=weights,
        streaming=streaming_bytes(network, ALIGNMENT),
        optimizer=optimizer,
        optimizer_8bit=sum(map(_bytes_8bit, sizes)),
        ema=4 * (sum(sizes) + max(sizes)),
        largest=4 * max(sizes),
        moments=live.moments(accumulating=False),
        accumulating=live.moments(accumulating=True),
        flops_per_image=(live.flops - live.recomputed_flops) / samples,
        recomputed_flops_per_image=live.recomputed_flops / samples,
    )


def _run_step(
    network: Network, prior: Network, settings: Train, batch: StepBatch, live: LiveMemory
) -> int:
    """Record a step; returns the bytes of the optimizer's state."""
    # The average and the 8-bit moments are computed by formula, and change nothing else in a step.
    optimizer = settings.optimizer.removesuffix("_8bit")
    settings = settings.model_copy(update={"ema_decay": None, "optimizer": optimizer})
    kind = _Device(CPU)
    parallel = SingleProcess()
    forward = parallel.wrap(network)
    masters = parallel.masters()
    for parameter in masters.values():
        parameter.register_post_accumulate_grad_hook(live.mark_gradient)
    update = Update(masters, settings, parallel, kind)
    state = update._optimizer.state_tensors()
    moments = live.exclude(tensor for group in state.values() for tensor in group.values())
    step = Step(network, forward, update, parallel, kind, settings, rank=0, prior=prior)
    with live:
        step(replace(batch, on_device=[_inputs(batch, live.samples)]), 1e-4)
    return moments


def _sampling(request: GpuStepRequest, base: Base) -> StepMemory:
    """A denoising step with guidance, then the VAE's decoder, as the family's pipeline does."""
    assert request.sampling_dtype is not None
    dtype = getattr(torch, request.sampling_dtype)
    names = ("inpainting", "aesthetic_score", "method", "controlnet")
    plain = Train(**{name: request.train[name] for name in names if name in request.train})
    network = Network.without_weights(request, base, plain).requires_grad_(False)
    vae = _empty_vae(base, dtype)
    fake_tensors = FakeTensorMode()
    with fake_tensors:
        for part in filter(None, (*network.parts.values(), network.control)):
            _make_fake(part, dtype)  # a cast of real tensors would fill the host's memory
        _make_fake(network.frozen_clip)
        _make_fake(vae)
    samples = prime_batch_size(tensor.nbytes for tensor in (*_tensors(network), *_tensors(vae)))
    batch = _batch(request, base, network, text=False)
    live = LiveMemory(samples)
    with fake_tensors, torch.no_grad():
        resident = live.exclude((*_tensors(network.frozen_clip), *_tensors(vae)))
        pinned = live.exclude(_tensors(network))
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
        weights=resident + pinned,
        offloaded=resident + 2 * _largest_layer(network.denoiser),
        pinned=pinned,
        moments=moments,
        accumulating=moments,
        flops_per_image=denoising / samples,
    )


def _encoding(request: GpuStepRequest, base: Base) -> StepMemory:
    """A batch of pictures by the VAE, and one of the longest captions by each text encoder."""
    assert request.encoding_dtype is not None
    dtype = getattr(torch, request.encoding_dtype)
    family = base.family
    vae = _empty_vae(base, dtype)
    models = {name: model.to(dtype) for name, model in _text_encoders(base)}
    frozen = family.frozen_text if base.has_frozen_text else None
    if frozen is not None and request.text_precision is not None:
        quantize_blocks(models[frozen.component], request.text_precision)
    fake_tensors = FakeTensorMode()
    with fake_tensors:
        for part in (vae, *models.values()):
            _make_fake(part)
    texts = torch.nn.ModuleList(models.values()).eval()
    samples = prime_batch_size(tensor.nbytes for tensor in (*_tensors(vae), *_tensors(texts)))
    pictures = LiveMemory(samples)
    captions = LiveMemory(samples)
    with fake_tensors, torch.no_grad():
        resident = pictures.exclude(_tensors(vae))
        pinned = captions.exclude(_tensors(texts))
        with pictures:
            sizes = [(request.resolution, request.resolution), *request.references]
            pixels = torch.empty(samples, 3, *max(sizes, key=math.prod))
            family.encode_pictures(vae, pixels.to(vae.dtype))
        del pixels
        with captions:
            clip = [models[encoder.component] for encoder in family.clip]
            if clip:
                ids = torch.zeros(samples, len(clip), base.input_ids_length)
                encode_ids(family, clip, ids.long())
            if frozen is not None:
                tokens = base.caption_limits[frozen.component] + frozen.prefix
                ids = torch.zeros(samples, tokens).long()
                frozen_states(frozen, models[frozen.component], ids, torch.ones_like(ids))
    moments = pictures.moments(accumulating=False)
    return StepMemory(
        weights=resident + pinned,
        offloaded=resident + 2 * _largest_layer(texts),
        pinned=pinned,
        moments=moments,
        accumulating=moments,
        captions=captions.moments(accumulating=False),
        flops_per_image=pictures.flops / samples,
    )


def _batch(request: GpuStepRequest, base: Base, network: Network, *, text: bool) -> StepBatch:
    size = request.drawn_size or (request.resolution, request.resolution)
    return sample_batch(base, network, size, text=text, references=request.references)


def _inputs(batch: StepBatch, samples: int, dtype: torch.dtype = torch.float32) -> Inputs:
    def send(array: Any) -> torch.Tensor:
        return torch.empty((samples, *array.shape[1:]), dtype=torch.from_numpy(array).dtype)

    return Inputs(batch, send, dtype=dtype)


def _text_encoders(base: Base) -> Iterator[tuple[str, torch.nn.Module]]:
    """The pipeline's text encoders on `meta`, by name."""
    for encoder in base.family.text_encoders:
        if base.class_of(encoder.component) is not None:
            yield encoder.component, empty_text_encoder(base, encoder.component)


def _largest_layer(model: torch.nn.Module) -> int:
    """Bytes of the largest layer."""
    layers = ((*m.parameters(recurse=False), *m.buffers(recurse=False)) for m in model.modules())
    return max(sum(tensor.nbytes for tensor in tensors) for tensors in layers)


def _empty_vae(base: Base, dtype: torch.dtype) -> Any:
    """The VAE on `meta`, in the dtype that it has beside text encoders of `dtype`."""
    with torch.device("meta"):
        vae = getattr(diffusers, base.family.vae_class).from_config(base.config("vae"))
    return vae.to(vae_dtype(vae.config, dtype)).requires_grad_(False)


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
    answer(lambda: step_memory(GpuStepRequest(**json.loads(sys.argv[1]))))
