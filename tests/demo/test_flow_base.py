"""The committed flow base loads as any FLUX folder does, and draws what it is asked for."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FluxPipeline
from digit_prompts import all_captions, judge, prompts
from numpy.typing import NDArray
from safetensors.torch import load_file

from configs.load_recipe import load_recipe
from demo.captions import BASE_STYLES, EDIT_TEMPLATES, NEW_STYLE, STYLES
from demo.make_base import BASE
from demo.make_flow_base import FLOW_BASE, make_flow_base
from runtimes.pipeline_folder.folder import Base

EDIT_BASE = FLOW_BASE.with_name("edit_base")


def draw(pipe: FluxPipeline, asked: Sequence[str]) -> NDArray[np.uint8]:
    """Pictures [N, H, W, 3], one per prompt, as the card's code draws them."""
    pipe.set_progress_bar_config(disable=True)
    drawn = pipe(
        list(asked),
        negative_prompt=[""] * len(asked),
        true_cfg_scale=3.0,
        num_inference_steps=20,
        height=32,
        width=32,
        max_sequence_length=16,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
    ).images
    return (drawn * 255).round().astype(np.uint8)


@pytest.fixture(scope="module")
def pipe() -> FluxPipeline:
    return FluxPipeline.from_pretrained(FLOW_BASE)


def test_its_own_files_are_small() -> None:
    files = [path for path in FLOW_BASE.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < 5_000_000


def test_the_parts_of_the_other_base_are_links_to_it() -> None:
    links = {
        str(path.relative_to(FLOW_BASE)): path.resolve()
        for path in FLOW_BASE.rglob("*")
        if path.is_symlink()
    }
    assert links == {name: BASE / name for name in links}
    assert all(path.is_file() for path in links.values())
    weights = {name for name in links if name.endswith(".safetensors")}
    assert weights == {"text_encoder/model.safetensors", "vae/diffusion_pytorch_model.safetensors"}
    changed = {"vae": {"shift_factor": 0.0}, "text_encoder": {"dtype": "float32"}}
    for part, change in changed.items():
        ours, theirs = (
            json.loads((folder / part / "config.json").read_text()) for folder in (FLOW_BASE, BASE)
        )
        assert ours == theirs | change, part


def test_the_card_opens_with_front_matter() -> None:
    front, body = (FLOW_BASE / "README.md").read_text().removeprefix("---\n").split("\n---\n")
    assert "license: apache-2.0" in front and "pipeline_tag: text-to-image" in front
    assert "python -m demo.make_flow_base" in body and "kiln run digits-flow-base" in body


def test_the_t5_knows_every_caption_in_sixteen_tokens(pipe: FluxPipeline) -> None:
    ids = pipe.tokenizer_2(all_captions()).input_ids
    assert len({tuple(row) for row in ids}) == len(all_captions())
    assert max(map(len, ids)) <= 16 == Base.open(FLOW_BASE).text_length
    assert len(pipe.tokenizer_2) == pipe.text_encoder_2.config.vocab_size
    assert pipe.tokenizer_2.unk_token_id not in {token for row in ids for token in row}


def test_the_edit_base_is_this_base_in_the_layout_of_kontext() -> None:
    own = {str(path.relative_to(EDIT_BASE)) for path in EDIT_BASE.rglob("*") if path.is_file()}
    links = {name for name in own if (EDIT_BASE / name).is_symlink()}
    assert own - links == {"README.md", "model_index.json"}
    targets = {name: (FLOW_BASE / name).resolve() for name in links}
    assert {name: (EDIT_BASE / name).resolve() for name in links} == targets
    theirs = {str(path.relative_to(FLOW_BASE)) for path in FLOW_BASE.rglob("*") if path.is_file()}
    assert own == theirs
    assert Base.open(EDIT_BASE).family.name == "flux_kontext"


def test_instructions_of_edits_fit_its_tokens(pipe: FluxPipeline) -> None:
    texts = [
        template.format(ink=style.ink, paper=style.paper)
        for template in EDIT_TEMPLATES
        for style in STYLES
    ]
    ids = pipe.tokenizer_2(texts).input_ids
    assert max(map(len, ids)) <= 16
    assert pipe.tokenizer_2.unk_token_id not in {token for row in ids for token in row}


@pytest.mark.parametrize("name", ["digits-flow", "digits-flow-base"])
def test_its_recipes_draw_at_the_size_of_the_pictures(name: str) -> None:
    recipe = load_recipe(name)
    assert Path(recipe.model.path) == FLOW_BASE
    assert Base.open(FLOW_BASE).family.name == "flux"
    assert (recipe.evaluate.height, recipe.evaluate.width) == (32, 32)
    assert recipe.train.caption_dropout_rate > 0, "guidance needs the empty caption"


@pytest.mark.extended
@pytest.mark.slow
def test_it_draws_the_styles_it_knows(pipe: FluxPipeline) -> None:
    asked = prompts(BASE_STYLES, 40)
    right = judge(draw(pipe, asked), asked)
    assert right["digit"].mean() >= 0.9
    assert right["style"].mean() >= 0.9


@pytest.mark.extended
@pytest.mark.slow
def test_it_does_not_draw_the_new_style_before_fine_tuning(pipe: FluxPipeline) -> None:
    asked = prompts((NEW_STYLE,), 40)
    assert judge(draw(pipe, asked), asked)["style"].mean() < 0.5


@pytest.mark.slow
def test_a_base_made_of_a_few_steps_has_new_weights_of_the_same_shapes(tmp_path: Path) -> None:
    remade = tmp_path / "base"
    make_flow_base(remade, t5_steps=2)
    assert not [path for path in remade.rglob("*") if path.is_symlink()]
    for part in ("text_encoder_2/model", "transformer/diffusion_pytorch_model"):
        ours, shipped = (load_file(f / f"{part}.safetensors") for f in (remade, FLOW_BASE))
        assert ours.keys() == shipped.keys()
        assert all(w.dtype == torch.float16 == shipped[n].dtype for n, w in ours.items())
        assert all(w.shape == shipped[n].shape for n, w in ours.items())
        kept = [n for n, w in ours.items() if w.ndim > 1 and torch.equal(w, shipped[n])]
        assert not kept, part
    FluxPipeline.from_pretrained(remade)
