"""Settings of the section `caption`: the captioner, its prompts and the checks of its captions."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import PositiveFloat, PositiveInt

from configs.settings.base_section import (
    Dtype,
    Fraction,
    ModelPlace,
    NullDrops,
    Section,
    StoredUrl,
    setting,
)

#: Columns of a table of captions that are no prompts, and the name of the source's captions.
RESERVED_PROMPTS = {"cut", "id", "reasons", "row", "source", "tar"}


class Endpoint(Section):
    """Servers with OpenAI's chat completions, such as vLLM, that share the pictures.

    The key, if they need one, is that of KILN_CAPTION_KEY, or of Prefect's secret block
    `caption-key`, of a team `caption-key-TEAM`.
    """

    urls: tuple[StoredUrl, ...] = setting(min_length=1, not_in_key="execution")
    """Base URLs, such as http://10.0.0.5:8000/v1, to which /chat/completions is added. All serve
    the same model."""
    model: str = setting(min_length=1)
    """Name of the model in requests. Another model under the same name is not noticed."""
    max_connections: PositiveInt = setting(16, not_in_key="execution")
    """Maximum concurrent requests of a process."""
    max_requests: PositiveInt | None = setting(None, not_in_key="limit")
    """Budget: requests of a process in a run, retries included. Above it the stage fails, and
    another run continues; null: no limit."""
    retries: int = setting(5, ge=0, not_in_key="execution")
    """Retries of a caption after an answer 408, 409, 429 or 5xx, or a lost connection."""
    backoff: float = setting(0.5, ge=0, not_in_key="execution")
    """Wait before the first retry, in seconds; it doubles per retry. A Retry-After header extends
    it."""
    timeout: PositiveFloat = setting(120.0, not_in_key="execution")
    """Timeout of a request, in seconds."""

    def faults(self) -> Iterator[str]:
        for url in self.urls:
            if not re.match(r"https?://[^/]", url, re.IGNORECASE):
                yield f"{url} is no URL of a server: write it as http://HOST:PORT/v1"


#: As the names of Unicode's letters begin.
Script = Literal[
    "arabic",
    "cjk",
    "cyrillic",
    "devanagari",
    "greek",
    "hangul",
    "hebrew",
    "hiragana",
    "katakana",
    "latin",
    "thai",
]


class CaptionChecks(Section):
    """What makes a caption bad; `on_bad` says what replaces it."""

    refusals: tuple[str, ...] = (
        *("i cannot", "i can't", "i can not", "i am unable", "i'm unable", "i am not able"),
        *("i'm not able", "i'm sorry", "i am sorry", "sorry, ", "unfortunately, i", "as an ai"),
    )
    """Beginnings of a sentence by which the captioner refuses; capitals do not matter."""
    max_repetition: Fraction = 0.5
    """Maximum fraction of a caption's sequences of 12 characters that occurred before in it, 0 to
    1."""
    cut_off: bool = True
    """Whether a caption that is cut off at `max_new_tokens` is bad."""
    max_characters: PositiveInt = 2000
    """Maximum length of a caption, in characters."""
    scripts: tuple[Script, ...] = ()
    """Scripts of the language's letters, such as `[latin]`: a caption is bad if more than a tenth
    of its letters are of others. `[]`: any."""
    min_likeness: float | None = setting(None, ge=-100, le=100)
    """Minimum of 100 times the cosine of the CLIP embeddings of caption and picture; null: no
    check. It needs a describer of kind clip; the first one counts."""


class Caption(Section):
    """Caption pictures by a vision-language model, in `transformers` or behind an endpoint."""

    model: ModelPlace = setting("Qwen/Qwen3-VL-2B-Instruct", not_in_key="content")
    """Vision-language model of `transformers` (AutoModelForImageTextToText): hub id, folder or
    fsspec URL. The default has 2 billion parameters (4 GB in bfloat16), licence Apache-2.0."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    endpoint: Endpoint | None = None
    """Servers that caption, instead of `model` on this machine; null: none."""
    prompts: Annotated[dict[str, str], NullDrops] = setting(
        {"caption": "Describe this picture in one sentence."}, min_length=1
    )
    """Name -> what the captioner is asked. Each gives a caption, and training draws one of a
    picture's captions in each step. null instead of a prompt drops that of the extended recipe."""
    only_missing: bool = False
    """Caption the pictures that have no caption in the source; the others keep theirs, after
    `prefix`."""
    keep_source: bool = setting(False, needs="only_missing == false")
    """Keep the source's captions as further ones."""
    prefix: str = ""
    """Text before each caption that is trained on, such as a trigger word: `a photo of sks man, `.
    It is also the caption of a picture that has no other."""
    on_bad: Literal["source", "blank", "drop"] = "source"
    """What a picture gets if each of its captions is bad. source: the source's captions; blank: an
    empty one; drop: the picture is not trained on."""
    checks: CaptionChecks = CaptionChecks()
    max_bad: Fraction = setting(0.5, not_in_key="limit")
    """Maximum fraction of bad captions, 0 to 1. Above it the stage fails."""
    max_new_tokens: PositiveInt = 256
    """Maximum length of a caption, in tokens of the captioner."""
    temperature: float = setting(0.0, ge=0)
    """Temperature of the decoding; 0: greedy, the most probable token."""
    seed: int = setting(0, ge=0, needs="temperature")
    """Seed of the decoding."""
    image_size: PositiveInt = 768
    """Maximum side of the picture that the captioner sees, in pixels; smaller pictures keep their
    size."""
    batch_size: PositiveInt = setting(8, not_in_key="execution", needs="endpoint == null")
    """Pictures per call of `model`."""
    device: str = setting("auto", not_in_key="execution", needs="endpoint == null")
    """Device of `model`: see train.device; without a number, all devices of its kind."""
    processes: PositiveInt | None = setting(None, not_in_key="execution", needs="endpoint == null")
    """Captioner processes per machine; null: one per accelerator, one on a CPU."""
    hosts: PositiveInt | None = setting(None, not_in_key="execution", needs="endpoint == null")
    """Machines of the recipe's cluster that caption; null: the machine of the flow."""
    dtype: Dtype = setting("bfloat16", needs="endpoint == null")
    """Compute precision of `model`."""
    beam: dict[str, Any] = setting({}, not_in_key="execution")
    """Beam pipeline options of this stage, over those of section `beam`."""

    @property
    def places(self) -> dict[str, str]:
        """Dotted setting -> folder, hub id or URL of the model, or URLs of the servers."""
        if self.endpoint is None:
            return {"caption.model": self.model}
        return {f"caption.endpoint.urls.{n}": url for n, url in enumerate(self.endpoint.urls)}

    def faults(self) -> Iterator[str]:
        for name, prompt in self.prompts.items():
            if not re.fullmatch("[a-z][a-z0-9_]*", name) or name in RESERVED_PROMPTS:
                yield (
                    f"prompts.{name}: a name has small letters, digits and _, and is none of "
                    f"{', '.join(sorted(RESERVED_PROMPTS))}"
                )
            if not prompt.strip():
                yield f"prompts.{name} is empty: write what the captioner is asked"
