"""What Inductor makes of products by oneDNN."""

import torch

from configs.training import Lora
from runtimes.models.lora import add_adapters, merging_is_cheaper, with_less_work
from runtimes.torch import products


def compile_and_compare() -> list[bool]:
    """Compile layers with and without adapters to one graph; compare outputs and gradients.

    Returns: of each layer with adapters, whether they are merged.
    """
    products.onednn_is_faster = lambda: True
    torch.manual_seed(0)
    sizes = ((64, 64), (64, 64), (64, 512))
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    add_adapters("unet", model, Lora(rank=4, targets=["1", "2"]), 0)
    products.with_faster_products(model, torch.device("cpu"))
    with_less_work(model)
    inputs = torch.randn(1000, 64)
    found = []
    for compiled in (False, True):
        model.zero_grad()
        output = (torch.compile(model, fullgraph=True) if compiled else model)(inputs)
        output.square().mean().backward()
        found.append([output, *(p.grad for p in model.parameters() if p.requires_grad)])
    torch.testing.assert_close(*found)
    return [merging_is_cheaper(model[n].base_layer.weight.shape, 4, rows=1000) for n in (1, 2)]
