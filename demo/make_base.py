"""Train the demo's base model from scratch: tokenizer, CLIP, VAE, UNet, pipeline, model card.

    python -m demo.make_base [--config configs/digits-base.yaml] [--out demo/base]

About ten minutes on two CPU threads. Each stage writes its result to the work folder, from which
an interrupted build resumes. A changed setting repeats the stages that depend on it. The seed fixes
every random draw, but rounding differs between machines.
"""

import argparse
import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline, UNet2DConditionModel
from safetensors.torch import load_file, save_file
from transformers import CLIPModel

from demo import world
from demo.base_card import measure, model_card
from demo.base_clip import image_processor, new_clip, text_encoders, train_clip
from demo.base_config import BaseConfig, load
from demo.base_text import Merge, learn_merges, make_tokenizer, save_tokenizer
from demo.base_unet import new_scheduler, new_unet, train_unet
from demo.base_vae import new_vae, train_vae

DEFAULT_CONFIG = Path("configs/digits-base.yaml")
DEFAULT_OUT = Path("demo/base")
DEFAULT_WORK = Path("build/digits-base")


def stage(folder: Path, recipe: dict[str, Any], build: Callable[[Path], None]) -> Path:
    """Build a stage into `folder` and return it.

    A finished folder of this recipe is reused. An unfinished one is passed to `build` with its
    files, which may resume. A folder of another recipe is emptied first.
    """
    note = folder / "stage.json"
    recipe = json.loads(json.dumps(recipe))
    before = json.loads(note.read_text()) if note.exists() else {}
    if before.get("recipe") != recipe:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        before = {}
    elif before["finished"]:
        print(f"{folder.name}: done before", flush=True)
        return folder
    unfinished = {"recipe": recipe, "finished": False, "cpu_seconds": None}
    note.write_text(json.dumps(unfinished, indent=2) + "\n")
    start = time.process_time()
    build(folder)
    # The time of an interrupted run is unknown, so the total is too.
    cpu_seconds = None if before else round(time.process_time() - start)
    finished = unfinished | {"finished": True, "cpu_seconds": cpu_seconds}
    note.write_text(json.dumps(finished, indent=2) + "\n")
    print(f"{folder.name}: built", flush=True)
    return folder


def load_clip(config: BaseConfig, folder: Path, merges: list[Merge]) -> CLIPModel:
    """The trained CLIP of a finished `clip` stage, in fp32."""
    clip = new_clip(config.clip, len(make_tokenizer(merges)))
    clip.load_state_dict(load_file(folder / "clip.safetensors"))
    return clip.eval()


def load_vae(config: BaseConfig, folder: Path) -> AutoencoderKL:
    """The trained autoencoder of a finished `vae` stage, in fp32."""
    scaling_factor = json.loads((folder / "scaling_factor.json").read_text())
    vae = new_vae(config.vae, scaling_factor)
    vae.load_state_dict(load_file(folder / "vae.safetensors"))
    return vae.eval()


def assemble(
    clip: CLIPModel, vae: AutoencoderKL, unet: UNet2DConditionModel, merges: list[Merge]
) -> StableDiffusionXLPipeline:
    """The parts as an SDXL pipeline, with zero embeddings for a missing negative prompt."""
    first, second = text_encoders(clip)
    pipe = StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=first,
        text_encoder_2=second,
        tokenizer=make_tokenizer(merges),
        tokenizer_2=make_tokenizer(merges, pad_token="!"),
        unet=unet,
        scheduler=new_scheduler(),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def build_parts(config: BaseConfig, work: Path) -> tuple[Path, Path, Path]:
    """The folders of the three trained parts: `clip`, `vae` and `unet`."""
    merges = learn_merges(world.all_captions())
    recipe: dict[str, Any] = {"seed": config.seed}

    def build_clip(folder: Path) -> None:
        clip = train_clip(config.clip, make_tokenizer(merges), config.seed)
        save_file(clip.state_dict(), folder / "clip.safetensors")

    def build_vae(folder: Path) -> None:
        vae = train_vae(config.vae, config.seed)
        save_file(vae.state_dict(), folder / "vae.safetensors")
        (folder / "scaling_factor.json").write_text(json.dumps(vae.config.scaling_factor))

    clip_recipe = recipe | {"clip": dataclasses.asdict(config.clip)}
    clip_folder = stage(work / "clip", clip_recipe, build_clip)
    vae_recipe = recipe | {"vae": dataclasses.asdict(config.vae)}
    vae_folder = stage(work / "vae", vae_recipe, build_vae)

    def build_unet(folder: Path) -> None:
        torch.manual_seed(config.seed)
        clip, vae = load_clip(config, clip_folder, merges), load_vae(config, vae_folder)
        pipe = assemble(clip, vae, new_unet(config), merges)
        unet = train_unet(pipe, config, folder / "progress.pt")
        save_file(unet.state_dict(), folder / "unet.safetensors")

    unet_recipe = clip_recipe | vae_recipe | {"unet": dataclasses.asdict(config.unet)}
    unet_recipe["styles"] = list(world.BASE_STYLES)
    return clip_folder, vae_folder, stage(work / "unet", unet_recipe, build_unet)


def _prefix_text_encoder(file: Path) -> None:
    """Rename the first text encoder's weights to SDXL's names, which transformers 4 requires."""
    weights = load_file(file)
    named = {
        name if name.startswith("text_model.") else f"text_model.{name}": value
        for name, value in weights.items()
    }
    save_file(named, file, metadata={"format": "pt"})


def save_base(
    pipe: StableDiffusionXLPipeline, clip: CLIPModel, merges: list[Merge], out: Path
) -> None:
    """Write the pipeline and the evaluator CLIP as fp16 safetensors."""
    pipe.to(dtype=torch.float16).save_pretrained(out)
    _prefix_text_encoder(out / "text_encoder" / "model.safetensors")
    evaluator = out / "evaluator"
    clip.to(torch.float16).save_pretrained(evaluator)
    image_processor().save_pretrained(evaluator)
    for tokenizer, folder in (
        (pipe.tokenizer, out / "tokenizer"),
        (pipe.tokenizer_2, out / "tokenizer_2"),
        (pipe.tokenizer, evaluator),
    ):
        save_tokenizer(tokenizer, merges, folder)


def make_base(config: BaseConfig, work: Path, out: Path) -> None:
    """Build every part, write the folder `out` whole, measure it as written, and describe it."""
    clip_folder, vae_folder, unet_folder = build_parts(config, work)
    merges = learn_merges(world.all_captions())
    clip, vae = load_clip(config, clip_folder, merges), load_vae(config, vae_folder)
    unet = new_unet(config)
    unet.load_state_dict(load_file(unet_folder / "unet.safetensors"))
    cpu_seconds = {
        folder.name: json.loads((folder / "stage.json").read_text())["cpu_seconds"]
        for folder in (clip_folder, vae_folder, unet_folder)
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        new = Path(scratch) / "new"
        save_base(assemble(clip, vae, unet, merges), clip, merges, new)
        figures = measure(new, config)
        (new / "README.md").write_text(model_card(config, figures, cpu_seconds))
        if out.exists():
            shutil.rmtree(out)
        new.rename(out)
    print(json.dumps(figures, indent=2))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Build the demo's base model from nothing.")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="the model folder to write")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="intermediate results")
    arguments = parser.parse_args()
    make_base(load(arguments.config), arguments.work, arguments.out)


if __name__ == "__main__":
    main()
