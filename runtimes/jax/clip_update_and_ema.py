"""Gradient clipping, AdamW and EMA, as part of the compiled step.

The rule is that of torch.optim.AdamW (arXiv 1711.05101). Numbers that change with each step
(learning rate, bias corrections, share of the EMA) are inputs, so all steps run one program.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from configs.settings.train import Train
from runtimes.optimizer_step.step_scalars import learning_rate_factors

Arrays = dict[str, Array]
#: Group of State (such as `exp_avg`) to State's key to array.
Groups = dict[str, Arrays]


def update(
    state: Groups, gradients: Arrays, numbers: Array, settings: Train, untouched: frozenset[str]
) -> tuple[Groups, Array]:
    """Clip the gradients and compute the next state.

    Args:
        state: groups weights, exp_avg, exp_avg_sq and, if set, ema; f32 by State's keys.
        gradients: f32 by State's keys.
        numbers: [4] f32, see optimizer_step.step_scalars.
        settings: AdamW, clipping and EMA.
        untouched: keys of parameters that stay unchanged, without weight decay.

    Returns:
        The next state, and the gradients' L2 norm before clipping, a f32 scalar.
    """
    rate, step_size, root, ema_share = numbers
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(array)) for array in gradients.values()))
    factor = jnp.ones(())
    if settings.max_grad_norm is not None:
        factor = jnp.minimum(settings.max_grad_norm / (norm + 1e-6), 1.0)
    (beta1, beta2), found = settings.adam_betas, {group: dict(state[group]) for group in state}
    shares = learning_rate_factors(gradients, settings)
    for name, gradient in gradients.items():
        if name in untouched:
            continue
        gradient, share = gradient * factor, shares[name]
        first, second = state["exp_avg"][name], state["exp_avg_sq"][name]
        first = first + (1 - beta1) * (gradient - first)
        second = beta2 * second + (1 - beta2) * jnp.square(gradient)
        weight = state["weights"][name] * (1 - rate * (share * settings.weight_decay))
        change = first / (jnp.sqrt(second) / root + settings.adam_epsilon)
        found["weights"][name] = weight - (step_size * share) * change
        found["exp_avg"][name], found["exp_avg_sq"][name] = first, second
    for name, average in state.get("ema", {}).items():
        found["ema"][name] = average + ema_share * (found["weights"][name] - average)
    return found, norm
