"""Train the T5 of a flow base like `demo/flow_base`, from random weights.

    python -m demo.make_flow_base build/flow_base

The new folder has the VAE and the CLIP of `demo/base`, and the configs and tokenizers of
`demo/flow_base`. Its transformer stays random: the recipe `digits-flow-base` trains it.
"""

import argparse
import shutil
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel, T5TokenizerFast

from demo import captions
from demo.captions import STYLES
from demo.make_base import train

FLOW_BASE = Path(__file__).parent / "flow_base"
T5_STEPS = 200
T5_BATCH = 128


def make_flow_base(out: Path, t5_steps: int = T5_STEPS) -> None:
    """Write a base to the new folder `out`, as fp16 safetensors.

    Raises:
        FileExistsError: `out` exists.
    """
    torch.manual_seed(0)
    shutil.copytree(FLOW_BASE, out, ignore=shutil.ignore_patterns("README.md"))
    _train_t5(out, t5_steps)
    config = FluxTransformer2DModel.load_config(out / "transformer")
    FluxTransformer2DModel.from_config(config).half().save_pretrained(out / "transformer")


def _train_t5(out: Path, steps: int) -> None:
    """Train the T5 to name a caption's digit, ink and paper, by a linear layer on its mean state.

    The linear layer is not stored.
    """
    rng = np.random.default_rng(0)
    tokenizer = T5TokenizerFast.from_pretrained(out / "tokenizer_2")
    config = T5Config.from_pretrained(out / "text_encoder_2")
    t5 = T5EncoderModel(config)
    inks = sorted({style.ink for style in STYLES})
    papers = sorted({style.paper for style in STYLES})
    facts = np.array([(inks.index(style.ink), papers.index(style.paper)) for style in STYLES])
    sizes = (len(captions.WORDS), len(inks), len(papers))
    head = nn.Linear(config.d_model, sum(sizes))

    def loss() -> Tensor:
        digit = rng.integers(len(captions.WORDS), size=T5_BATCH)
        style = rng.integers(len(STYLES), size=T5_BATCH)
        texts = [captions.caption(int(d), int(s), rng) for d, s in zip(digit, style, strict=True)]
        ids = tokenizer(texts, padding="max_length", return_tensors="pt").input_ids
        logits = head(t5(ids).last_hidden_state.mean(1)).split(sizes, 1)
        answers = torch.from_numpy(np.column_stack([digit, facts[style]]))
        return sum(map(nn.functional.cross_entropy, logits, answers.T), torch.zeros(()))

    train(nn.ModuleList([t5, head]), loss, steps)
    weights = {name: weight.contiguous() for name, weight in t5.half().state_dict().items()}
    weights.pop("encoder.embed_tokens.weight", None)  # the same tensor as shared.weight
    save_file(weights, out / "text_encoder_2/model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the T5 of a flow base for the demo.")
    parser.add_argument("out", type=Path, help="new model folder")
    parser.add_argument("--t5-steps", type=int, default=T5_STEPS)
    make_flow_base(**vars(parser.parse_args()))
