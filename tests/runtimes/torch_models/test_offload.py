"""Offloaded weights share blocks of the host's memory, and keep their values."""

import pytest
import torch

from runtimes.torch_models import offload
from runtimes.torch_models.offload import move_to_blocks, offload_layers


def test_tensors_share_blocks_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BLOCK", 1024)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.Linear(5, 7).bfloat16(), torch.nn.Linear(40, 20)
    )
    model.register_buffer("empty", torch.empty(0, 4))
    model.register_buffer("scalar", torch.tensor(3))
    model.append(model[0])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    blocks: list[torch.Tensor] = []

    def allocate(size: int) -> torch.Tensor:
        blocks.append(torch.empty(size, dtype=torch.uint8))
        return blocks[-1]

    move_to_blocks(model, allocate, most=2**20)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {after[name].dtype for name in after} == {torch.float32, torch.bfloat16, torch.int64}
    # 4 small tensors; a weight of 3,200 bytes alone; what follows it, the bias and the scalar.
    assert [block.nbytes for block in blocks] == [1024, 3200, 192]
    ranges = [(block.data_ptr(), block.data_ptr() + block.nbytes) for block in blocks]
    for tensor in after.values():
        if tensor.nbytes:
            first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            assert any(a <= first and end <= b for a, b in ranges)
    assert model[0].weight is model[3].weight


def test_tensors_beyond_the_hosts_memory_stay() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    before = [tensor.data_ptr() for tensor in model.parameters()]
    blocks: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        blocks.append(size)
        return torch.empty(size, dtype=torch.uint8)

    most = 1024 + 64 + 1023  # the second weight has one byte more
    move_to_blocks(model, allocate, most)
    stay = [a.data_ptr() == b for a, b in zip(model.parameters(), before, strict=True)]
    assert stay == [False, False, True, True] and blocks == [1024 + 64]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_offloaded_weights_stay_in_their_pinned_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers pins no copy of what is pinned already."""
    monkeypatch.setattr(offload, "BLOCK", 2**16)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32))
    given = torch.randn(3, 64)
    expected = model(given)
    offload_layers(model, torch.device("cuda"))
    assert len({weight.untyped_storage().data_ptr() for weight in model.parameters()}) == 1
    for _ in range(2):  # the first pass records the order of layers
        torch.testing.assert_close(model(given.cuda()).cpu(), expected, rtol=1e-3, atol=1e-3)
    assert all(weight.is_pinned() for weight in model.parameters())
