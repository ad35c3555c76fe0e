"""Defects of the log line.

Defect: the second loss that a run prints is the mean of its first two iterations.

Where: ``megatron.training.training.training_log`` reports the first iteration after every start
without resetting its sums and its timer, so that the interval that has begun stays complete. Where
the first iteration is also the end of an interval (each one with ``--log-interval 1``; number 100
of a run resumed at 99 with an interval of 10), the next report counts it a second time.
Symptom: loss, auxiliary losses, and time of an iteration in that report are means over one
iteration too many; gradient norms beside them are not.
Fix: a first report that ends an interval resets the sums, as all others do.
Versions: >=0.16.

Defect: losses that are zero or negative are missing in the log line.

Where: ``megatron.training.training.training_log`` prints means above zero only (Megatron-LM PR
1555).
Symptom: a balancing loss of zero, or the loss of an interval without targets, is not in the line,
and programs that read it find fewer columns.
Fix: the means that are missing are put in front of the loss scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind

_COUNT = "advanced iterations"
_COUNTS = (_COUNT, "skipped iterations", "nan iterations")
_NEXT = " loss scale: "


def reset_at_the_end_of_an_interval(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``training_log``."""

    def training_log(*args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        given = bind(original, args, kwargs)
        if given["iteration"] % get_args().log_interval == 0:
            given["is_first_iteration"] = False
        return original(**given)

    return training_log


class _Sums(dict[str, Any]):
    """The sums of an interval; ``replaced`` has those that a report has just reset."""

    def __init__(self, sums: dict[str, Any]) -> None:
        super().__init__(sums)
        self.replaced: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self:
            self.replaced[key] = self[key]
        super().__setitem__(key, value)

    def completed(self, line: str) -> str:
        """A log line with the means that it lacks."""
        sums = self if self[_COUNT] else {**self, **self.replaced}
        means = {
            key: float(value) / max(1, sums[_COUNT])
            for key, value in sums.items()
            if key not in _COUNTS
        }
        lacking = (
            f" {key}: {mean:.6E} |" for key, mean in means.items() if f" {key}: " not in line
        )
        before, found, after = line.partition(_NEXT)
        return before + "".join(lacking) + found + after if found else line


def print_every_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``training_log``."""

    def training_log(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import training

        given = bind(original, args, kwargs)
        total, write = given["total_loss_dict"], training.print_rank_last
        sums = _Sums(total)
        training.print_rank_last = lambda line: write(sums.completed(line))
        try:
            return original(**{**given, "total_loss_dict": sums})
        finally:
            training.print_rank_last = write
            total.clear()
            total.update(sums)

    return training_log


PATCHES = (
    repair(
        "megatron.training.training:training_log",
        reset_at_the_end_of_an_interval,
        "the second report after a start does not count the first iteration again",
        expects=(
            "(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, "
            "report_memory_flag, skipped_iter, grad_norm, params_norm, num_zeros_in_grad, "
            "max_attention_logit, pg_collection, is_first_iteration, ...)"
        ),
        versions=">=0.16",
    ),
    repair(
        "megatron.training.training:training_log",
        print_every_loss,
        "the log line has losses of zero and below",
        expects="(loss_dict, total_loss_dict, learning_rate, ...)",
    ),
)
