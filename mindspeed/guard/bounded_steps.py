"""Steps whose buffers of experts' rows were too small: computed again with larger ones.

    forward, backward      layers note on the device whether rows were left out
    one element            all ranks agree, when the pass is over and before the optimizer
    again                  gradients from zero, the same micro-batches and random numbers

(:mod:`mindspeed.moe.device_bound`). The step that counts is the one with the larger bound, to the
bit; the bound stays. An evaluation is computed again likewise.
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

    def with_schedule(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the schedule, at its seam."""

        @functools.wraps(schedule)
        def bounded(**given: Any) -> Any:
            return self._run(ReplayedStep(schedule, given, kept=self._repeats))

        return bounded

    def _run(self, step: ReplayedStep) -> Any:
        self._bound.flags.clear()
        result = step.run()
        while self._too_small():
            where = f"layers {self._bound.layers()} of rank {dist.get_rank()}"
            before = self._bound.factor
            if not self._repeats or not self._bound.grow():
                raise TrainingError(
                    f"{self._flag} {before:g}: a rank was to get more rows than that many times "
                    f"the mean ({where}); give more, or {self._flag}-overflow repeat"
                )
            logger.warning(
                "%s %g was too small (%s): the step is computed again with %g",
                self._flag,
                before,
                where,
                self._bound.factor,
            )
            self._bound.flags.clear()
            result = step.run_again()
        return result

    def _too_small(self) -> bool:
        """Whether any rank left rows out. Collective: one element."""
        found = self._bound.overflown()
        where = device.current().torch_device()
        flag = torch.zeros((), dtype=torch.int32, device=where) if found is None else found.int()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return dist.get_backend() != "fake" and bool(flag.item())  # a planned step has no values
