"""Defects of checkpoints of models with experts.

Defect: a checkpoint of experts in the format ``torch`` lacks shards.

Where: ``save_checkpoint`` and ``save_grads`` of ``megatron.training.checkpointing``. Files are
named by tensor-, pipeline- and expert-parallel rank, but only ranks with expert-data-parallel rank
0 write (Megatron-LM PR 4678; its fix lets several ranks write one file under context parallelism).
Symptom: with more tensor-parallel ranks than ranks of experts the checkpoint has too few files,
which shows when it is loaded.
Fix: the first of the ranks with the same three numbers writes their file.

Defect: a ``torch_dist`` checkpoint cannot be loaded at another expert-parallel size.

Where: ``megatron.core.dist_checkpointing.serialization.load``. RNG states are stored as one sharded
object per tensor- and pipeline-parallel rank, and with expert parallelism per data-parallel rank
too. Megatron skips them after a change of the tensor- or pipeline-parallel size, but requires them
when only the expert- or data-parallel size has changed.
Symptom: loading fails because the objects do not exist.
Fix: keep the freshly seeded RNG states, as Megatron does in the other cases.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mindspeed.adaptor.patch import repair
from mindspeed.adaptor.signatures import bind

NEEDED_WITH = ("num_experts",)
logger = logging.getLogger("mindspeed")


class _Writers:
    """Megatron's parallel state, in which each file has one writer.

    Args:
        state: the module.
        writes: whether this rank does.
    """

    def __init__(self, state: Any, writes: bool) -> None:
        self._state, self._writes = state, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def get_expert_data_parallel_rank(self) -> int:
        """0 on a rank that writes."""
        return 0 if self._writes else 1


def by_the_first_of_a_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of ``checkpointing``, which all ranks call."""

    def save(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import checkpointing

        if not dist.is_initialized():
            return original(*args, **kwargs)
        state = checkpointing.mpu
        checkpointing.mpu = _Writers(state, _is_first(state))
        try:
            return original(*args, **kwargs)
        finally:
            checkpointing.mpu = state

    return save


def _is_first(state: Any) -> bool:
    name = (
        state.get_tensor_model_parallel_rank(),
        state.get_pipeline_model_parallel_rank(),
        state.get_expert_model_parallel_rank(),
    )
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, name)
    return names.index(name) == dist.get_rank()


def keep_seeded_rng_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``dist_checkpointing.load``."""

    def load(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject
        from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

        given = bind(original, args, kwargs)
        state_dict = given["sharded_state_dict"]
        shard = state_dict.get("rng_state")
        if isinstance(shard, ShardedObject):
            stored = load_sharded_metadata(str(given["checkpoint_dir"]))
            if shard.unique_key not in stored:
                if not dist.is_initialized() or dist.get_rank() == 0:
                    logger.warning(
                        "the checkpoint has no RNG states for these parallel sizes: using --seed"
                    )
                given["sharded_state_dict"] = {
                    **state_dict,
                    "rng_state": LocalNonpersistentObject(shard.data),
                }
        return original(**given)

    return load


PATCHES = (
    *(
        repair(
            f"megatron.training.checkpointing:{name}",
            by_the_first_of_a_name,
            "checkpoints in the format torch have every shard",
            expects=expects,
            versions=versions,
        )
        for name, expects, versions in (
            ("save_checkpoint", "(iteration, model, optimizer, ...)", ""),
            ("save_grads", "(save_dir, state_dict, iteration, grad_label)", ">=0.16"),
        )
    ),
    repair(
        "megatron.core.dist_checkpointing.serialization:load",
        keep_seeded_rng_state,
        "a checkpoint loads after a change of the expert-parallel size alone",
        expects="(sharded_state_dict, checkpoint_dir, ...)",
    ),
)
