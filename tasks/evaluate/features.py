"""Feature vectors of pictures, and those of reference pictures stored by content.

The models are CLIP, any `transformers` vision model, and pixels. Image encoders of distances and
memorisation see whole pictures, resized to the model's input, as FD-DINOv2's authors do. CLIPScore,
CMMD and preference models see what CLIP's image processor keeps, a square from the middle, as their
authors do.

Later evaluations reuse the stored features of held-out and training pictures.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import save_file

from artifacts.image_shards import Sample
from artifacts.models import digest_model
from artifacts.records import digest_json, open_checked
from artifacts.store import Shard, Store
from configs.errors import Refused, naming
from configs.secrets import one_line
from runtimes.pipeline_folder.folder import read_config
from runtimes.pipeline_folder.weights import check_vocabulary_files, weight_shapes
from tasks.cut_captions import tell_cuts
from tasks.evaluate.draw import STAGE

Picture = NDArray[np.uint8]  # [H, W, 3]
Float32 = NDArray[np.float32]
BATCH = 64
PIXEL_SIDE = 32
CLIP_SIDE = 224  # of transformers' CLIPModel and CLIPImageProcessor, where a config names none
Item = TypeVar("Item")

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
PROCESSOR = ("preprocessor_config.json", "processor_config.json")
TOKENIZER = ("tokenizer.json", "vocab.json")


class ImageEncoder(Protocol):
    """Features of pictures."""

    def images(self, pictures: Iterable[Picture]) -> Float32:
        """Features f32 [N, D], not normalised. Picture sizes may differ."""
        ...


def check_clip(folder: Path, setting: str = "evaluate.clip", *, whole: bool = False) -> None:
    """Raise Refused unless a folder has a CLIPModel's files; no weights are loaded.

    Args:
        whole: for `WholePictures`, which resizes a picture to a square itself.
    """
    kind = model_type(folder, setting, "CLIPModel")
    if kind != "clip":
        raise Refused(f"{setting}: {folder} holds no CLIPModel (its model_type is {kind})")
    parts = {"weights": WEIGHTS, "a tokenizer": TOKENIZER, "an image processor": PROCESSOR}
    check_parts(folder, setting, parts)
    model = read_config(folder / "config.json")
    with naming(setting):
        check_vocabulary_files(folder, model)
    processors = read_config(next(path for name in PROCESSOR if (path := folder / name).is_file()))
    part = processors.get("image_processor", processors)
    config = part if isinstance(part, dict) else {}
    cropped = config.get("do_center_crop", True)
    size = config.get("size")
    resizes_to_one = whole or (isinstance(size, dict) and "height" in size)
    if not cropped and not resizes_to_one:
        raise Refused(
            f"{setting}: {folder}: its image processor keeps the shape of a picture, its model "
            "takes squares: set do_center_crop to true in its preprocessor_config.json"
        )
    vision = {**(model.get("vision_config") or {}), **(model.get("vision_config_dict") or {})}
    side = vision.get("image_size", CLIP_SIDE)
    size = config.get("crop_size" if cropped else "size") or CLIP_SIDE
    if isinstance(size, dict):
        size = [size.get(name, size.get("shortest_edge")) for name in ("height", "width")]
    elif isinstance(size, int):
        size = [size, size]
    if size != [side, side]:
        raise Refused(
            f"{setting}: {folder}: its image processor gives {size[0]} x {size[1]} pixels, its "
            f"model takes {side} x {side}: correct {'crop_size' if cropped else 'size'} in its "
            "preprocessor_config.json"
        )


def check_image_encoder(folder: Path) -> None:
    """Raise Refused unless a folder has a model of whole pictures; no weights are loaded."""
    setting = "evaluate.image_encoder"
    is_clip = model_type(folder, setting, "vision model") == "clip"
    if is_clip:
        check_clip(folder, setting, whole=True)
    else:
        check_parts(folder, setting, {"weights": WEIGHTS, "an image processor": PROCESSOR})
    blanks = [np.zeros((*size, 3), np.uint8) for size in ((64, 96), (96, 64))]
    try:
        _whole_pictures(_processor(folder), blanks)
    except Exception as error:  # each processor has its own
        raise Refused(
            f"{setting}: {folder}: its image processor does not resize whole pictures to one size:"
            f" {one_line(error)}"
        ) from None
    if not is_clip:
        _check_call(folder, setting)


def digest_image_encoder(folder: Path) -> str:
    """sha256 of an image encoder, for keys.

    It says that `_whole_pictures` resizes where the processor crops in its resize or keeps shapes.
    """
    digest = digest_model(folder)
    processor = _processor(folder)  # its class has defaults, too
    cropped = getattr(processor, "do_center_crop", False)
    keeps = "shortest_edge" in dict(processor.size) and not cropped
    if keeps or getattr(processor, "crop_pct", None) is not None:
        return digest_json({"model": digest, "pictures": "whole"})
    return digest


def _processor(folder: Path) -> Any:
    """The image processor of a folder. Raises as transformers does."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )


def _check_call(folder: Path, setting: str) -> None:
    """Raise Refused if a model does not accept a picture alone, or lacks weights."""
    from transformers import AutoModel

    local = {"local_files_only": True, "trust_remote_code": False}
    missing = list[str]()
    kind = ""
    blank = np.zeros((64, 64, 3), np.uint8)
    try:
        model, report = AutoModel.from_pretrained(  # shapes alone
            folder, use_safetensors=True, device_map="meta", output_loading_info=True, **local
        )
        missing = sorted(report["missing_keys"])
        kind = model.config.model_type
        _pooled(model.eval(), _whole_pictures(_processor(folder), [blank]).to("meta"))
    except NotImplementedError:
        pass  # an operation that needs values
    except Exception as error:  # each architecture has its own
        raise Refused(
            f"{setting}: {folder} has no features of a picture alone: {one_line(error)}"
        ) from None
    if missing:  # such as the pooler in a classifier's folder: each process would draw another
        raise Refused(
            f"{setting}: {folder} lacks weights ({', '.join(missing[:3])}): choose a model with "
            "them, such as DINOv2"
        )
    if kind == "vit_mae":  # the only one of transformers that does so outside of training
        raise Refused(
            f"{setting}: {folder} masks patches at random, so that a picture has other features "
            "each time: choose another model, such as DINOv2"
        )


def open_image_encoder(folder: Path, device: str = "auto") -> ImageEncoder:
    """The CLIP model or vision model of a folder. Raises Refused if it fails to load."""
    if read_config(folder / "config.json").get("model_type") == "clip":
        return WholePictures(Clip(folder, device, "evaluate.image_encoder"))
    return VisionModel(folder, device)


@contextmanager
def loading(words: str) -> Iterator[None]:
    """Raise Refused with these words for what transformers raises of a folder."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise Refused(f"{words}: {one_line(error)}") from None


class Clip:
    """A CLIPModel with its image processor and tokenizer, in inference mode.

    Args:
        folder: local `transformers` folder that holds all three.
        device: torch device; "auto" selects the best device. Gaudi ("hpu") falls back to "auto".
        setting: named in errors.
        dtype: of weights and computations.

    Raises:
        Refused: a part is missing or fails to load.
    """

    def __init__(
        self,
        folder: Path,
        device: str = "auto",
        setting: str = "evaluate.clip",
        dtype: str = "float32",
    ) -> None:
        import torch
        from transformers import CLIPImageProcessor, CLIPModel, CLIPTokenizer

        self._device = torch_device(device)
        self._setting = setting
        with loading(f"{setting}: {folder} does not load as a CLIPModel"):
            model = CLIPModel.from_pretrained(folder, use_safetensors=True, local_files_only=True)
            self._processor = CLIPImageProcessor.from_pretrained(folder, local_files_only=True)
            self._tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
        tokens = len(self._tokenizer)
        rows = model.config.text_config.vocab_size
        if not 256 < tokens <= rows:
            raise Refused(
                f"{setting}: {folder}: the tokenizer has {tokens} tokens only,"
                f" it needs 257 to {rows}"
            )
        self.logit_scale = float(model.logit_scale.detach())
        self._width = int(model.config.projection_dim)
        self._length = int(model.config.text_config.max_position_embeddings)
        self._dtype = getattr(torch, dtype)
        self._model: Any = model.to(self._device, self._dtype).eval().requires_grad_(False)

    def pixels(self, pictures: Sequence[Picture]) -> Any:
        """What the image processor keeps of pictures: f32 [B, 3, H, W], on the host."""
        return self._processor(images=list(pictures), return_tensors="pt").pixel_values

    def features_of(self, pixels: Any) -> Any:
        """Projected image features [B, D] of pixels f32 [B, 3, H, W], not normalised."""
        inputs = pixels.to(self._device, self._dtype)
        return self._model.get_image_features(pixel_values=inputs).pooler_output

    def images(self, pictures: Iterable[Picture], *, whole: bool = False) -> Float32:
        """Projected image features, f32 [N, D], not normalised. Picture sizes may differ.

        Args:
            whole: see whole pictures, instead of what the image processor keeps.
        """

        def compute(batch: list[Picture]) -> Any:
            pixels = _whole_pictures(self._processor, batch) if whole else self.pixels(batch)
            return self.features_of(pixels)

        return _in_batches(pictures, compute, self._width)

    def tell_cut_prompts(self, prompts: Sequence[str]) -> None:
        """Log how many distinct prompts `texts` truncates."""
        distinct = list(dict.fromkeys(prompts))
        counts = map(len, self._tokenizer(distinct, verbose=False).input_ids) if distinct else ()
        cut = {"tokens": self._length, "cut": sum(count > self._length for count in counts)}
        tell_cuts("evaluate", {self._setting: cut}, len(distinct), "prompts")

    def texts(self, prompts: Sequence[str]) -> Float32:
        """Projected text features, f32 [N, D], not normalised.

        Prompts are truncated to the text encoder's maximum length; see `tell_cut_prompts`.
        """
        distinct = list(dict.fromkeys(prompts))
        features = dict(zip(distinct, _in_batches(distinct, self.features_of_texts), strict=True))
        return np.stack([features[prompt] for prompt in prompts])

    def features_of_texts(self, batch: list[str]) -> Any:
        """As `texts`, [B, D] in one call of the model."""
        padding = {"padding": "max_length", "max_length": self._length, "truncation": True}
        inputs = self._tokenizer(batch, **padding, return_tensors="pt").to(self._device)
        return self._model.get_text_features(**inputs).pooler_output


@dataclass(frozen=True)
class WholePictures:
    """A CLIP model as an image encoder: the projected features of whole pictures."""

    clip: Clip

    def images(self, pictures: Iterable[Picture]) -> Float32:
        """Features f32 [N, D], not normalised. Picture sizes may differ."""
        return self.clip.images(pictures, whole=True)


class VisionModel:
    """Any vision model of `transformers`, such as Dinov2Model, in float32 and inference mode.

    Its features are the `pooler_output`; DINOv2's is the normalised class token, as FD-DINOv2 uses
    it (Stein et al. 2023, arXiv 2306.04675). A model without this output has
    the mean of its last states. For a model of pictures and texts, such as SiglipModel, they are
    its image features.

    Args:
        folder: local `transformers` folder with model and image processor.
        device: as for Clip.

    Raises:
        Refused: a part is missing or fails to load.
    """

    def __init__(self, folder: Path, device: str = "auto") -> None:
        from transformers import AutoModel

        self._device = torch_device(device)
        with loading(f"evaluate.image_encoder: {folder} does not load as a vision model"):
            model = AutoModel.from_pretrained(folder, use_safetensors=True, local_files_only=True)
            self._processor = _processor(folder)
        self._model: Any = model.to(self._device).float().eval().requires_grad_(False)

    def images(self, pictures: Iterable[Picture]) -> Float32:
        """Pooled features, f32 [N, D], not normalised. Picture sizes may differ."""

        def compute(batch: list[Picture]) -> Any:
            return _pooled(self._model, _whole_pictures(self._processor, batch).to(self._device))

        return _in_batches(pictures, compute)


def _in_batches(
    items: Iterable[Item], compute: Callable[[list[Item]], Any], width: int = 0
) -> Float32:
    """The rows [N, width] that `compute` gives of batches; without items, none of a `width`."""
    import torch

    rows = [np.zeros((0, width), np.float32)]
    with torch.inference_mode():
        rows = [compute(batch).cpu().numpy() for batch in batches(items, BATCH)] or rows
    return np.concatenate(rows)


class Pixels:
    """The pixels themselves, reduced to 32 x 32, without the mean of each channel.

    The cosine of two such vectors is their normalised cross-correlation: brightness and contrast
    do not count.
    """

    digest = f"pixels {PIXEL_SIDE}"  # in keys of stored features

    def images(self, pictures: Iterable[Picture]) -> Float32:
        """Features f32 [N, 32 * 32 * 3]."""
        size = (PIXEL_SIDE, PIXEL_SIDE)
        box = Image.Resampling.BOX
        small = [np.asarray(Image.fromarray(p).resize(size, box), np.float32) for p in pictures]
        stacked = np.stack(small) if small else np.zeros((0, *size, 3), np.float32)
        centred = stacked - stacked.mean(axis=(1, 2), keepdims=True)
        return centred.reshape(len(stacked), -1)


def _whole_pictures(processor: Any, pictures: Sequence[Picture]) -> Any:
    """Pixels [B, 3, H, W] of whole pictures, resized to the size that a square picture gets.

    Raises:
        ValueError: the image processor resizes to no such size.
    """
    height, width = _input_size(processor)
    options: dict[str, Any] = {"size": {"height": height, "width": width}}
    if getattr(processor, "crop_pct", None) is not None:
        # The resize of ConvNeXt and PoolFormer crops too, so it gets nothing to do.
        whole = (Image.fromarray(picture) for picture in pictures)
        pictures = [np.asarray(i.resize((width, height), processor.resample)) for i in whole]
        options = {"do_resize": False}
    if getattr(processor, "do_center_crop", False):
        options["do_center_crop"] = False
    return processor(images=list(pictures), return_tensors="pt", **options).pixel_values


def _input_size(processor: Any) -> tuple[int, int]:
    """(height, width) to which an image processor brings a square picture. Raises ValueError."""
    if not processor.do_resize:
        raise ValueError("do_resize is false")
    cropped = getattr(processor, "do_center_crop", False)
    size = dict(processor.crop_size if cropped else processor.size)
    if size.keys() == {"shortest_edge"}:
        return size["shortest_edge"], size["shortest_edge"]
    if not {"height", "width"} <= size.keys():
        raise ValueError(f"its size is {size}")
    return size["height"], size["width"]


def _pooled(model: Any, pixels: Any) -> Any:
    """Features [B, D] of pixels [B, 3, H, W]."""
    output = getattr(model, "get_image_features", model)(pixel_values=pixels)
    pooled = getattr(output, "pooler_output", None)
    if pooled is None:
        pooled = output.last_hidden_state.mean(dim=1)
    return pooled.flatten(1)


def batches(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Lists of up to `size` items, in order."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def torch_device(name: str) -> Any:
    """The torch device of a name.

    One process owns a Gaudi. The sampling processes need it, so this process must not open it.
    """
    from transformers.utils.logging import disable_progress_bar

    from runtimes.torch.device import choose_device

    disable_progress_bar()
    return choose_device("auto" if name.startswith("hpu") else name)


def model_type(folder: Path, setting: str, kind: str) -> Any:
    if not (folder / "config.json").is_file():
        raise Refused(f"{setting}: {folder} has no config.json: it is no {kind} folder")
    return read_config(folder / "config.json").get("model_type")


def check_parts(folder: Path, setting: str, parts: Mapping[str, tuple[str, ...]]) -> None:
    for part, files in parts.items():
        if not any((folder / name).is_file() for name in files):
            raise Refused(f"{setting}: {folder} has no {' or '.join(files)} ({part})")
    with naming(setting):
        if not weight_shapes(folder):  # but an index
            raise Refused(f"{folder} has no .safetensors weights: fetch them")


VERSION = 1
Split = Literal["holdout", "train"]


@dataclass(frozen=True)
class ReferenceFeatures:
    """The features by one encoder, and which pictures they belong to."""

    features: Float32  # [M, D]
    pictures: tuple[tuple[str, str], ...]  # (path of the tar in the images artifact, sample key)
    shard: Shard


def reference_features(
    store: Store,
    models: Mapping[str, ImageEncoder],
    digests: Mapping[str, str],
    facts: Mapping[str, Any],
    pictures: Iterable[tuple[str, Sample, Picture]],
    tell: Callable[[int], None] = lambda done: None,
) -> dict[str, ReferenceFeatures]:
    """Features by each encoder, in the order of the pictures.

    Stored features are reused; one pass over the pictures computes the others.

    Args:
        digests: what identifies each encoder, such as its sha256.
        facts: all that selects and transforms the pictures, for the key.
        pictures: (path of the tar, sample, transformed picture), read only if features are missing.
        tell: called after each batch, with the number of pictures so far.
    """
    keys = {
        name: digest_json({"features": VERSION, "encoder": digests[name], **facts})
        for name in models
    }
    shards = {name: store.shard(STAGE, key) for name, key in keys.items()}
    missing = {name: models[name] for name, shard in shards.items() if shard is None}
    if missing:
        named, computed = _compute(missing, pictures, tell)
        shards |= {name: _commit(store, keys[name], f, named) for name, f in computed.items()}
    return {name: _read(store, shard) for name, shard in shards.items() if shard is not None}


def _compute(
    models: Mapping[str, ImageEncoder],
    pictures: Iterable[tuple[str, Sample, Picture]],
    tell: Callable[[int], None],
) -> tuple[list[tuple[str, str]], dict[str, Float32]]:
    """The name of each picture, and its features [M, D] by each model."""
    rows: dict[str, list[Float32]] = {name: [] for name in models}
    names: list[tuple[str, str]] = []
    for batch in batches(pictures, BATCH):
        names += [(path, sample.key) for path, sample, _ in batch]
        for name, model in models.items():
            rows[name].append(model.images([picture for *_, picture in batch]))
        tell(len(names))
    none = [np.zeros((0, 0), np.float32)]
    return names, {name: np.concatenate(blocks or none) for name, blocks in rows.items()}


def _commit(store: Store, key: str, features: Float32, pictures: list[tuple[str, str]]) -> Shard:
    with tempfile.TemporaryDirectory(prefix="kiln-features-") as folder:
        path = Path(folder) / "features.safetensors"
        metadata = {"pictures": json.dumps(pictures)}
        save_file({"features": np.ascontiguousarray(features)}, path, metadata)
        local = {".safetensors": str(path)}
        return store.commit_shard(STAGE, key, local, {"features": len(features)})


def _read(store: Store, shard: Shard) -> ReferenceFeatures:
    (entry,) = shard.files
    url = store.shard_url(STAGE, entry.path)
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as local:
        with open_checked(url, entry.sha256) as stream:
            while block := stream.read(2**20):
                local.write(block)
        local.flush()
        with safe_open(local.name, framework="numpy") as tensors:
            pictures = json.loads(tensors.metadata()["pictures"])
            features = tensors.get_tensor("features")
    return ReferenceFeatures(features, tuple((path, key) for path, key in pictures), shard)
