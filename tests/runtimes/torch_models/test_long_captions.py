"""CLIP's embeddings of long captions and of weights in parentheses equal sd-scripts'."""

from collections.abc import Callable
from pathlib import Path

import long_captions
import numpy as np
import pytest
import torch

from runtimes.families import family_named
from runtimes.pipeline_folder.folder import Base
from runtimes.torch_models.tokenize import text_tokenizers, weighted_parts
from runtimes.torch_models.vae_text_encoders import Encoder, FrozenTextEncoders

pytestmark = pytest.mark.slow
#: The tiny tokenizers have a token a letter: ends in the first chunk, at its end, in the others.
LENGTHS = {"empty": 0, "short": 20, "full": 75, "over": 76, "two": 150, "last": 224, "cut": 300}
CAPTIONS = {name: ("sks dog, " * 60).replace(" ", "")[:count] for name, count in LENGTHS.items()}


@pytest.mark.parametrize("name", ["tiny-sd", "tiny-sdxl"])
@pytest.mark.parametrize("max_tokens", [150, 225])
def test_chunks_have_the_embeddings_of_sd_scripts(
    name: str, max_tokens: int, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(name)
    base = Base.open(folder, max_tokens=max_tokens)
    chunks = {150: 2, 225: 3}[max_tokens]
    states, pooled = Encoder(base).texts([*CAPTIONS.values()])
    assert states.shape == (len(CAPTIONS), 2 + max_tokens, base.encoders["prompt_dim"])
    assert base.encoders["tokens"] == base.encoders["caption_tokens"] == 2 + max_tokens
    for row, caption in enumerate(CAPTIONS.values()):
        theirs, their_pooled = long_captions.encode(folder, [(caption, 1.0)], chunks)
        np.testing.assert_allclose(states[row], theirs, atol=1e-5)
        if their_pooled is not None:
            np.testing.assert_allclose(pooled[row], their_pooled, atol=1e-5)
    assert np.abs(states[3] - states[2])[76:].max() > 0.1, "the second chunk counts"
    plain, _ = Encoder(Base.open(folder)).texts(["a cat"])
    assert plain.shape[1] == 77


def test_token_ids_of_a_chunk_are_those_of_sd_scripts(tiny_sdxl: Path) -> None:
    base = Base.open(tiny_sdxl, max_tokens=225)
    for tokenizer in text_tokenizers(base):
        ids, _ = tokenizer.ids([*CAPTIONS.values()])
        assert ids.shape == (len(CAPTIONS), 3 * 77) and ids.shape[1] == base.input_ids_length
        for row, caption in zip(ids, CAPTIONS.values(), strict=True):
            theirs = long_captions.token_ids(tokenizer._tokenizer, [(caption, 1.0)], 3)
            np.testing.assert_array_equal(row.reshape(3, 77), theirs)
        assert tokenizer.counts([*CAPTIONS.values()]) == [2 + n for n in LENGTHS.values()]


def test_a_step_encodes_chunks_of_token_ids_with_gradients(tiny_sdxl: Path) -> None:
    """As a training of text encoders, and of stored token ids, computes them."""
    encoder = Encoder(Base.open(tiny_sdxl, max_tokens=150))
    models = [model for _, model in encoder._clip]
    ids = torch.from_numpy(encoder.input_ids([*CAPTIONS.values()]))
    expected, expected_pooled = encoder.texts([*CAPTIONS.values()])
    states, pooled = FrozenTextEncoders(models).encode(family_named("sdxl"), torch.float32, ids)
    np.testing.assert_allclose(states, expected, rtol=0.01, atol=0.01)  # bf16
    np.testing.assert_allclose(pooled, expected_pooled, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("max_tokens", [77, 225])
@pytest.mark.parametrize("name", ["tiny-sd", "tiny-sdxl"])
def test_weights_multiply_the_embeddings_of_their_tokens(
    name: str, max_tokens: int, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model(name)
    base = Base.open(folder, max_tokens=max_tokens, emphasis="weights")
    words = "aquickbrownfox" * 6
    captions = [f"a (red:1.5) {words} [fox], (big (cat))", r"plain \(text\)"]
    parts = [
        [("a ", 1.0), ("red", 1.5), (f" {words} ", 1.0), ("fox", 1 / 1.1), (", ", 1.0),
         ("big ", 1.1), ("cat", 1.1 * 1.1)],
        [("plain (text)", 1.0)],
    ]  # fmt: skip
    encoder = Encoder(base)
    states, _ = encoder.texts(captions)
    for row, of_caption in enumerate(parts):
        theirs, _ = long_captions.encode(folder, of_caption, max_tokens // 75)
        np.testing.assert_allclose(states[row], theirs, atol=1e-5)
    counts = encoder.token_counts(captions)["text_encoder"]
    assert counts == [2 + len(f"a red {words} fox, big cat".replace(" ", "")), 2 + 11]
    empty, _ = encoder.texts([""])
    np.testing.assert_allclose(
        empty[0], long_captions.encode(folder, [], max_tokens // 75)[0], atol=1e-5
    )
    as_text, _ = Encoder(Base.open(folder, max_tokens=max_tokens)).texts(captions)
    assert np.abs(as_text - states).max() > 0.1


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("normal text", [("normal text", 1.0)]),
        ("(open", [("open", 1.1)]),
        (r"\(a\] b\\", [("(a] b\\", 1.0)]),
        ("(one)(word)", [("oneword", 1.1)]),
        ("shot at 16:9)", [("shot at 16:9)", 1.0)]),
        ("a (((b:1.3)) [c] d", [
            ("a ", 1.0), ("b", 1.3 * 1.1 * 1.1), (" ", 1.1), ("c", 1.1 / 1.1), (" d", 1.1),
        ]),
        ("", [("", 1.0)]),
    ],
)  # fmt: skip
def test_parentheses_are_read_as_web_uis_read_them(
    prompt: str, parts: list[tuple[str, float]]
) -> None:
    found = weighted_parts(prompt)
    assert [text for text, _ in found] == [text for text, _ in parts]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in parts])


def test_keys_have_what_clip_reads_and_lack_what_it_always_read(tiny_sdxl: Path) -> None:
    plain = Base.open(tiny_sdxl)
    assert not {"max_tokens", "emphasis"} & plain.encoders.keys()
    digests = {
        Base.open(tiny_sdxl, max_tokens=tokens, emphasis=emphasis).digest_encoders()
        for tokens in (77, 150, 225)
        for emphasis in ("text", "weights")
    }
    assert len(digests) == 6 and plain.digest_encoders() in digests
