"""Gradient clipping, AdamW and EMA, as compiled graphs.

The rule is that of torch.optim.AdamW (arXiv 1711.05101), by MindSpore's fused operator, which has
no bias correction. With c1 = 1 - beta1^t and c2 = 1 - beta2^t,

    p - rate * (m / c1 / (sqrt(v / c2) + eps) + decay * p)
  = p - rate' * (m / (sqrt(v) + eps') + decay' * p)

for rate' = rate * sqrt(c2) / c1, eps' = eps * sqrt(c2), decay' = decay * rate / rate'.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from numpy.typing import NDArray

from configs.settings.train import Train
from runtimes import optimizer_state
from runtimes.contract import Owners, SavedState, State, StateShapes
from runtimes.learning_rate import learning_rate_groups
from runtimes.mindspore.loss_scale import DynamicLossScale

Gradients = Sequence[Tensor]
Parameters = Mapping[str, Parameter]


class Update:
    """AdamW on float32 masters, and their exponential moving average.

    Args:
        masters: float32 parameters to update, by State's keys.
        computed: parameters of the network by the same keys: the masters themselves, or copies in
            half precision that are recomputed from the masters after each update.
        reached: keys of the parameters with gradients, in the gradients' order. The step leaves
            other parameters unchanged.
        settings: learning rates, AdamW, clipping, EMA and loss scale.
    """

    def __init__(
        self, masters: Parameters, computed: Parameters, reached: Sequence[str], settings: Train
    ) -> None:
        self._settings = settings
        self._step = 0
        half = settings.compute_dtype == "float16"
        self.loss_scale = DynamicLossScale(settings.loss_scale if half else None)
        self._masters = dict(masters)
        self._computed = dict(computed)
        self._first = {n: _zeros(f"exp_avg.{n}", p) for n, p in masters.items()}
        self._second = {n: _zeros(f"exp_avg_sq.{n}", p) for n, p in masters.items()}
        self._average: dict[str, Parameter] = {}
        if settings.ema_decay is not None:
            self._average = {n: float32_copy(f"ema.{n}", p) for n, p in masters.items()}
        index = {name: at for at, name in enumerate(reached)}
        self._groups = [
            ([index[name] for name in names], share, ms.jit(self._adam(names).construct))
            for names, share in learning_rate_groups(reached, settings)
        ]
        self._norm = ms.jit(_norm)
        halves = [n for n, p in masters.items() if computed[n] is not p]
        cast_masters = _CastMasters(self._pick(computed, halves), self._pick(masters, halves))
        self._cast_masters = ms.jit(cast_masters.construct) if halves else None
        averaging = _Average(self._pick(self._average, masters), self._pick(masters, masters))
        self._averaging = ms.jit(averaging.construct) if self._average else None

    def _adam(self, names: Sequence[str]) -> _AdamW:
        groups = (self._masters, self._first, self._second)
        return _AdamW([self._pick(group, names) for group in groups], self._settings)

    @staticmethod
    def _pick(group: Parameters, names: Iterable[str]) -> ParameterTuple:
        return ParameterTuple([group[name] for name in names if name in group])

    def apply(self, gradients: Gradients, learning_rate: float) -> tuple[Tensor, bool]:
        """Clip the gradients of the scaled loss and update, or skip the step at an overflow.

        Args:
            gradients: gradients of the scaled loss, in the order of `reached`.
            learning_rate: learning rate of the denoiser.

        Returns:
            The unscaled gradients' L2 norm before clipping, and whether the step was skipped.
        """
        scale = self.loss_scale
        settings = self._settings
        inverse = _number(1 / scale.value)
        norm = self._norm(inverse, *gradients)
        # Only float16 reads the norm, which waits for the device.
        skipped = scale.update(float(norm) if settings.compute_dtype == "float16" else 0.0)
        if not skipped:
            for places, share, update in self._groups:
                part = [gradients[place] for place in places]
                update(norm, inverse, *self._numbers(learning_rate * share), *part)
            if self._cast_masters is not None:
                self._cast_masters()
        if self._averaging is not None:
            decay = optimizer_state.ema_decay_at(self._step, settings)
            if decay != 1:
                self._averaging(_number(1 - decay))
        self._step += 1
        return norm, skipped

    def _numbers(self, rate: float) -> tuple[Tensor, ...]:
        """rate', eps' and decay' of this step, as in the module docstring."""
        betas = self._settings.adam_betas
        first, root = optimizer_state.bias_corrections(betas, self.loss_scale.updates)
        decay = self._settings.weight_decay * first / root
        numbers = (rate * root / first, self._settings.adam_epsilon * root, decay)
        return tuple(_number(number) for number in numbers)

    def averaged(self) -> AbstractContextManager[None]:
        """Within the context, the network has the EMA weights, if any. Raises WeightsLost."""
        kept = {name: self._masters[name].asnumpy().copy() for name in self._average}
        averages = {name: average.asnumpy() for name, average in self._average.items()}
        return optimizer_state.swapped(lambda: self._set(averages), lambda: self._set(kept))

    def _set(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        for name, array in arrays.items():
            master = self._masters[name]
            computed = self._computed[name]
            _assign(master, array)
            if computed is not master:
                _assign(computed, array)

    def shapes(self) -> StateShapes:
        """Shapes of weights, moments, EMA and loss scale."""
        return optimizer_state.shapes_of(self._groups_of_state() | self._scale())

    def state(self, owners: Owners | None, rank: int) -> State:
        """As Runtime.state: weights, moments, EMA and loss scale."""
        state = optimizer_state.owned_copies(
            self._groups_of_state(), owners, rank, lambda p: p.asnumpy().copy()
        )
        return state | optimizer_state.owned_copies(self._scale(), owners, rank, np.array)

    def _scale(self) -> State:
        scale = self.loss_scale.state()
        return {"loss_scale": scale} if scale else {}

    def restore(self, state: SavedState, step: int) -> None:
        """Restore a state that was saved after `step` steps.

        Raises:
            Refused: the state has other names or shapes than this model.
        """
        groups = self._groups_of_state()
        for group, name, array in optimizer_state.read_state_arrays(
            state, optimizer_state.shapes_of(groups)
        ):
            _assign(groups[group][name], array)
        for name, parameter in self._computed.items():
            if parameter is not self._masters[name]:
                _assign(parameter, state["weights"][name][...])
        scale = {name: array[...] for name, array in state.get("loss_scale", {}).items()}
        self.loss_scale.restore(scale, step)
        self._step = step

    def _groups_of_state(self) -> dict[str, dict[str, Parameter]]:
        groups = {"weights": self._masters, "exp_avg": self._first, "exp_avg_sq": self._second}
        return groups | ({"ema": self._average} if self._average else {})


def _norm(inverse: Tensor, *gradients: Tensor) -> Tensor:
    """The L2 norm of gradients, times `inverse`."""
    return ops.sqrt(2 * ops.addn(_each(ops.partial(_half_square, inverse), gradients)))


class _AdamW(nn.Cell):
    def __init__(self, groups: Sequence[ParameterTuple], settings: Train) -> None:
        super().__init__(auto_prefix=False)
        self.masters, self.first, self.second = groups
        self.beta1, self.beta2 = (_number(beta) for beta in settings.adam_betas)
        self.most = settings.max_grad_norm

    def construct(
        self,
        norm: Tensor,
        inverse: Tensor,
        rate: Tensor,
        epsilon: Tensor,
        decay: Tensor,
        *gradients: Tensor,
    ) -> Any:
        factor = inverse
        if self.most is not None:
            factor = inverse * ops.minimum(self.most / (norm + 1e-6), 1.0)
        rule = ops.partial(_adamw, factor, rate, self.beta1, self.beta2, epsilon, decay)
        return _each(rule, self.masters, self.first, self.second, gradients)


class _CastMasters(nn.Cell):
    """Assigns the masters, cast to half precision, to the network's weights."""

    def __init__(self, halves: ParameterTuple, masters: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.halves = halves
        self.masters = masters

    def construct(self) -> Any:
        return _each(_cast, self.halves, self.masters)


class _Average(nn.Cell):
    def __init__(self, averages: ParameterTuple, masters: ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.averages = averages
        self.masters = masters

    def construct(self, share: Tensor) -> Any:
        return _each(ops.partial(_lerp, share), self.averages, self.masters)


_each = ops.HyperMap()
_half_square = ops.MultitypeFuncGraph("half_square")
_adamw = ops.MultitypeFuncGraph("adamw")
_cast = ops.MultitypeFuncGraph("cast")
_lerp = ops.MultitypeFuncGraph("lerp")
_fused = ops.AdamWeightDecay()
_l2 = ops.L2Loss()  # half the sum of squares


@_half_square.register("Tensor", "Tensor")
def _half_square_of(inverse: Tensor, gradient: Tensor) -> Tensor:
    return _l2(gradient.astype(ms.float32) * inverse)


@_adamw.register(*["Tensor"] * 10)
def _adamw_of(
    factor: Tensor,
    rate: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    epsilon: Tensor,
    decay: Tensor,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
) -> Any:
    gradient = gradient.astype(ms.float32) * factor
    done = _fused(master, first, second, rate, beta1, beta2, epsilon, decay, gradient)
    return ops.depend(True, done)


@_cast.register("Tensor", "Tensor")
def _cast_of(half: Tensor, master: Tensor) -> Any:
    return ops.depend(True, ops.assign(half, master.astype(half.dtype)))


@_lerp.register("Tensor", "Tensor", "Tensor")
def _lerp_of(share: Tensor, average: Tensor, master: Tensor) -> Any:
    return ops.depend(True, ops.assign(average, average + (master - average) * share))


def _number(value: float) -> Tensor:
    return Tensor(value, ms.float32)


def float32_copy(name: str, parameter: Parameter) -> Parameter:
    """A float32 copy of a parameter, with another name and without gradient."""
    array = parameter.astype(ms.float32).asnumpy().copy()
    return Parameter(Tensor(array), name=name, requires_grad=False)


def _zeros(name: str, like: Parameter) -> Parameter:
    return Parameter(Tensor(np.zeros(like.shape, np.float32)), name=name, requires_grad=False)


def _assign(parameter: Parameter, array: NDArray[np.float32]) -> None:
    """Assign in place: compiled graphs refer to the parameter's memory."""
    ops.assign(parameter, Tensor(np.array(array, np.float32)).astype(parameter.dtype))
