"""Steps whose buffers of experts' rows were too small: computed again with larger ones.

    forward, backward      layers note on the device whether rows were left out
    the gradient norm      its reduction tells all ranks (:mod:`.megatron_norm`)
    again                  gradients from zero, the same micro-batches and random numbers

(:mod:`mindspeed.moe.device_bound`). The step that counts is the one with the larger bound, to the
bit; the bound stays. An evaluation is computed again likewise.

Where no gradient norm is reduced over all ranks, and where something looks at the pass before the
optimizer does, ranks agree by one element as soon as the pass is over.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mindspeed import device
from mindspeed.errors import TrainingError
from mindspeed.guard.megatron_norm import carry
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
