"""The guards of a training job: what they look at in a step, and what a finding does.

    schedule    forward and backward of all micro-batches: losses, gradients, copies, bits
    optimizer   its step: the gradient norm
    step        around a step of a trainer: its number

A spike is reported, and the training goes on. Every other finding ends the job: all ranks raise the
same message after a collective, so none waits for another. Where Megatron would leave out a step
that is not finite, because fp16 lowers its loss scale or ``--max-skipped-nan-iterations`` allows
it, the finding is reported and the step is left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mindspeed.adaptor.arguments import script_arguments
from mindspeed.adaptor.training_steps import TrainingSteps
from mindspeed.errors import TrainingError
from mindspeed.guard import bit_flips, checkpoints
from mindspeed.guard.bit_flips import Flip, TwiceComputed
from mindspeed.guard.losses import LossNotes, StepLosses
from mindspeed.guard.megatron_copies import WeightCopies
from mindspeed.guard.megatron_replay import ReplayedStep, gradients_of
from mindspeed.guard.not_finite import first_on_this_rank, origin_of
from mindspeed.guard.spikes import Spike, Spikes


@dataclass(frozen=True)
class GuardOptions:
    """What is guarded.

    Attributes:
        kinds: Some of ``nan``, ``spike``, ``desync``, ``bitflip``.
        interval: Steps between two looks at copies, and at bits.
        save: Directory of checkpoints; empty: none.
        overflows: Gradients may overflow: fp16 with a dynamic loss scale.
        skips: A step that is not finite is left out instead of ending the job.
    """

    kinds: frozenset[str]
    interval: int
    save: str = ""
    overflows: bool = False
    skips: bool = False


class TrainingGuard:
    """Guards the steps of this rank.

    Args:
        options: What is guarded.
    """

    def __init__(self, options: GuardOptions) -> None:
        self._options = options
        self._steps = TrainingSteps()
        self._spikes = Spikes()
        self._losses: list[float] = []
        self._retention = _Retention(options.save)
        self._copies: WeightCopies | None = None
        self._repeats = True

    @contextlib.contextmanager
    def around_step(self, iteration: int) -> Iterator[None]:
        """Number the step that runs, at the seam ``step``."""
        self._steps.announce(iteration)
        self._retention.before_step()
        yield

    def with_schedule(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the schedule, at its seam."""
        return self._steps.watched(function, self._step)

    def with_optimizer(self, optimizer: Any) -> Any:
        """Watch the optimizer, at its seam."""
        step = optimizer.step

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            if "spike" in self._options.kinds and result[1] is not None:
                self._report(self._spikes.add("gradient norm", float(result[1])))
            return result

        optimizer.step = run
        return optimizer

    def _step(self, schedule: Callable[..., Any], given: Mapping[str, Any]) -> Any:
        kinds = self._options.kinds
        now = self._steps.number % self._options.interval == 0
        repeats = now and "bitflip" in kinds and self._repeats
        step = ReplayedStep(schedule, given, kept=repeats or "nan" in kinds)
        twice = TwiceComputed(step) if repeats and step.gradients_are_zero() else None
        notes, changes = None, {}
        if {"nan", "spike"} & kinds:
            notes = LossNotes(given["forward_step_func"], given["num_microbatches"])
            changes = {"forward_step_func": notes.forward_step()}
        if "nan" in kinds:
            _leave_checks_to_guard(step.chunks)
        result = twice.first(changes) if twice else step.run(changes)
        if notes is not None:
            self._look_at_losses(step, notes)
        if twice is not None and (flips := twice.flips()):
            self._report_flips(flips)
        if now and "desync" in kinds:
            self._copies = self._copies or WeightCopies(step.chunks)
            if different := self._copies.differences():
                self._find(f"copies of weights differ: {'; '.join(different)}", stops=True)
        return result

    def _look_at_losses(self, step: ReplayedStep, notes: LossNotes) -> None:
        kinds = self._options.kinds
        looked_at = "nan" in kinds and not self._options.overflows
        losses = notes.gather(gradients_of(step.chunks) if looked_at else ())
        if "nan" in kinds and (losses.bad or losses.bad_gradients):
            self._trace(step, losses)
        if "spike" in kinds:
            self._losses = losses.losses
            spike = self._spikes.add("loss", losses.mean)
            of_one = self._spikes.add("largest loss of a micro-batch", max(losses.losses))
            self._report(spike or of_one)

    def _report_flips(self, flips: list[Flip]) -> None:
        """Say which computation of a step was wrong, or that the program does not repeat itself."""
        origins = bit_flips.origin_of(flips)
        first, ranks = origins[0], _some([one.rank for one in origins])
        where = f"{first.where}, on rank {ranks}"
        if all(one.wrong == 0 for one in origins):
            self._repeats = False
            if dist.get_rank() == 0:
                print(
                    f" guard: step {self._steps.number}: bitflip is off: computed three times, "
                    f"{where} has other bits each time, so the program does not repeat itself "
                    "(atomic additions); --deterministic-mode, and --npu-deterministic on an NPU, "
                    "help",
                    flush=True,
                )
            return
        which = {1: "first", 2: "second", 3: "third"}[max(one.wrong for one in origins)]
        self._find(
            f"a transient fault of a device: computed three times, the {which} differs in bits; "
            f"first in {where}",
            stops=True,
        )

    def _trace(self, step: ReplayedStep, losses: StepLosses) -> None:
        """Say where the values come from that are not finite. Collective."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, first_on_this_rank(step))
        what = f"the loss of micro-batch {_some(losses.bad)} is" if losses.bad else "gradients are"
        if origins := origin_of(found):
            ranks = _some([one.rank for one in origins])
            text = (
                f"{what} not finite; first: {origins[0]}, on rank {ranks}; it came again when the "
                "step was repeated"
            )
        else:
            text = (
                f"{what} not finite, but not when the step was computed again: a transient fault "
                "of a device; --guard bitflip finds others"
            )
        self._find(text, stops=not self._options.skips)

    def _report(self, spike: Spike | None) -> None:
        if spike is not None:
            self._find(f"{spike}{self._largest(spike)}", stops=False)

    def _largest(self, spike: Spike) -> str:
        """The micro-batch with the largest loss, which a spike may come from."""
        if not self._losses:
            return ""
        number = max(range(len(self._losses)), key=self._losses.__getitem__)
        return f"; micro-batch {number} has the largest loss, {self._losses[number]:.4g}"

    def _find(self, text: str, *, stops: bool) -> None:
        """Report a finding, the same on all ranks.

        Raises:
            TrainingError: It ends the job.
        """
        first = f"step {self._steps.number} (iteration {self._steps.number + 1}): {text}"
        checkpoint = checkpoints.latest(self._options.save)
        kept = (
            f"{checkpoint}, the checkpoint before, is kept"
            if checkpoint
            else "there is no checkpoint before (--save, --save-interval)"
        )
        if checkpoint is not None and dist.get_rank() == 0:
            checkpoints.keep(checkpoint, first)
        if stops:
            raise TrainingError(f"{first}; {kept}")
        goes_on = (
            "the step is left out" if self._options.skips and "finite" in text else "it goes on"
        )
        self._retention.keep(checkpoint)
        if dist.get_rank() == 0:
            print(f" guard: {first}; {kept}; {goes_on}", flush=True)


class _Retention:
    """Keeps Megatron-LM's script from deleting a checkpoint: until the next one is written.

    ``--save-retain-interval`` deletes the one before when it writes one. Our trainer looks at the
    file beside it.
    """

    def __init__(self, save: str) -> None:
        self._save = save
        self._kept: Path | None = None
        self._interval: int | None = None

    def keep(self, checkpoint: Path | None) -> None:
        """Keep the latest checkpoint."""
        args = script_arguments()
        if checkpoint is None or self._kept or not getattr(args, "save_retain_interval", None):
            return
        assert args is not None
        self._kept, self._interval = checkpoint, args.save_retain_interval
        args.save_retain_interval = 1  # all are multiples

    def before_step(self) -> None:
        """Delete as the user wants, once a newer checkpoint was written."""
        args = script_arguments()
        if self._kept and args and checkpoints.latest(self._save) != self._kept:
            args.save_retain_interval, self._kept = self._interval, None


def _leave_checks_to_guard(chunks: list[Any]) -> None:
    """Switch off Megatron's check of gradients, which ends one rank in the middle of a step."""
    for chunk in chunks:
        if (config := getattr(chunk, "ddp_config", None)) is not None:
            config.check_for_nan_in_grad = False


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
