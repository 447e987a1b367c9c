"""Adapters in training: where they go, how they start, and what of them is trained."""

import numpy as np
import pytest
import torch
from jobs import MakeJob, assert_equal, lora, predicted, start, trained

from configs.errors import Refused
from configs.settings.train_parts import Lora
from runtimes.adapters.lora import choose_layers, initial_down

pytestmark = pytest.mark.slow


def layers(part: torch.nn.Module) -> set[str]:
    return {name for name, m in part.named_modules() if hasattr(m, "lora_A")}


def test_targets_are_attention_or_all_linear_or_convolutions_too(make_job: MakeJob) -> None:
    counts = {}
    for targets in ("attention", "linear", "all"):
        runtime, _ = start(make_job(**lora(target_modules=targets)))
        unet = runtime._network.denoiser
        found = counts[targets] = layers(unet)
        kinds = {type(dict(unet.named_modules())[name].base_layer) for name in found}
        assert torch.nn.Conv2d not in kinds or targets == "all"
    assert all(".to_" in name for name in counts["attention"])
    assert counts["attention"] < counts["linear"] < counts["all"]
    assert "time_embedding.linear_1" in counts["linear"]
    assert {"conv_in", "down_blocks.0.resnets.0.time_emb_proj"} < counts["all"]
    rest = {torch.nn.Linear, torch.nn.Conv2d}
    left = {n for n, m in unet.named_modules() if type(m) in rest and "lora_" not in n}
    assert {name.removesuffix(".base_layer") for name in left} == counts["all"]


def test_targets_may_be_ends_of_names(make_job: MakeJob) -> None:
    runtime, _ = start(make_job(**lora(target_modules=("to_k", "resnets.0.conv1"))))
    found = layers(runtime._network.denoiser)
    assert {name.rpartition(".")[2] for name in found} == {"to_k", "conv1"}
    assert not any(name.endswith("resnets.1.conv1") for name in found)


def test_targets_that_are_not_there_are_named_with_some_that_are(make_job: MakeJob) -> None:
    with pytest.raises(Refused, match=r"train\.lora\.target_modules: .* ends in to_x .*conv1"):
        start(make_job(**lora(target_modules=("to_x",))))


def test_text_encoders_have_adapters_on_attention_or_on_all_layers() -> None:
    names = ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1", "text_projection")
    known = {f"encoder.{name}": "linear" for name in names}
    chosen = {
        targets: [name.rpartition(".")[2] for name in choose_layers("text_encoder", known, lora)]
        for targets in ("attention", "all", ("to_q",))
        for lora in [Lora(target_modules=targets)]
    }
    assert chosen["attention"] == chosen["to_q",] == ["q_proj", "out_proj"]
    assert chosen["all"] == ["q_proj", "out_proj", "fc1"]


def test_only_adapters_train_and_at_first_they_change_nothing(make_job: MakeJob) -> None:
    for dora in (False, True):
        runtime, batch = start(make_job(**lora(dora=dora)))
        base, _ = start(make_job())
        expected = predicted(base._network, batch(0))
        torch.testing.assert_close(predicted(runtime._network, batch(0)), expected)
        names = set(runtime.state()["weights"])
        assert {name.rpartition(".lora_")[2] for name in names} == {
            "A.weight",
            "B.weight",
            *(["magnitude_vector"] if dora else []),
        }
        assert "unet.mid_block.attentions.0.proj_in.lora_A.weight" in names
        before = {n: p.clone() for n, p in runtime._network.named_parameters() if "lora_" not in n}
        runtime.step(batch(0), 1e-2)
        after = dict(runtime._network.named_parameters())
        assert all(torch.equal(weight, after[name]) for name, weight in before.items())
        assert not torch.allclose(predicted(runtime._network, batch(0)), expected)


def test_adapters_start_by_seed_and_name_alone(make_job: MakeJob) -> None:
    torch.manual_seed(1)
    one = start(make_job(**lora(), seed=4))[0].state()["weights"]
    torch.manual_seed(2)
    other = start(make_job(**lora(target_modules="attention"), seed=4))[0].state()["weights"]
    assert other.keys() < one.keys()
    for name, array in other.items():
        np.testing.assert_array_equal(array, one[name])
    name = "unet.conv_in.lora_A.weight"
    assert (one[name] != start(make_job(**lora(), seed=5))[0].state()["weights"][name]).any()


def test_down_starts_as_peft_starts_it() -> None:
    drawn = initial_down(0, "unet.x.lora_A.weight", (64, 32, 3, 3))
    reference = torch.nn.Conv2d(32, 64, 3, bias=False)
    torch.nn.init.kaiming_uniform_(reference.weight, a=5**0.5)
    bound = float(reference.weight.detach().abs().max())
    assert abs(drawn).max() == pytest.approx(bound, rel=0.01)
    assert drawn.std() == pytest.approx(float(reference.weight.detach().std()), rel=0.02)


def test_in_half_precision_the_base_is_half_and_adapters_are_not(make_job: MakeJob) -> None:
    for dora in (False, True):
        runtime, batch = start(make_job(**lora(dora=dora), mixed_precision="bf16"))
        kinds = {"lora_" in n: p.dtype for n, p in runtime._network.named_parameters()}
        assert kinds == {False: torch.bfloat16, True: torch.float32}
        full, _ = start(make_job(**lora(dora=dora)))
        for step in range(2):
            half = float(runtime.step(batch(step), 1e-2).loss)
            assert half == pytest.approx(float(full.step(batch(step), 1e-2).loss), rel=3e-2)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_restored_run_goes_on_to_the_bit(make_job: MakeJob, dropout: float) -> None:
    job = make_job(
        **lora(dropout=dropout), ema_decay=0.9, train_text_encoder=True, micro_batch_size=2
    )
    one, batch = start(job)
    for step in range(2):
        one.step(batch(step), 1e-2)
    other, _ = start(job)
    other.restore(one.state(), 2)
    torch.manual_seed(99)  # what is drawn elsewhere changes nothing
    for step in range(2, 4):
        one.step(batch(step), 1e-2)
    for step in range(2, 4):
        other.step(batch(step), 1e-2)
    assert_equal(one.state(), other.state())


def test_dropout_drops_in_training_alone(make_job: MakeJob) -> None:
    plain, batch = trained(make_job(**lora()))
    dropping, _ = trained(make_job(**lora(dropout=0.3)))
    name = "unet.conv_in.lora_B.weight"
    assert not np.allclose(plain.state()["weights"][name], dropping.state()["weights"][name])
    dropping.restore(plain.state(), 3)
    with dropping.evaluating(), plain.evaluating():
        np.testing.assert_allclose(dropping.errors(batch), plain.errors(batch), rtol=1e-6)


@pytest.mark.parametrize(
    "method", ["full", "lora", pytest.param("dora", marks=pytest.mark.extended)]
)
def test_accumulation_and_checkpointing_leave_gradients_alone(
    make_job: MakeJob, method: str
) -> None:
    """Adam's first moment after one step is a tenth of the gradient."""
    given = {} if method == "full" else lora(dora=method == "dora")
    given |= {"train_text_encoder": True, "max_grad_norm": None}
    whole, _ = trained(make_job(**given), 1)
    gradients = whole.state()["exp_avg"]
    size = np.sqrt(sum(float(np.square(g).sum()) for g in gradients.values()))
    recomputed = [{"gradient_checkpointing": what} for what in ("blocks", "selective")]
    for other in ({"micro_batch_size": 1}, *recomputed):
        same = trained(make_job(**given, **other), 1)[0].state()["exp_avg"]
        off = sum(float(np.square(same[name] - g).sum()) for name, g in gradients.items())
        assert np.sqrt(off) < 1e-5 * size
