"""Long captions as kohya's sd-scripts encode them, written plainly for one caption."""

from pathlib import Path
from typing import Any

import torch
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

CHUNK = 75  # tokens of a caption between the marks
PROJECTING = {"text_encoder_2": CLIPTextModelWithProjection}


def token_ids(tokenizer: Any, parts: list[tuple[str, float]], chunks: int) -> list[list[int]]:
    """The 77 tokens of each chunk: one sequence with two marks and padding, cut after each 75."""
    inner = [token for text, _ in parts for token in tokenizer(text).input_ids[1:-1]]
    inner = inner[: CHUNK * chunks]
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    whole = [tokenizer.bos_token_id, *inner, end, *[pad] * (CHUNK * chunks - len(inner))]
    rows = []
    for start in range(1, CHUNK * chunks, CHUNK):
        row = [whole[0], *whole[start : start + CHUNK], whole[-1]]
        if pad != end:
            if row[-2] not in (end, pad):
                row[-1] = end  # the caption goes on: this chunk has an end, too
            if row[1] == pad:
                row[1] = end  # nothing is left for this chunk
        rows.append(row)
    return rows


@torch.no_grad()
def encode(
    folder: Path, parts: list[tuple[str, float]], chunks: int, clip: Any = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """States [2 + 75 chunks, D] and pooled embeddings [P], or None for SD 1 and 2.

    Args:
        parts: of the caption, with their weights.
        clip: text encoders by name, in place of those of the folder.
    """
    names = [name for name in ("text_encoder", "text_encoder_2") if (folder / name).is_dir()]
    all_states = []
    pooled = None
    for name in names:
        kind = PROJECTING.get(name, CLIPTextModel)
        model = (clip or {}).get(name) or kind.from_pretrained(folder / name)
        part = name.replace("text_encoder", "tokenizer")
        tokenizer = CLIPTokenizer.from_pretrained(folder / part)
        output = model(torch.tensor(token_ids(tokenizer, parts, chunks)), output_hidden_states=True)
        states = output.last_hidden_state if len(names) == 1 else output.hidden_states[-2]
        states = torch.cat([states[0, :1], *[chunk[1:-1] for chunk in states], states[-1, -1:]])
        place = 1
        for text, weight in parts:
            count = len(tokenizer(text).input_ids) - 2
            states[place : min(place + count, len(states) - 1)] *= weight
            place += count
        all_states.append(states)
        if name in PROJECTING:
            pooled = output.text_embeds[0]
    return torch.cat(all_states, dim=-1), pooled
