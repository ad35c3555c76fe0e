"""Defect: a checkpoint loads into an optimizer of another structure without its param groups.

Where: ``torch_dist`` checkpoints of ``megatron.core.optimizer``. Tensors are stored by parameter
name, for any parallel sizes. Param groups (learning rate, weight decay, step) are stored by the
structure of the optimizer that saves: one optimizer, or one for dense and one for expert parameters
under expert parallelism, and one level deeper in the distributed optimizer:

    saved by                                 param groups in the state dict
    one optimizer, fp32                      param_groups
    one optimizer, 16 bit or distributed     optimizer / param_groups
    dense and experts                        0 / ... and 1 / ...

Symptom: ``KeyError: 'pre_wd_mult'`` after a change of ``--expert-model-parallel-size``, or from
``--dist-ckpt-optim-fully-reshardable`` to an optimizer that is not distributed.
Fix: the groups are read all the same, under the key they were saved with; they are moved to the key
under which the loading optimizer looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mindspeed.adaptor.arguments import may_be_on
from mindspeed.adaptor.patch import repair
from mindspeed.errors import CheckpointError

OUTERMOST = True  # what it loads passes through the other repairs of the optimizer
_IDENTIFIERS = ("wd_mult", "lr_mult", "is_decoupled_lr")  # and is_expert_parallel


def needed(values: Mapping[str, Any]) -> bool:
    """Whether a checkpoint may load into another structure."""
    names = ("load", "num_experts", "use_distributed_optimizer")
    return any(may_be_on(values, name) for name in names)


def load_any_structure(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_megatron_optimizer``: what it returns loads the groups of any structure."""

    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = original(*args, **kwargs)
        load = optimizer.load_state_dict
        optimizer.load_state_dict = lambda state_dict: load(
            with_param_groups(optimizer, state_dict)
        )
        return optimizer

    return get_megatron_optimizer


def with_param_groups(optimizer: Any, state_dict: Any) -> Any:
    """The state dict with parameter groups where ``optimizer`` looks for them.

    Returns:
        ``state_dict`` itself unless it is that of an optimizer with another structure.

    Raises:
        CheckpointError: the checkpoint has no parameter group for one of the optimizer's.
    """
    if not isinstance(state_dict, Mapping):
        return state_dict  # of the legacy format: one structure only
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    single = len(parts) == 1
    states = [state_dict] if single else [state_dict.get(i, {}) for i in range(len(parts))]
    pairs = list(zip(parts, states, strict=True))
    if all(_is_complete(part, state) for part, state in pairs):
        return state_dict
    saved = _Saved(state_dict)
    if not saved.groups:
        return state_dict
    loaded = [_with_groups(part, state, saved) for part, state in pairs]
    return loaded[0] if single else dict(enumerate(loaded))


class _Saved:
    """What a state dict holds besides tensors, wherever the optimizer that saved it put it."""

    def __init__(self, state_dict: Mapping[Any, Any]) -> None:
        dicts = list(_dicts_in(state_dict))
        lists = [found["param_groups"] for found in dicts if "param_groups" in found]
        self.groups = [group for groups in lists for group in groups if _identifier(group)]
        self.rest = {
            key: found[key]
            for key in ("param_state_sharding_type", "grad_scaler")
            for found in dicts
            if key in found
        }
        common = [found["common_step"] for found in dicts if "common_step" in found]
        self.common_step = common[0] if common else None
        # An optimizer does not count the steps of a group without parameters.
        self.step = max((group["step"] for group in self.groups if "step" in group), default=None)

    def group_like(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The hyperparameters of a group, that of the same kind of parameters if there is one."""
        same = [found for found in self.groups if _identifier(found) == _identifier(group)]
        if not same:
            have = ", ".join(sorted({str(_identifier(found)) for found in self.groups}))
            raise CheckpointError(
                f"the checkpoint's optimizer has no parameter group with {_IDENTIFIERS} = "
                f"{_identifier(group)}, only {have}; give the flags of the run that saved it, or "
                "--no-load-optim"
            )
        expert = group["is_expert_parallel"]
        same.sort(key=lambda found: found.get("is_expert_parallel") != expert)
        values = {key: value for key, value in same[0].items() if key != "params"}
        step = {} if self.step is None else {"step": self.step}
        return {**values, **step, "is_expert_parallel": expert}


def _with_groups(part: Any, state: Mapping[Any, Any], saved: _Saved) -> dict[Any, Any]:
    state = {key: value for key, value in state.items() if not isinstance(key, int)}
    groups = [saved.group_like(group) for group in _groups_of(part)]
    if "param_state" in state:  # the distributed optimizer
        return {**state, **saved.rest, "optimizer": {"param_groups": groups}}
    half = "fp32_from_fp16_params" in state
    inner = dict(state["optimizer"] if half else state)
    own = part.optimizer.state_dict()["param_groups"]
    inner["param_groups"] = [
        {**group, "params": mine["params"]} for group, mine in zip(groups, own, strict=True)
    ]
    if saved.common_step is not None:
        inner["state"] = {**inner["state"], "common_step": saved.common_step}
    return {**state, **saved.rest, "optimizer": inner} if half else inner


def _is_complete(part: Any, state: Mapping[Any, Any]) -> bool:
    nested = "param_state" in state or "fp32_from_fp16_params" in state
    inner = state.get("optimizer") if nested else state
    groups = (inner or {}).get("param_groups") or ()
    return len(groups) == len(_groups_of(part)) and all(map(_identifier, groups))


def _groups_of(part: Any) -> list[dict[str, Any]]:
    return [] if part.optimizer is None else part.optimizer.param_groups


def _identifier(group: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What tells groups apart, None if ``group`` has no hyperparameters. NeMo writes ``pre_``."""
    values = [group.get(name, group.get(f"pre_{name}")) for name in _IDENTIFIERS]
    return None if None in values else tuple(values)


def _dicts_in(tree: Any) -> Iterator[Mapping[Any, Any]]:
    """Dictionaries of a state dict, outermost first, without those of single parameters."""
    if not isinstance(tree, Mapping):
        return
    yield tree
    for key in ("optimizer", "state", *(key for key in tree if isinstance(key, int))):
        yield from _dicts_in(tree.get(key))


PATCHES = (
    repair(
        "megatron.core.optimizer:get_megatron_optimizer",
        load_any_structure,
        "an optimizer loads a checkpoint with another expert-parallel size, or not distributed",
        expects="(config, model_chunks, ...)",
    ),
)
