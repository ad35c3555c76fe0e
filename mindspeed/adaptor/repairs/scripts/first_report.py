"""Defect: the second loss that a run prints is the mean of its first two iterations.

Where: ``megatron.training.training.training_log`` reports the first iteration after every start
without resetting its sums and its timer, so that the interval that has begun stays complete. Where
the first iteration is also the end of an interval (each one with ``--log-interval 1``; number 100
of a run resumed at 99 with an interval of 10), the next report counts it a second time.
Symptom: loss, auxiliary losses, and time of an iteration in that report are means over one
iteration too many; gradient norms beside them are not.
Fix: a first report that ends an interval resets the sums, as all others do.
Versions: >=0.16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspeed.adaptor.patch import Patch
from mindspeed.adaptor.signatures import bind

OWNER = "repair:first-report"


def reset_at_the_end_of_an_interval(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``training_log``."""

    def training_log(*args: Any, **kwargs: Any) -> Any:
        from megatron.training.global_vars import get_args

        given = bind(original, args, kwargs)
        if given["iteration"] % get_args().log_interval == 0:
            given["is_first_iteration"] = False
        return original(**given)

    return training_log


PATCHES = (
    Patch(
        "megatron.training.training:training_log",
        reset_at_the_end_of_an_interval,
        OWNER,
        "the second report after a start does not count the first iteration again",
        expects=(
            "(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, "
            "report_memory_flag, skipped_iter, grad_norm, params_norm, num_zeros_in_grad, "
            "max_attention_logit, pg_collection, is_first_iteration, ...)"
        ),
        versions=">=0.16",
    ),
)
