"""A vision-language model of `transformers` on one device: pictures and a prompt in, texts out."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from configs.errors import Refused, naming
from configs.secrets import one_line
from runtimes.data.loader import Prefetch
from runtimes.pipeline_folder.folder import read_config
from runtimes.pipeline_folder.weights import weight_shapes
from runtimes.torch_models.qwen_pictures import load_image_processor, read_with_pictures
from tasks.caption.captioner import Answer, Decoding, Keep, Question
from tasks.evaluate.features import batches

#: Models whose own processor wants a video processor, and that one wants torchvision.
QWEN = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}


class VisionLanguageModel:
    """A model with its processor, in inference mode; thread-safe.

    Args:
        folder: local `transformers` folder that holds both.
        device: torch device; "auto" selects the best device.
        dtype: compute precision.
        prompts: name -> prompt.
        batch_size: pictures per call.

    Raises:
        Refused: a part is missing or fails to load.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        dtype: str,
        decoding: Decoding,
        prompts: Mapping[str, str],
        batch_size: int,
    ) -> None:
        import torch
        from transformers import AutoModelForImageTextToText
        from transformers.utils.logging import disable_progress_bar, set_verbosity_error

        from runtimes.torch.device import choose_device

        disable_progress_bar()
        set_verbosity_error()  # a model's own settings of sampling are unused when greedy
        self._device = choose_device(device)
        self._decoding = decoding
        self._prompts = prompts
        self._batch_size = batch_size
        self._in_use = threading.Lock()
        with _loading(folder):
            self._processor = processor_of(folder)
            model = AutoModelForImageTextToText.from_pretrained(
                folder, dtype=getattr(torch, dtype), use_safetensors=True, local_files_only=True
            )
        self._model: Any = model.to(self._device).eval().requires_grad_(False)
        ends = self._model.generation_config.eos_token_id
        self._ends = torch.tensor(ends if isinstance(ends, list) else [ends])

    def caption(self, questions: Iterable[Question], keep: Keep) -> None:
        """See Captioner."""
        with Prefetch(batches(questions, self._batch_size), depth=1) as ready:
            for batch in ready:
                for name, prompt in self._prompts.items():
                    asked_of = [question for question in batch if name in question.prompts]
                    if asked_of:
                        with self._in_use:
                            answers = self.answers([q.picture for q in asked_of], prompt)
                        for question, answer in zip(asked_of, answers, strict=True):
                            keep(question.row, name, answer)

    def answers(self, pictures: Sequence[Image.Image], prompt: str) -> list[Answer]:
        """An answer for each picture; of a batch the same as of one picture after another."""
        import torch

        decoding = self._decoding
        options: dict[str, Any] = {"do_sample": decoding.temperature > 0}
        if decoding.temperature:
            options["temperature"] = decoding.temperature
            torch.manual_seed(decoding.seed)
        inputs = self._processor(pictures, prompt).to(self._device)
        with torch.inference_mode():
            output = self._model.generate(
                **inputs, **options, max_new_tokens=decoding.max_new_tokens
            )
        tokens = output[:, inputs["input_ids"].shape[1] :].cpu()  # [B, T]
        is_cut = ~torch.isin(tokens, self._ends).any(dim=1)
        texts = self._processor.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [Answer(text, cut) for text, cut in zip(texts, is_cut.tolist(), strict=True)]


def check_vision_language(folder: Path) -> None:
    """Raise Refused unless a folder has such a model with its processor; no weights are loaded."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    with naming("caption.model"):
        kind = read_config(folder / "config.json").get("model_type")
        if kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            raise Refused(f"{folder} holds no vision-language model (its model_type is {kind})")
        if not weight_shapes(folder):
            raise Refused(f"{folder} has no .safetensors weights: fetch them")
    with _loading(folder):
        asked(processor_of(folder).templated, "")


class Processor:
    """The model's inputs of RGB pictures and a prompt, padded on the left."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoProcessor

        self.templated = AutoProcessor.from_pretrained(folder, local_files_only=True)
        self.tokenizer = self.templated.tokenizer
        self.tokenizer.padding_side = "left"

    def __call__(self, pictures: Sequence[Image.Image], prompt: str) -> Any:
        text = asked(self.templated, prompt)
        images = [[picture] for picture in pictures]
        texts = [text] * len(images)
        return self.templated(text=texts, images=images, padding=True, return_tensors="pt")


class QwenProcessor:
    """As Qwen's own processor, without its part for videos."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._images = load_image_processor(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, padding_side="left"
        )
        if self.tokenizer.chat_template is None:  # transformers 4 kept it in a file of its own
            template = read_config(folder / "chat_template.json")
            self.tokenizer.chat_template = template["chat_template"]
        self.templated = self.tokenizer
        self._image_token = self.tokenizer.convert_ids_to_tokens(
            read_config(folder / "config.json")["image_token_id"]
        )

    def __call__(self, pictures: Sequence[Image.Image], prompt: str) -> Any:
        from transformers import BatchFeature

        texts = [asked(self.tokenizer, prompt)] * len(pictures)
        own = [[picture] for picture in pictures]
        about = (self.tokenizer, self._images, texts, own, self._image_token)
        return BatchFeature(read_with_pictures(*about))


def processor_of(folder: Path) -> Processor | QwenProcessor:
    """The processor of a model's folder. Raises as transformers does."""
    kind = read_config(folder / "config.json").get("model_type")
    return QwenProcessor(folder) if kind in QWEN else Processor(folder)


def asked(templated: Any, prompt: str) -> str:
    """The text of a chat about one picture, by the template of a processor or tokenizer."""
    content = [{"type": "image"}, {"type": "text", "text": prompt}]
    chat = [{"role": "user", "content": content}]
    return str(templated.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))


@contextmanager
def _loading(folder: Path) -> Iterator[None]:
    try:
        yield
    except Refused:
        raise
    except Exception as error:  # each architecture has its own
        raise Refused(
            f"{folder} does not load as a vision-language model: {one_line(error)}",
            setting="caption.model",
        ) from None
