"""fp8 training emulated on the CPU: which recipe is active, and the scaling factors of modules.

``fp8_autocast`` says that linear layers quantise their operands as a recipe tells
(:mod:`mindspeed.te.quantization`) and multiply them in fp32, so that an fp8 configuration can be
debugged without fp8 tensor cores. Parameters, gradients, norms and attention keep their dtype.
Delayed scaling keeps maxima per module: those of inputs and weights step forward at the end of the
outermost autocast, those of output gradients at the end of the backward pass of its first module.
A recomputed forward uses the factors of the first run and observes nothing.

fp8 parameters, fp4, custom recipes and fp8 attention are refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mindspeed import device as devices
from mindspeed.te.fp8_state import Autocast, FP8GlobalStateManager, ScaleReplay, ScalingState
from mindspeed.te.quantization import (
    AmaxHistory,
    Cast,
    Casts,
    multiples_of,
    reduce_maxima,
    round_trip,
    stateless_cast,
)
from mindspeed.te.recipes import DelayedScaling, NVFP4BlockScaling

_PARAMETERS = (
    "fp8 parameters are not emulated, only fp8 multiplications; remove --fp8-param-gather or use "
    "NVIDIA's Transformer Engine on a GPU with fp8 tensor cores"
)


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = False,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Quantise the operands of linear layers inside the context.

    Args:
        enabled: Switch on; False switches off inside another autocast.
        calibrating: Not available.
        fp8_recipe: How to quantise; :class:`DelayedScaling` by default.
        fp8_group: Ranks over which delayed scaling takes maxima.

    Raises:
        NotImplementedError: calibration, an unknown recipe, or a device other than the CPU.
    """
    if calibrating:
        raise NotImplementedError("fp8 calibration is not emulated; call fp8_autocast(enabled=...)")
    recipe = DelayedScaling() if fp8_recipe is None else fp8_recipe
    if enabled:
        refuse(recipe)
    outer = FP8GlobalStateManager._active
    active: Autocast | None = None
    if enabled and outer is not None:  # an inner recipe for a part of the model
        active = replace(outer, recipe=recipe)
    elif enabled:
        active = Autocast(recipe, fp8_group)
    FP8GlobalStateManager._active = active
    try:
        yield
    finally:
        FP8GlobalStateManager._active = outer
    if active is not None and outer is None and torch.is_grad_enabled():
        _step([one.forward for one in active.states.values()], active)


def _step(histories: Sequence[AmaxHistory], active: Autocast) -> None:
    """Take the maxima of all ranks and begin the next step of delayed scaling."""
    if active.replay is not None and active.replay.again:
        return
    reduced = [one for one in histories if one.recipe.reduce_amax]
    reduce_maxima(reduced, active.group)
    for one in histories:
        one.update()


def refuse(recipe: Any) -> None:
    """Raise when a recipe, or this device, is not emulated."""
    here = devices.current()
    if not here.on_host:
        raise NotImplementedError(
            f"fp8 is emulated on the CPU only, this process runs on {here.name}: install NVIDIA's "
            "Transformer Engine on a GPU with fp8 tensor cores, or remove --fp8-format"
        )
    if isinstance(recipe, NVFP4BlockScaling):
        raise NotImplementedError("fp4 is not emulated: remove --fp4-format, or use --fp8-format")
    if getattr(recipe, "fp8_dpa", False) or getattr(recipe, "fp8_mha", False):
        raise NotImplementedError(
            "attention in fp8 is not emulated: remove --fp8-dot-product-attention and "
            "--fp8-multi-head-attention"
        )
    if not isinstance(recipe, DelayedScaling):
        stateless_cast(recipe, torch.float8_e4m3fn, weight=False)


def casts_of(
    module: Any, count: int = 1, *, is_first_microbatch: bool | None = None
) -> tuple[Casts, ...]:
    """Return the casts of a module's ``count`` multiplications; empty outside of fp8.

    Args:
        module: Keeps its scaling factors in ``fp8_meta["scaling"]``.
        count: Multiplications, each with its own weight.
        is_first_microbatch: False: weights keep the factors of this step's first micro-batch.
    """
    active = FP8GlobalStateManager._active
    if active is None:
        return ()
    recipe = active.recipe
    if not isinstance(recipe, DelayedScaling):
        forward = recipe.fp8_format.forward_dtype
        one = Casts(
            stateless_cast(recipe, forward, weight=False),
            stateless_cast(recipe, forward, weight=True),
            stateless_cast(recipe, recipe.fp8_format.backward_dtype, weight=False),
            multiples=multiples_of(recipe),
        )
        return (one,) * count
    state = module.fp8_meta.get("scaling")
    if state is None:
        state = module.fp8_meta["scaling"] = ScalingState.of(recipe, count)
        saved = module.fp8_meta.pop("saved_scaling", None)
        if saved is not None:
            state.restore(saved)
    return tuple(_delayed(active, recipe, state, count, is_first_microbatch))


def _delayed(
    active: Autocast,
    recipe: DelayedScaling,
    state: ScalingState,
    count: int,
    is_first_microbatch: bool | None,
) -> Iterator[Casts]:
    again = active.replay is not None and active.replay.again
    quantise_weight = is_first_microbatch is not False or state.weight_scale is None
    if quantise_weight and not again:
        state.weight_scale = state.forward.scale[count:]
    assert state.weight_scale is not None
    scales = torch.cat([state.forward.scale[:count], state.weight_scale])
    if active.replay is not None:
        scales = active.replay.next(scales)
    first = not again and not active.states
    if not again:
        active.states[id(state)] = state

    def finish() -> None:
        _step([one.backward for one in active.states.values()], active)

    def observe(index: int, enabled: bool) -> Callable[[Tensor], None]:
        history = state.forward
        return (lambda x: history.observe(index, x)) if enabled else (lambda x: None)

    def with_scale(index: int) -> Callable[[Tensor, int], Tensor]:
        return lambda x, summed: round_trip(x, scales[index], state.forward.dtype)

    def gradient(index: int) -> Cast:
        history = state.backward
        return Cast(
            lambda x, summed: round_trip(x, history.scale[index], history.dtype),
            lambda x: history.observe(index, x),
        )

    for i in range(count):
        yield Casts(
            Cast(with_scale(i), observe(i, not again)),
            Cast(with_scale(count + i), observe(count + i, quantise_weight and not again)),
            gradient(i),
            wgrad=not recipe.override_linear_precision[2],
            finish=finish if first and i == 0 else lambda: None,
        )


class Fp8Recomputation:
    """Runs a function now and once more later, both times with the same scaling factors."""

    def __init__(self) -> None:
        self._active = FP8GlobalStateManager._active
        self._replay = ScaleReplay()
        self._runs = 0

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """The context of one run; the first one is the forward pass."""
        if self._active is None:
            yield
            return
        again, self._runs = self._runs > 0, self._runs + 1
        replay = ScaleReplay(list(self._replay.scales), True) if again else self._replay
        before = FP8GlobalStateManager._active
        FP8GlobalStateManager._active = replace(self._active, replay=replay)
        try:
            yield
        finally:
            FP8GlobalStateManager._active = before


def fp8_model_init(
    enabled: bool = False, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Any:
    """Return an empty context; raise when parameters are to be created in fp8."""
    if enabled:
        raise NotImplementedError(_PARAMETERS)
    return contextlib.nullcontext()


def supported() -> tuple[bool, str]:
    """Answer whether fp8 training is possible here."""
    try:
        refuse(DelayedScaling())
    except NotImplementedError as reason:
        return False, str(reason)
    return True, ""


class QuantizedTensor(Tensor):
    """Type of a quantised tensor; only ever used in ``isinstance`` here, and no tensor is one."""
