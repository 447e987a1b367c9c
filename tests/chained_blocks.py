"""Small chains of blocks, called as diffusers' models call theirs."""

from typing import Any

import torch
from torch.nn import functional


class Block(torch.nn.Module):
    """One output, a buffer and a dropout layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.drop = torch.nn.Dropout(dropout)
        self.register_buffer("scale", torch.rand(4))

    def forward(self, hidden_states: torch.Tensor, mask: Any, temb: torch.Tensor) -> Any:
        inner = functional.gelu(self.into(hidden_states * self.scale) + temb)
        return hidden_states + self.drop(self.out(inner))


class JointBlock(torch.nn.Module):
    """Two outputs, in the order of SD3, FLUX and Qwen-Image."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.own = torch.nn.Linear(4, 4)
        self.other = None if last else torch.nn.Linear(4, 4)

    def forward(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, temb: torch.Tensor
    ) -> Any:
        joined = encoder_hidden_states.mean(1, keepdim=True)
        hidden = hidden_states + self.own(joined + temb[..., :4]).tanh()
        if self.other is None:
            return None, hidden
        return encoder_hidden_states + self.other(hidden).mean(1, keepdim=True), hidden


class Chains(torch.nn.Module):
    """Three equal blocks, two equal joint blocks and another joint block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([Block(dropout) for _ in range(3)])
        self.joint = torch.nn.ModuleList([JointBlock(), JointBlock(), JointBlock(last=True)])
        for block in self.blocks:
            block.out.requires_grad_(False)  # as the base's weights beside adapters
        self._call = lambda block, *given: block(*given)

    def _set_gradient_checkpointing(
        self, *, enable: bool, gradient_checkpointing_func: Any
    ) -> None:
        self._call = gradient_checkpointing_func

    def forward(self, hidden: torch.Tensor, encoder: torch.Tensor, temb: torch.Tensor) -> Any:
        for block in self.blocks:
            hidden = self._call(block, hidden, None, temb)
        for block in self.joint:
            encoder, hidden = self._call(block, hidden, encoder, temb[..., :4])
        return hidden


CLASSES = ("Block", "JointBlock")
