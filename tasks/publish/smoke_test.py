"""The smoke test: the code of a model's card draws by plain diffusers in a clean process.

`check` runs this file as a script, isolated from the project's path and from the network.
"""

from __future__ import annotations

import ast
import json
import math
import re
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from configs.settings.recipe import Model
    from runtimes.pipeline_folder.folder import Base

#: Formats that can execute code when they are loaded.
UNSAFE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5")
SECONDS = 1800  # an SDXL pipeline on the CPU of a small machine
SAMPLE_SIZE = 128  # latents' side where the denoiser's config has none, as of packed latents
LARGEST_SIDE = 256  # of the picture, pixels
STEPS = 2
INDEX = "model_index.json"
CARD = "README.md"
LOADERS = {"from_pretrained", "load_lora_weights"}  # diffusers' methods that take a place
#: Free memory that a picture in float32 needs, as a multiple of the weights.
HEADROOM = 1.5
#: Files with the free memory of the machine and the limit of its container, and their units.
HOST_MEMORY = (
    ("/proc/meminfo", r"MemAvailable:\s+(\d+)", 1024),
    ("/sys/fs/cgroup/memory.max", r"(\d+)", 1),
)
#: A traceback's line of any error that memory, or a device that is not ready, causes; loaders wrap
#: it in errors of their own.
OF_THE_MACHINE = re.compile(
    r"^(?=\w).*(?:out of memory|MemoryError|allocate (?:memory|\d)|bad_alloc|map segment"
    r"|start new thread|busy or unavailable|uncorrectable ECC|no CUDA-capable device"
    r"|unspecified launch failure|driver version|NVML|hardware error).*",
    re.MULTILINE | re.IGNORECASE,
)


def drawing_fault(folder: Path, base: Base, model: Model, device: str) -> str | None:
    """The reason why the code of a folder's card draws no finite picture; None if it does.

    Args:
        folder: the published files and their card: a pipeline, or adapters of `base`.
        model: the places of `base` and its VAE, as the card names them.
        device: where the code draws.

    Raises:
        Away: the process was killed, or ran out of memory or time, on a busy machine.
    """
    # The script has no project to import from.
    from configs.errors import Away
    from runtimes.process.questions import Unanswered, ask

    job = json.dumps(describe(folder, base, model, device))
    environment = {"HF_HUB_OFFLINE": "1", "DIFFUSERS_VERBOSITY": "error"}
    try:  # -P and not -I: packages may be in PYTHONPATH
        ask(__file__, job, environment=environment, seconds=SECONDS)
    except Unanswered as error:
        if error.code is None:
            raise Away(f"smoke test: no picture after {SECONDS} s: run again") from None
        if error.code < 0:
            name = signal.Signals(-error.code).name
            raise Away(f"smoke test: killed by {name}: run again") from None
        if (lack := OF_THE_MACHINE.search(error.log)) is not None:
            raise Away(f"smoke test: {lack[0]}: run again") from None
        return error.last
    return None


def files_fault(folder: Path, max_bytes: int | None) -> str | None:
    """An unsafe file of a folder, or more than `max_bytes`, in words; None without a fault."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    unsafe = [path.name for path in files if path.suffix.lower() in UNSAFE]
    if unsafe:
        return f"{unsafe[0]} is no safetensors file"
    size = sum(path.stat().st_size for path in files)
    if max_bytes is not None and size > max_bytes:
        return f"{size:,} bytes exceed publish.max_bytes ({max_bytes:,})"
    return None


def describe(folder: Path, base: Base, model: Model, device: str) -> dict[str, Any]:
    """The job of `draw`; arguments as for `drawing_fault`."""
    from runtimes.pipeline_folder.weights import weight_shapes
    from tasks.publish.model_card import FOLDER, VAES, has_vae_folder, place_in_code

    pipeline = folder if (folder / INDEX).is_file() else base.folder
    parts = [part for part in sorted(pipeline.iterdir()) if part.is_dir()]
    if (folder / "config.json").is_file():  # a ControlNet
        parts.append(folder)
    shapes = (shape for part in parts for shape in weight_shapes(part).values())
    places = {FOLDER: str(folder), place_in_code(model.path): str(base.folder)}
    vae = base.vae_folder
    if vae is not None and model.vae is not None:
        is_part = has_vae_folder(model.vae, vae)
        places[place_in_code(model.vae, VAES)] = str(vae.parent if is_part else vae)
    return {
        "card": str(folder / CARD),
        "places": places,
        "float32_bytes": 4 * sum(map(math.prod, shapes)),
        "device": device,
    }


def draw(job: dict[str, Any]) -> None:
    """Run the code of the job's card, in a small size and few steps, and check its picture."""
    import numpy as np

    *loading, drawing = card_code(job)
    if find_spec("torchvision") is None:
        _read_no_videos()
    names: dict[str, Any] = {}
    _run(loading, names)
    pipe = _prepare(names["pipe"], job)
    names |= {"pipe": lambda **arguments: pipe(**arguments | _smaller(pipe))}
    names |= dict.fromkeys(("picture", "mask"), _blank(pipe))  # which a user has
    _run([drawing], names)
    if not np.isfinite(names["image"]).all():
        raise ValueError("the picture is not finite")
    if np.ptp(names["image"]) == 0:
        raise ValueError("the picture has one colour only")


def _read_no_videos() -> None:
    """Let Qwen's processor load without its part for videos, which alone wants torchvision."""
    import transformers
    from transformers.processing_utils import ProcessorMixin

    def of_pictures(
        self: Any, image_processor: Any = None, tokenizer: Any = None, **options: Any
    ) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        numbers = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
        self.image_token_id, self.video_token_id = numbers
        template = options.get("chat_template")
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=template)

    transformers.Qwen2VLProcessor.__init__ = of_pictures


def card_code(job: dict[str, Any]) -> list[ast.stmt]:
    """The statements of the card's code, with the job's folders in place of the card's."""
    text = Path(job["card"]).read_text(encoding="utf-8")
    code = text.partition("\n```python\n")[2]  # from a line's begin: metadata quote prompts
    tree = ast.parse(code.partition("\n```")[0])
    for call in ast.walk(tree):
        match call:  # a prompt may be equal to a place
            case ast.Call(ast.Attribute(attr=name), [ast.Constant(place) as node]):
                if name in LOADERS:
                    node.value = job["places"].get(place, place)
    return tree.body


def _run(statements: list[ast.stmt], names: dict[str, Any]) -> None:
    exec(compile(ast.Module(statements, []), CARD, "exec"), names)


def _prepare(pipe: Any, job: dict[str, Any]) -> Any:
    """The pipeline on its device, in float32 if that fits: some processors have no bfloat16."""
    import torch

    pipe.set_progress_bar_config(disable=True)
    if getattr(pipe, "safety_checker", None) is not None:
        pipe.safety_checker = None  # it blackens what it takes for unsafe, such as noise
    device = "cuda" if job["device"] != "cpu" and torch.cuda.is_available() else "cpu"
    fits = HEADROOM * job["float32_bytes"] <= _free_bytes(device)
    return pipe.to(device, torch.float32) if fits else pipe.to(device)


def _smaller(pipe: Any) -> dict[str, Any]:
    """The arguments that replace those of the card's call."""
    import torch

    side = _side(pipe)
    generator = torch.Generator().manual_seed(0)  # a retry has the same verdict
    size = {"height": side, "width": side, "num_inference_steps": STEPS}
    if "max_area" in signature(pipe.__call__).parameters:  # Kontext's draws that many pixels
        size["max_area"] = side * side
    return size | {"output_type": "np", "generator": generator}


def _side(pipe: Any) -> int:
    denoiser = getattr(pipe, "unet", None) or pipe.transformer
    size = getattr(denoiser.config, "sample_size", None)
    size = size or getattr(pipe, "default_sample_size", SAMPLE_SIZE)
    return int(min(size * pipe.vae_scale_factor, LARGEST_SIDE))


def _blank(pipe: Any) -> Any:
    from PIL import Image

    return Image.new("RGB", (_side(pipe), _side(pipe)))


def _free_bytes(device: str) -> float:
    """Free memory of the host and, if it draws, of the GPU: weights are loaded by way of both."""
    import torch

    limits = [math.inf]
    for path, form, unit in HOST_MEMORY:
        with suppress(OSError):
            limits += [unit * int(size) for size in re.findall(form, Path(path).read_text())]
    if device == "cuda":
        limits.append(torch.cuda.mem_get_info()[0])
    return min(limits)


if __name__ == "__main__":
    draw(json.loads(sys.argv[1]))
    print("{}")  # the answer: it has drawn
