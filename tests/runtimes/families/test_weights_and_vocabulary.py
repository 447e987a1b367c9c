"""Faults of weights and tokenizers are found by headers and texts; whole models have none."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker
from tiny_models import CHARACTERS, MODELS, VOCABULARY
from transformers import CLIPConfig, CLIPTokenizer

from configs.errors import Refused
from runtimes.pipeline_folder.folder import Base
from runtimes.pipeline_folder.weights import check_tokenizers, check_vocabulary_files, check_weights
from tasks.publish.assemble import model_parts

pytestmark = pytest.mark.slow
TinyModel = Callable[[str], Path]
PIPELINES = sorted(MODELS.keys() - {"tiny-vae", "tiny-clip", "tiny-classifier"})
PAIRS = [(first, second) for first in CHARACTERS[:40] for second in CHARACTERS[:40]]


def change(path: Path, **settings: Any) -> None:
    """Change settings of a JSON file; None removes one."""
    found = json.loads(path.read_text(encoding="utf-8")) | settings
    kept = {name: value for name, value in found.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


@pytest.mark.parametrize("name", PIPELINES)
def test_a_whole_model_of_each_family_is_accepted(tiny_model: TinyModel, name: str) -> None:
    check_tokenizers(Base.open(tiny_model(name)))
    for part in model_parts(Base.open(tiny_model(name))):
        check_weights(part)


def test_a_safety_checker_sees_pictures_and_reads_no_text(tmp_path: Path) -> None:
    """Its config has the sizes of a text encoder beside those of its own weights."""
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8}
    vision |= {"num_attention_heads": 4, "intermediate_size": 48}
    text = {"hidden_size": 16, "max_position_embeddings": 9}
    config = CLIPConfig(vision_config=vision, text_config=text, projection_dim=24)
    StableDiffusionSafetyChecker(config).save_pretrained(tmp_path)
    change(tmp_path / "config.json", text_config=text)
    check_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "part", "setting"),
    [
        ("least-sd", "unet", "in_channels"),
        ("tiny-sd", "unet", "cross_attention_dim"),
        ("least-sd", "vae", "latent_channels"),
        ("least-sd", "text_encoder", "hidden_size"),
        ("least-sdxl", "text_encoder_2", "vocab_size"),
        ("tiny-sd3", "text_encoder_3", "d_model"),
        ("tiny-sd3", "transformer", "in_channels"),
        ("tiny-sd3", "transformer", "joint_attention_dim"),
        ("tiny-flux", "transformer", "in_channels"),
        ("tiny-flux2", "transformer", "joint_attention_dim"),
        ("tiny-flux2", "text_encoder", "vocab_size"),
        ("tiny-z-image", "transformer", "cap_feat_dim"),
        ("tiny-qwen-image", "transformer", "joint_attention_dim"),
        ("tiny-qwen-image", "transformer", "in_channels"),
    ],
)
def test_a_config_of_another_model_is_refused(
    tiny_model: TinyModel, tmp_path: Path, name: str, part: str, setting: str
) -> None:
    folder = Path(shutil.copytree(tiny_model(name) / part, tmp_path / part))
    change(folder / "config.json", **{setting: 7})
    with pytest.raises(Refused, match=f"has shape .*, {setting} in its config.json is 7: "):
        check_weights(folder)


def test_a_config_of_another_model_is_refused_where_its_text_model_is_nested(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    part = Path(shutil.copytree(tiny_model("tiny-qwen-image") / "text_encoder", tmp_path / "part"))
    config = part / "config.json"
    text = json.loads(config.read_text(encoding="utf-8"))["text_config"]
    change(config, text_config=text | {"hidden_size": 7})
    with pytest.raises(Refused, match=r"hidden_size in its config\.json is 7"):
        check_weights(part)


def tokenizer(folder: Path, *, lines: int = len(PAIRS)) -> Path:
    """CLIP's tokenizer in its older files, with some merges."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = dict(VOCABULARY)
    for first, second in PAIRS:
        vocabulary.setdefault(first + second, len(vocabulary))
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    merges = "".join(f"{first} {second}\n" for first, second in PAIRS[:lines])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
    return folder


ROWS = {"vocab_size": len(VOCABULARY) + len(PAIRS)}


def test_older_files_of_a_tokenizer_are_accepted(tmp_path: Path) -> None:
    check_vocabulary_files(tokenizer(tmp_path), ROWS)
    assert len(CLIPTokenizer.from_pretrained(tmp_path)) == ROWS["vocab_size"]


def test_merges_that_are_cut_at_a_line_are_refused(tmp_path: Path) -> None:
    """transformers loads them without a word, and captions fall apart into letters."""
    assert CLIPTokenizer.from_pretrained(tokenizer(tmp_path, lines=800)).tokenize("!!") == [
        "!",
        "!</w>",
    ]
    with pytest.raises(Refused, match="its 800 merges do not make its 2114 tokens"):
        check_vocabulary_files(tokenizer(tmp_path, lines=800), ROWS)


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("merges.txt", None, "merges.txt is missing, and tokenizer.json too: fetch"),
        ("vocab.json", None, "vocab.json is missing, and tokenizer.json too: fetch"),
        ("vocab.json", 900, "vocab.json: not valid JSON"),
        ("merges.txt", 2015, r"merges.txt, line \d+: no pair of tokens: fetch"),
    ],
)
def test_missing_and_truncated_files_are_refused(
    tmp_path: Path, name: str, size: int | None, words: str
) -> None:
    path = tokenizer(tmp_path) / name
    data = path.read_bytes()
    path.unlink()
    if size is not None:
        path.write_bytes(data[:size])
    with pytest.raises(Refused, match=words):
        check_vocabulary_files(tmp_path, ROWS)


@pytest.mark.parametrize("rows", [2113, 100])
def test_a_vocabulary_without_rows_in_the_text_encoder_is_refused(
    tmp_path: Path, rows: int
) -> None:
    with pytest.raises(Refused, match=f"has 2114 tokens, its text encoder {rows}"):
        check_vocabulary_files(tokenizer(tmp_path), {"vocab_size": rows})


def test_a_tokenizer_json_without_its_vocabulary_is_refused(
    tiny_sdxl: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(tiny_sdxl, tmp_path / "model"))
    change(model / "tokenizer_2/tokenizer.json", model=None)
    with pytest.raises(Refused, match=r"tokenizer_2/tokenizer\.json: it has no vocabulary"):
        check_tokenizers(Base.open(model))
    (model / "tokenizer_2/tokenizer.json").unlink()
    with pytest.raises(Refused, match=r"tokenizer_2: vocab\.json is missing"):
        check_tokenizers(Base.open(model))


@pytest.mark.parametrize("length", [20, 512, None])
def test_a_clip_tokenizer_of_another_length_is_refused(
    tiny_sdxl: Path, tmp_path: Path, length: int | None
) -> None:
    model = Path(shutil.copytree(tiny_sdxl, tmp_path / "model"))
    change(model / "tokenizer_2/tokenizer_config.json", model_max_length=length)
    said = f"model_max_length in its tokenizer_config.json is {length}, its text encoder takes 77"
    with pytest.raises(Refused, match=re.escape(said)):
        check_tokenizers(Base.open(model))
