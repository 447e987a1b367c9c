"""Equal blocks in a loop compute what they compute one after another."""

from typing import Any

import chips
import numpy as np
import pytest
import torch
from chained_blocks import CLASSES, Chains, JointBlock
from driver_process import DriverProcess

jax = chips.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from runtimes.jax.mesh import Mesh  # noqa: E402
from runtimes.jax.scan_blocks import (  # noqa: E402
    BlockList,
    EqualBlocks,
    recording,
    scanned_names,
    use_block_lists,
)
from runtimes.jax.torchax_bridge import as_function, recompute  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("jax")]


def _mesh() -> Mesh:
    mesh = Mesh(1, jax.devices()[:1])
    mesh.has_loops = True
    return mesh


def _arrays(module: torch.nn.Module) -> dict[str, Any]:
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {name: jnp.asarray(tensor.detach().numpy()) for name, tensor in tensors}


def _inputs() -> list[Any]:
    return [jnp.ones(shape) for shape in ((4, 3, 4), (4, 5, 4), (4, 1, 8))]


@pytest.mark.parametrize("what", ["blocks", "selective"])
@pytest.mark.parametrize("fsdp", [1, 2])
def test_loss_and_gradients_are_those_of_single_blocks(
    fsdp: int, what: str, driver: DriverProcess
) -> None:
    found = driver.call("scan", fsdp, what)
    assert found["loss"] == pytest.approx(found["single"]["loss"], rel=1e-6)
    for name, gradient in found["single"]["gradients"].items():
        np.testing.assert_allclose(found["gradients"][name], gradient, 1e-5, 1e-6, err_msg=name)
    assert found["loops"] == 2 * 2  # of each run of equal blocks, forward and backward


def test_an_iteration_gathers_its_own_block_and_leaves_gradients_sharded(
    driver: DriverProcess,
) -> None:
    found = driver.call("scan", 2, "blocks")
    shapes = {line.partition(" = ")[2].partition("{")[0] for line in found["all_gathers"]}
    assert "f32[8,4]" in shapes  # a weight of one block
    assert not found["stacked"], "whole weights or gradients of all blocks"
    assert all(found["sharded"].values())
    assert "joint.2.own.weight" not in found["sharded"]


def test_blocks_of_other_shapes_are_no_part_of_a_loop() -> None:
    module = Chains()
    names = list(module.state_dict())
    use_block_lists(module, CLASSES)
    assert list(module.state_dict()) == names
    counts = [
        [len(group.blocks) if isinstance(group, EqualBlocks) else 1 for group in each.groups]
        for each in (module.blocks, module.joint)
    ]
    assert counts == [[3], [2, 1]]
    scanned = scanned_names(module)
    assert {name.rsplit(".", 2)[0] for name in scanned} == {
        *("blocks.0", "blocks.1", "blocks.2", "joint.0", "joint.1")
    }


def test_other_lists_of_modules_stay() -> None:
    module = torch.nn.ModuleDict({"resnets": torch.nn.ModuleList([torch.nn.Linear(2, 2)] * 2)})
    use_block_lists(module, CLASSES)
    assert not isinstance(module["resnets"], BlockList)


def test_sampling_calls_single_blocks() -> None:
    """Without gradients, diffusers calls each block itself."""
    module = Chains()
    plain = as_function(Chains(), training=False)(_arrays(module), 0, *_inputs())
    recompute(module, "blocks", _mesh(), CLASSES)
    module._call = lambda block, *given: block(*given)
    found = as_function(module, training=False)(_arrays(module), 0, *_inputs())
    assert jnp.array_equal(found, plain)


def test_each_iteration_draws_its_own_dropout_mask() -> None:
    module = Chains(dropout=0.5)
    module.joint = torch.nn.ModuleList()
    with torch.no_grad():
        for block in module.blocks:
            block.out.weight.zero_()
            block.out.bias.fill_(1)
    recompute(module, "blocks", _mesh(), CLASSES)
    found = as_function(module, training=True)(_arrays(module), 0, *_inputs()) - _inputs()[0]
    assert set(np.unique(found).tolist()) == {0.0, 2.0, 4.0, 6.0}


def test_recorded_loops_are_those_of_the_trace() -> None:
    module = Chains()
    recompute(module, "blocks", _mesh(), CLASSES)
    call = as_function(module, training=True)
    with recording() as loops:
        jax.eval_shape(call, _arrays(module), 0, *_inputs())
    assert [loop.count for loop in loops] == [3, 2]
    carries = [[array.shape for array in loop.carry] for loop in loops]
    assert carries == [[(4, 3, 4)], [(4, 3, 4), (4, 5, 4)]]
    assert [len(loop.others) for loop in loops] == [1, 1]


def test_blocks_with_another_order_of_outputs_are_refused() -> None:
    """CogView4's, for example, return hidden_states first."""

    class Reversed(JointBlock):
        def forward(self, *given: Any) -> Any:
            return super().forward(*given)[::-1]

    module = Chains()
    module.joint = torch.nn.ModuleList([Reversed(), Reversed()])
    recompute(module, "blocks", _mesh(), ("Reversed",))
    with pytest.raises(TypeError, match=r"Reversed: .* see Family.chained_blocks"):
        as_function(module, training=True)(_arrays(module), 0, *_inputs())
