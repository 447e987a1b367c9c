"""Missing targets and configs are found before any work."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.errors import Refused
from configs.load_recipe import load_recipe
from configs.settings.train import Train
from runtimes.pipeline_folder.folder import Base, trained_config
from tasks import train
from tasks.train import check, notes_of_kohya


def test_adapter_targets_are_checked_in_the_bases_files(tiny_sdxl: Path) -> None:
    lora = {"train.method": "lora"}
    for targets in ("attention", "linear", "all", ["conv1", "to_q"]):
        check(
            load_recipe("digits", {**lora, "train.lora.target_modules": targets}),
            Base.open(tiny_sdxl),
        )
    recipe = load_recipe("digits", {**lora, "train.lora.target_modules": ["to_x"]})
    with pytest.raises(Refused, match=r"no layer of the unet ends in to_x \(there are: "):
        check(recipe, Base.open(tiny_sdxl))


def test_adapters_without_a_place_in_kohyas_layout_are_known_before_the_run(
    tiny_flux: Path, tiny_flux2: Path
) -> None:
    def noted(recipe: str, base: Path, given: dict[str, Any]) -> str:
        notes = notes_of_kohya(load_recipe(recipe, given).train, Base.open(base))
        return "".join(found.words for found in notes)

    def warned(**lora: object) -> str:
        given = {f"train.lora.{name}": value for name, value in lora.items()}
        return noted("flux-lora", tiny_flux, given)

    assert warned() == warned(target_modules=["attn.to_q", "proj_out", "context_embedder"]) == ""
    found = warned(target_modules=["to_q", "norm_out.linear"])
    assert "norm_out.linear has no name in the layout of kohya's sd-scripts" in found
    assert "DoRA adapts a part of it" in warned(target_modules=["attn.to_q"], dora=True)
    modulated = {"train.lora.target_modules": ["to_q", "norm_out.linear"]}
    found = noted("flux2-klein", tiny_flux2, modulated)
    assert "norm_out.linear has no name in the layout of musubi-tuner" in found


def test_a_guidance_scale_without_effect_is_refused(
    tiny_flux: Path, tiny_flux_schnell: Path, tiny_flux2_distilled: Path, tiny_sdxl: Path
) -> None:
    guided = load_recipe("flux-schnell", {"evaluate.guidance_scale": 3.5})
    with pytest.raises(Refused, match=r"evaluate\.guidance_scale: this model takes no guid"):
        check(guided, Base.open(tiny_flux_schnell))
    with pytest.raises(Refused, match=r"evaluate\.guidance_scale: this model is distilled"):
        check(load_recipe("flux2-klein"), Base.open(tiny_flux2_distilled))
    check(guided, Base.open(tiny_flux))
    check(load_recipe("flux-schnell"), Base.open(tiny_flux_schnell))
    check(load_recipe("digits", {"evaluate.guidance_scale": 3.5}), Base.open(tiny_sdxl))
    check(
        load_recipe("flux-schnell", {"evaluate.true_cfg_scale": 3.5}), Base.open(tiny_flux_schnell)
    )
    with pytest.raises(Refused, match=r"evaluate\.true_cfg_scale: it is for flux, not sdxl"):
        check(load_recipe("digits", {"evaluate.true_cfg_scale": 3.5}), Base.open(tiny_sdxl))


@pytest.mark.parametrize("name", ["sd3", "flux", "flux2", "z_image", "qwen_image"])
def test_token_ids_of_a_language_model_are_refused(
    name: str, request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue(f"tiny_{name}")
    check(load_recipe("digits"), Base.open(base))
    with pytest.raises(
        Refused,
        match=rf"^encode\.text: token_ids .* {name}'s text_encoder\w* is a language model, .*: set "
        "embeddings$",
    ):
        check(load_recipe("digits", {"encode.text": "token_ids"}), Base.open(base))


def test_token_ids_are_for_families_with_clip_alone(tiny_sd: Path, tiny_sdxl: Path) -> None:
    for base in (tiny_sd, tiny_sdxl):
        check(load_recipe("digits", {"encode.text": "token_ids"}), Base.open(base))


@pytest.mark.parametrize("name", ["sd3", "flux", "flux2", "z_image", "qwen_image"])
def test_chunks_and_weights_are_for_families_with_clip_alone(
    name: str, request: pytest.FixtureRequest, tiny_sd: Path
) -> None:
    base = request.getfixturevalue(f"tiny_{name}")
    recipe = load_recipe("digits")
    for reading in ({"max_tokens": 225}, {"emphasis": "weights"}):
        check(recipe, Base.open(tiny_sd, **reading))
        setting = {"max_tokens": "encode.max_tokens", "emphasis": "encode.captions.emphasis"}
        with pytest.raises(Refused, match=f"family {name} reads captions as") as error:
            check(recipe, Base.open(base, **reading))
        assert str(error.value).startswith(f"{setting[next(iter(reading))]}: ")


def test_weights_in_captions_need_stored_embeddings() -> None:
    weights = {"encode.captions": {"emphasis": "weights"}}
    load_recipe("digits", weights)
    for other in ({"encode.text": "token_ids"}, {"train.train_text_encoder": True}):
        with pytest.raises(Refused, match=r"encode\.captions\.emphasis: weights multiplies stored"):
            load_recipe("digits", weights | other)


@pytest.mark.parametrize("name", ["guidance_embeds", "cap_feat_dim"])
def test_a_replacement_has_the_inputs_of_the_base(name: str) -> None:
    base = {"_class_name": "FluxTransformer2DModel", name: False}
    settings = Train(init="random")
    assert trained_config(base, settings, {"_class_name": base["_class_name"]})
    with pytest.raises(Refused, match=f"train.denoiser_config: {name} is 24, the base's is"):
        trained_config(base, settings, {**base, name: 24})


def test_the_content_of_a_denoiser_config_is_in_the_key(tiny_sdxl: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    recipe = load_recipe("digits", {"train.init": "random", "train.denoiser_config": str(path)})
    with pytest.raises(Refused, match=r"config\.json: not there; a model's config was expected"):
        check(recipe, Base.open(tiny_sdxl))
    path.write_text('{"a": 1}')
    with pytest.raises(Refused, match=r"train\.denoiser_config: _class_name is missing"):
        check(recipe, Base.open(tiny_sdxl))
    path.write_text((tiny_sdxl / "unet/config.json").read_text())
    check(recipe, Base.open(tiny_sdxl))
    own = json.loads(path.read_text())
    path.write_text(json.dumps({**own, "norm_num_groups": 7}))
    with pytest.raises(Refused, match=r"train\.denoiser_config makes no denoiser: num_channels"):
        check(recipe, Base.open(tiny_sdxl))
    path.write_text('{"a": 1}')
    one = train.settings_for_key(recipe)
    moved = tmp_path / "moved.json"
    moved.write_text('{ "a": 1 }')
    named = {"train.init": "random", "train.denoiser_config": str(moved)}
    assert train.settings_for_key(load_recipe("digits", named)) == one
    path.write_text('{"a": 2}')
    assert train.settings_for_key(recipe) != one
