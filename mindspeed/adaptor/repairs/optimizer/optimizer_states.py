"""Defect: checkpoints of the distributed optimizer hold the states of plain Adam only.

Where: ``DistributedOptimizer`` of ``megatron.core.optimizer.distrib_optimizer``. Without
``--use-precision-aware-optimizer`` it reads and writes the tensors in the inner optimizer's
``state`` as they are, whatever they are stored as; with it ``reload_model_params`` does nothing.
Two of its layouts (``fully_reshardable``, and the file of ``--ckpt-format torch``) name ``exp_avg``
and ``exp_avg_sq``, and no other state.
Symptom: states stored in 16 bits or in host memory are saved without their scales or cannot be
copied; the states of another update rule are lost, or end in a ``KeyError`` when it resumes;
weights that a running job replaces (reinforcement learning, merges) are overwritten by the update
of the old master weights.
Fix: states go through the accessors of :class:`mindspeed.te.stored_states.StoredStates`, in fp32;
the two layouts get one entry more per additional state; master weights inside the inner optimizer
are reloaded. Shards learn which part of their parameter they are and whether its gradients are
rare, for storages that depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mindspeed.adaptor.arguments import may_be_on
from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind

if TYPE_CHECKING:
    from mindspeed.te.stored_states import StoredStates

MASTER = "master_param"  # as in te.stored_states, which is only loaded with an optimizer
_NAMED = ("param", "exp_avg", "exp_avg_sq")  # in Megatron's source


def needed(values: Mapping[str, Any]) -> bool:
    """Whether checkpoints may hold states other than those of plain Adam."""
    return any(may_be_on(values, name) for name in ("use_distributed_optimizer", "quant_states"))


def hold_all_states(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``get_megatron_optimizer``: checkpoints of what it returns hold every state."""

    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

        from mindspeed.optimizer.megatron import mark_rare_gradients
        from mindspeed.te.stored_states import StoredStates

        mark_rare_gradients(bind(original, args, kwargs)["model_chunks"])
        optimizer = original(*args, **kwargs)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            inner = getattr(part, "optimizer", None)
            sharded = isinstance(part, DistributedOptimizer) and hasattr(part, "buffers")
            if sharded and isinstance(inner, StoredStates):
                _describe_shards(part, inner)
                if inner.master_weights:
                    _reload_masters(part, inner)
                if not inner.holds_plain_moments:
                    _CheckpointedStates(part, inner)
        return optimizer

    return get_megatron_optimizer


def _describe_shards(part: Any, inner: StoredStates) -> None:
    for parameter, (group, order) in part.model_param_group_index_map.items():
        shard: Any = inner.param_groups[group]["params"][order]
        shard.parameter_shape = parameter.shape
        shard.rare_gradients = getattr(parameter, "rare_gradients", False)
        shard.parameter_start = part._get_model_param_range_map(parameter)["param"].start


def _reload_masters(part: Any, inner: StoredStates) -> None:
    """Let ``reload_model_params`` of one ``DistributedOptimizer`` reach masters in ``inner``."""
    original = part._copy_model_params_to_main_params

    def _copy_model_params_to_main_params(state_dict: Any = None) -> None:
        original(state_dict)
        values = state_dict and part._build_model_param_to_state_dict_param_map(state_dict)
        for parameter, (group, order) in part.model_param_group_index_map.items():
            shard = inner.param_groups[group]["params"][order]
            if MASTER not in inner.state.get(shard, ()):
                if not values or MASTER not in inner.names(shard):
                    continue  # the first step takes it from the weight
                inner.initialize_state(shard)
            where = part._get_model_param_range_map(parameter)["param"]
            value = (values[parameter] if values else parameter).detach().view(-1)
            value = value[where.start : where.end].to(shard.device, torch.float32)
            inner.set_scaled_state(shard, MASTER, value)

    part._copy_model_params_to_main_params = _copy_model_params_to_main_params


class _CheckpointedStates:
    """Replaces four methods of one ``DistributedOptimizer``, on the instance.

    Args:
        part: the optimizer.
        inner: what it updates its shards with.
    """

    def __init__(self, part: Any, inner: StoredStates) -> None:
        self._part, self._inner = part, inner
        self._gather = part.get_parameter_state_dp_zero
        self._scatter = part.load_parameter_state_from_dp_zero
        part._get_main_param_and_optimizer_states = self.get
        part._set_main_param_and_optimizer_states = self.set
        part.get_parameter_state_dp_zero = self.gather
        part.load_parameter_state_from_dp_zero = self.scatter

    def _shard(self, parameter: torch.Tensor) -> torch.Tensor:
        group, order = self._part.model_param_group_index_map[parameter]
        shard: torch.Tensor = self._inner.param_groups[group]["params"][order]
        return shard

    def get(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """This rank's shard of the main parameter and of every state: fp32 ``[n]`` each."""
        shard = self._shard(parameter)
        states = {n: self._inner.get_unscaled_state(shard, n) for n in self._inner.state[shard]}
        return {"param": states.pop(MASTER, shard), **states}

    def set(self, parameter: torch.Tensor, tensors: dict[str, Any]) -> None:
        """Store what :meth:`get` returns, ``[n]`` each; leave out names without a state."""
        shard = self._shard(parameter)
        for name, value in tensors.items():
            if name != "param":
                self._inner.set_scaled_state(shard, name, value)
            elif MASTER in self._inner.state[shard]:
                self._inner.set_scaled_state(shard, MASTER, value)
            else:
                shard.detach().copy_(value)

    def gather(self, *args: Any, **kwargs: Any) -> Any:
        """Gather as Megatron does, and each additional state like the main parameters."""
        state = self._gather(*args, **kwargs)
        for name in self._inner.additional_states:
            with self._instead(
                get=lambda p, n=name: dict.fromkeys(_NAMED, self.get(p)[n]), set=self.set
            ):
                gathered = self._gather(*args, **kwargs)
            for own, other in _buffers(state, gathered):
                own[name] = other["param"]
        return state

    def scatter(self, state_dict: Any, **kwargs: Any) -> None:
        """Scatter as Megatron does, and each additional state that the first rank has read."""
        self._scatter(state_dict, **kwargs)
        for name in self._inner.additional_states:
            found = [bool(state_dict) and all(name in s for s, _ in _buffers(state_dict))]
            group = self._part.data_parallel_group_gloo
            dist.broadcast_object_list(found, dist.get_process_group_ranks(group)[0], group)
            if not found[0]:
                continue
            seen = state_dict and _renamed(state_dict, name)
            with self._instead(
                get=self.get, set=lambda p, tensors, n=name: self.set(p, {n: tensors["param"]})
            ):
                self._scatter(seen, **kwargs)

    @contextmanager
    def _instead(self, get: Callable[..., Any], set: Callable[..., Any]) -> Iterator[None]:
        part = self._part
        part._get_main_param_and_optimizer_states = get
        part._set_main_param_and_optimizer_states = set
        try:
            yield
        finally:
            part._get_main_param_and_optimizer_states = self.get
            part._set_main_param_and_optimizer_states = self.set


def _buffers(state: Any, other: Any = None) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The tensors of each buffer and dtype in gathered states, next to those of ``other``."""
    for index, dtypes in (state or {}).items():
        if isinstance(index, int):
            for dtype, tensors in dtypes.items():
                yield tensors, (other or state)[index][dtype]


def _renamed(state: dict[Any, Any], name: str) -> dict[Any, Any]:
    """Gathered states in which the state ``name`` takes the place of those that Megatron names."""
    return {
        index: {
            dtype: {**tensors, **dict.fromkeys(_NAMED, tensors[name])}
            for dtype, tensors in dtypes.items()
        }
        if isinstance(index, int)
        else dtypes
        for index, dtypes in state.items()
    }


PATCHES = (
    repair(
        "megatron.core.optimizer:get_megatron_optimizer",
        hold_all_states,
        "checkpoints of the distributed optimizer hold all states of an update rule",
        expects="(config, model_chunks, ...)",
    ),
)
