"""Defect: a run does not continue from the checkpoint that it saves when a step went wrong.

Where: ``megatron.core.rerun_state_machine.RerunStateMachine``, which by default runs a step again
whose loss or gradient is not finite.
* A transient fault ends the job with a checkpoint of the step before. It says that the second run
  goes on, but the generators' states that this restores are not in it (Megatron-LM PR 3981).
* A fault that remains ends it with a checkpoint that holds what the next job needs to tell why;
  with ``--ckpt-assume-constant-structure`` it is written by the plan of the ones before, which do
  not (PR 4448).
Symptom: the resumed job ends in a ``TypeError``, or does not find ``rerun_state_machine_state``.
Fix: the state of a second run in the same process is neither saved nor loaded; a checkpoint with
the state of the machine gets its own plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind


def needed(values: Mapping[str, Any]) -> bool:
    """Whether steps may be run again."""
    return values.get("rerun_mode") != "disabled"


def without_a_second_run(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``RerunStateMachine.state_dict``."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = bind(original, (self, *args), kwargs)
        if not given["force"] and _in_this_process(self.state):
            return None
        return original(**given)

    return state_dict


def not_of_a_second_run(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``RerunStateMachine.validate_state_dict``: others may have saved it."""

    def validate_state_dict(self: Any, state_dict: Any) -> bool:
        valid: bool = original(self, state_dict)
        return valid and not _in_this_process(state_dict["state"])

    return validate_state_dict


def with_a_plan_of_its_own(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``save_checkpoint``."""

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

        context = bind(original, args, kwargs)["checkpointing_context"]
        if context and get_rerun_state_machine().state != RerunState.NOT_RUNNING_YET:
            context.pop("save_strategy", None)  # the job ends after this checkpoint
        return original(*args, **kwargs)

    return save_checkpoint


def _in_this_process(state: Any) -> bool:
    from megatron.core.rerun_state_machine import RerunState

    return bool(state == RerunState.RERUNNING_IN_PLACE)


PATCHES = (
    repair(
        "megatron.core.rerun_state_machine:RerunStateMachine.state_dict",
        without_a_second_run,
        "the checkpoint after a transient fault can be resumed",
        expects="(self, data_iterator, ckpt_format, force, ...)",
        versions=">=0.15",
    ),
    repair(
        "megatron.core.rerun_state_machine:RerunStateMachine.validate_state_dict",
        not_of_a_second_run,
        "a checkpoint after a transient fault is resumed",
        expects="(self, state_dict)",
        versions=">=0.15",
    ),
    repair(
        "megatron.training.checkpointing:save_checkpoint",
        with_a_plan_of_its_own,
        "a checkpoint with the state of a step to run again has a plan of its own",
        expects=(
            "(iteration, model, optimizer, opt_param_scheduler, "
            "num_floating_point_operations_so_far, checkpointing_context, ...)"
        ),
    ),
)
