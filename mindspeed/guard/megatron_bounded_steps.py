"""Steps whose buffers of experts' rows were too small: computed again with larger ones.

    forward, backward      layers note on the device whether rows were left out
    the gradient norm      its reduction tells all ranks
    again                  gradients from zero, the same micro-batches and random numbers

(:mod:`mindspeed.moe.device_bound`). The step that counts is the one with the larger bound, to the
bit; the bound stays. An evaluation is computed again likewise.

The flag travels in the reduction of the gradient norm, with no collective and no read of its own:

    before the reduction   a rank whose flag is set makes one of its gradients infinite
    after it               the norm is infinite on every rank, and on its way to the host anyway

A finite norm says that the flag is set nowhere. After any other, ranks must ask each other, as the
gradients may be not finite by themselves; that step is not usual. Gradients keep every bit where
the flag is not set. Where no gradient norm is reduced over all ranks, and where something looks at
the pass before the optimizer does, ranks agree by one element as soon as the pass is over.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.errors import TrainingError
from mindspeed.guard.megatron_replay import ReplayedStep
from mindspeed.moe.device_bound import DeviceBound

logger = logging.getLogger("mindspeed")


class BoundedSteps:
    """The steps of this rank.

    Args:
        bound: Of all layers.
        repeats: A step is computed again; else the training ends.
        flag: Of the bound, for messages.
    """

    def __init__(self, bound: DeviceBound, repeats: bool, flag: str) -> None:
        self._bound, self._repeats, self._flag = bound, repeats, flag
        self._watches = self._carried = False
        self._pending: tuple[ReplayedStep, list[Any]] | None = None
        self._passes = 0  # forward and backward since gradients were zero

    def with_optimizer(self, optimizer: Any) -> Any:
        """Let the reduction of the gradient norm tell all ranks, at the optimizer's seam."""
        self._watches = True
        self._carried = carry(optimizer, self._bound.overflown, self._after_norm)
        zero_gradients = optimizer.zero_grad

        @functools.wraps(zero_gradients)
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            self._forget()
            return zero_gradients(*args, **kwargs)

        optimizer.zero_grad = zero_grad
        return optimizer

    def with_schedule(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the schedule, at its seam."""

        @functools.wraps(schedule)
        def bounded(**given: Any) -> Any:
            return self._run(ReplayedStep(schedule, given, kept=self._repeats))

        return bounded

    def _run(self, step: ReplayedStep) -> Any:
        trains = not step.options.get("forward_only")
        if not self._watches or not trains:
            self._forget()
        self._passes += trains
        result = step.run()
        if trains and self._carried and isinstance(result, list):
            self._pending = step, result
            return result
        while self._too_small():
            result = self._once_more(step)
        return result

    def _after_norm(self, finite: bool) -> bool:
        """Compute the step again if a norm that is not finite says so; whether it was."""
        if finite or self._pending is None or not self._too_small():
            self._forget()
            return False
        step, result = self._pending
        with torch.enable_grad():
            result[:] = self._once_more(step)
        return True

    def _forget(self) -> None:
        """Begin a step: what was noted is that of gradients that are gone."""
        self._pending, self._passes = None, 0
        self._bound.flags.clear()

    def _once_more(self, step: ReplayedStep) -> Any:
        """Compute a step again with the next bound.

        Raises:
            TrainingError: It cannot be.
        """
        where = f"layers {self._bound.layers()} of rank {dist.get_rank()}"
        before = self._bound.factor
        accumulates = self._passes > 1
        if not self._repeats or accumulates or not self._bound.grow():
            fix = f"give more, or {self._flag}-overflow repeat"
            if accumulates:
                fix = "give more, as gradients of several passes are added up before the optimizer"
            raise TrainingError(
                f"{self._flag} {before:g}: a rank was to get more rows than that many times "
                f"the mean ({where}); {fix}"
            )
        logger.warning(
            "%s %g was too small (%s): the step is computed again with %g",
            self._flag,
            before,
            where,
            self._bound.factor,
        )
        self._bound.flags.clear()
        return step.run_again()

    def _too_small(self) -> bool:
        """Whether any rank left rows out. Collective: one element."""
        found = self._bound.overflown()
        where = device.current().torch_device()
        flag = torch.zeros((), dtype=torch.int32, device=where) if found is None else found.int()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return dist.get_backend() != "fake" and bool(flag.item())  # a planned step has no values


def carry(
    optimizer: Any,
    flag: Callable[[], torch.Tensor | None],
    after_norm: Callable[[bool], bool],
) -> bool:
    """Let the gradient norm of an optimizer carry a flag.

    Args:
        optimizer: What ``get_megatron_optimizer`` returns.
        flag: Bool ``[]`` of this rank, on its device; None: not set.
        after_norm: Called on all ranks with whether the norm is finite, before anything is updated;
            returns whether the gradients are new ones.

    Returns:
        False if no norm of this optimizer is reduced over all ranks before anything else is decided
        by gradients (fp16 skips a step whose gradients are not finite). Nothing is changed then.
    """
    carrier = _carrier(optimizer)
    if carrier is None:
        return False
    gradients, norm_of_carrier = carrier.get_main_grads_for_grad_norm, carrier.get_grad_norm
    norm_of_all = optimizer.get_grad_norm
    carried: list[float] = []

    def marked_gradients() -> list[torch.Tensor]:
        return _marked(gradients(), flag())

    def noted_norm() -> float:
        carried.append(norm_of_carrier())
        return carried[-1]

    def settled_norm() -> float:
        """The norm of the gradients that count."""
        while True:
            carried.clear()
            norm: float = norm_of_all()
            # The norms of other parts are those of fewer ranks, which would decide otherwise.
            if not after_norm(math.isfinite(carried[0] if carried else norm)):
                return norm
            optimizer.prepare_grads()

    carrier.get_main_grads_for_grad_norm = marked_gradients
    carrier.get_grad_norm = noted_norm
    optimizer.get_grad_norm = settled_norm
    return True


def _carrier(optimizer: Any) -> Any | None:
    """The part of the optimizer whose norm is reduced over all ranks."""
    parts = getattr(optimizer, "chained_optimizers", ())
    if any(getattr(part, "grad_scaler", None) is not None for part in parts):
        return None
    everyone = dist.get_world_size()
    reduced = (
        part
        for part in parts
        if dist.get_world_size(part.get_grad_stats_parallel_group()) == everyone
    )
    return next(reduced, None)


def _marked(gradients: list[torch.Tensor], flag: torch.Tensor | None) -> list[torch.Tensor]:
    """Gradients ``[...]``, one element of which is infinite where the flag is set."""
    if flag is None:
        return gradients
    first = next((one for one in gradients if one.numel()), None)
    if first is None:
        return [*gradients, torch.where(flag, math.inf, 0.0).view(1)]
    element = first.view(-1)[:1]
    element.masked_fill_(flag, math.inf)
    return gradients
