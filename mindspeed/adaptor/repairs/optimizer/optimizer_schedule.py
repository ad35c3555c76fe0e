"""Defect: a loaded checkpoint decides the learning rates that the flags of the run decide.

Where: ``load_state_dict`` of the optimizers of ``megatron.core.optimizer``. Each param group holds
the limits of its schedule (``max_lr``, ``min_lr``, ``start_wd``, ``end_wd``), which the scheduler
prefers to its own; loading takes them from the saved group. Groups that differ in nothing else
(``--decoupled-lr``) are not told apart: each gets limits and, without the distributed optimizer,
states of the last. ``OptimizerParamScheduler.load_state_dict`` sets rates and decays before it has
read the decays of the checkpoint. Upstream: Megatron-LM issues 1138 and 963, PRs 1284, 4705, 5212.
Symptom: with ``--override-opt_param-scheduler`` the log says "overriding learning rate value" and
training goes on with the old one; with ``--decoupled-lr`` a resumed run trains with the learning
rate of embeddings, or ends in "a parameter group that doesn't match the size"; with
``--use-checkpoint-opt_param-scheduler`` the first step decays by the flags.
Fix: groups keep the limits that they were built with; a scheduler that uses the checkpoint's values
(``--use-checkpoint-opt_param-scheduler``) puts the saved ones back. Groups are told apart by their
limits and their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.adaptor.arguments import may_be_on
from mindspeed.adaptor.patch import repair

_NUMBERED = "is_decoupled_lr"
_COMPARED = ("wd_mult", "lr_mult", "is_expert_parallel", _NUMBERED)
LIMITS = ("max_lr", "min_lr", "start_wd", "end_wd")


def needed(values: Mapping[str, Any]) -> bool:
    """Whether a run may load param groups, or has some with a learning rate of their own."""
    names = ("load", "decoupled_lr", "override_opt_param_scheduler", "use_distributed_optimizer")
    return any(may_be_on(values, name) for name in names)


def keep_limits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_megatron_optimizer``: the groups of what it returns keep their limits."""

    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            if getattr(part, "optimizer", None) is not None:
                _tell_groups_apart(part)
        load = optimizer.load_state_dict

        def load_state_dict(state_dict: Any) -> None:
            built = _limits(optimizer)
            load(state_dict)
            optimizer.saved_limits = _limits(optimizer)
            _set_limits(optimizer, built)

        optimizer.load_state_dict = load_state_dict
        return optimizer

    return get_megatron_optimizer


def use_saved_limits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``OptimizerParamScheduler.load_state_dict``, which is called after the optimizer's."""

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        saved = getattr(self.optimizer, "saved_limits", None)
        if saved and self.use_checkpoint_opt_param_scheduler:
            _set_limits(self.optimizer, saved)
        original(self, state_dict)
        self.step(0)

    return load_state_dict


def _tell_groups_apart(part: Any) -> None:
    """Let one optimizer load param groups that Megatron finds equal, each from its own one.

    Megatron compares :data:`_COMPARED`; one of these is a number while it loads.
    """
    before = vars(part).get("load_state_dict")

    def load(state_dict: Any) -> None:
        # The class is asked late: precision-aware optimizers get one of their own after this.
        (before or type(part).load_state_dict.__get__(part))(state_dict)

    def load_state_dict(state_dict: Any) -> None:
        own = part.optimizer.param_groups
        flags = [group.get(_NUMBERED) for group in own]
        at = next((key for key in ("optimizer", "optimizer_state_dict") if key in state_dict), None)
        inner = state_dict if at is None else state_dict[at]
        pairs = _pairs(own, inner.get("param_groups") or [])
        if pairs is None:
            load(state_dict)
            return
        numbered = [dict(group) for group in inner["param_groups"]]
        for number, (index, saved) in enumerate(pairs):
            own[index][_NUMBERED] = numbered[saved][_NUMBERED] = number
        inner = {**inner, "param_groups": numbered}
        try:
            load(inner if at is None else {**state_dict, at: inner})
        finally:
            for group, flag in zip(part.optimizer.param_groups, flags, strict=True):
                group[_NUMBERED] = flag

    part.load_state_dict = load_state_dict


def _pairs(own: list[dict[str, Any]], saved: list[dict[str, Any]]) -> list[tuple[int, int]] | None:
    """Indices of own and saved groups that belong together; None where Megatron sees that itself.

    Of groups that it finds equal those with the same limits are paired, others in their order.
    """

    def compared(group: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(group.get(name, group.get(f"pre_{name}")) for name in _COMPARED)

    kinds = [compared(group) for group in own]
    if len(set(kinds)) == len(kinds) or sorted(map(str, kinds)) != sorted(
        str(compared(group)) for group in saved
    ):
        return None
    free, found = list(range(len(saved))), dict[int, int]()
    for exactly in (("default_config", *LIMITS), ("default_config",), ()):
        for index, group in enumerate(own):
            wanted = compared(group), [group.get(name) for name in exactly]
            for other in () if index in found else free:
                of_saved = [saved[other].get(name) for name in exactly]
                if wanted == (compared(saved[other]), of_saved):
                    found[index] = other
                    free.remove(other)
                    break
    return sorted(found.items())


def _limits(optimizer: Any) -> list[dict[str, Any]]:
    return [{n: group[n] for n in LIMITS if n in group} for group in _groups(optimizer)]


def _set_limits(optimizer: Any, limits: list[dict[str, Any]]) -> None:
    for group, own in zip(_groups(optimizer), limits, strict=True):
        for name in LIMITS:
            group.pop(name, None)
        group.update(own)


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """The param groups of all parts, in order; of a frozen part none."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = [getattr(part, "optimizer", None) for part in parts]
    return [group for one in inner if one is not None for group in one.param_groups]


PATCHES = (
    repair(
        "megatron.core.optimizer:get_megatron_optimizer",
        keep_limits,
        "the flags of a resumed run decide its learning rates",
        expects="(config, model_chunks, ...)",
    ),
    repair(
        "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict",
        use_saved_limits,
        "a scheduler that uses the checkpoint's values sets those before the next step",
        expects="(self, state_dict)",
    ),
)
