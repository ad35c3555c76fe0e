"""The contents of a checkpoint, with the names and types of Megatron-LM.

``model`` (``model0`` ... with virtual stages), ``optimizer``, ``opt_param_scheduler``,
``rng_state``, ``args`` (a namespace), ``iteration``, ``checkpoint_version`` and the operations so
far. Only types that ``torch.load(weights_only=True)`` accepts are stored.
"""

from __future__ import annotations

import argparse
import enum
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mindspeed import device
from mindspeed.adaptor.versions.checkpoints import optimizer_state, sharding
from mindspeed.built_model import BuiltModel, TrainedModel
from mindspeed.checkpoint import fsdp_state
from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.flags import GIVEN, read
from mindspeed.job import Parallel, Sharding, TrainState
from mindspeed.lora.state import sharded_state as adapter_state


def sharding_metadata(args: argparse.Namespace) -> dict[str, Any]:
    """How the optimizer state is sharded; stored in the checkpoint."""
    shared = Sharding.of(args)
    if not shared.distributed_optimizer:
        return sharding(distributed=False)
    fully = read(CheckpointOptions, args).dist_ckpt_optim_fully_reshardable or shared.fsdp
    return sharding(distributed=True, fully=fully)


def state_dict(
    args: argparse.Namespace,
    model: BuiltModel,
    metadata: dict[str, Any],
    *,
    optimizer: bool,
    rng: bool,
    is_loading: bool = False,
    adapter: bool = False,
) -> dict[str, Any]:
    """The sharded state dict of this rank.

    ``optimizer`` includes the schedule and needs a :class:`TrainedModel`; with ``adapter`` only
    what is trained on top of a frozen base model counts as the model.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {**metadata, "dp_cp_group": group}
    modules = model.modules
    sharded = fsdp_state.is_sharded(model.chunks[0])
    state: dict[str, Any] = {}
    for index, (chunk, module) in enumerate(zip(model.chunks, modules, strict=True)):
        if sharded:
            own = fsdp_state.model_state(chunk)
        elif adapter:
            own = adapter_state(module, metadata)
        else:
            own = module.sharded_state_dict(metadata=metadata)
        state[model_key(index, len(modules))] = own
    if optimizer:
        assert isinstance(model, TrainedModel)
        if model.optimizer.is_stub_optimizer:
            pass
        elif sharded:
            state["optimizer"] = fsdp_state.optimizer_state(
                model.chunks, model.optimizer, is_loading=is_loading
            )
        else:
            state["optimizer"] = optimizer_state(
                model.optimizer, state, metadata, is_loading=is_loading
            )
        state["opt_param_scheduler"] = model.schedule.state_dict()
    if rng:
        state["rng_state"] = _sharded_rng_state(args)
    return state


def model_key(index: int, count: int) -> str:
    """``model``, or ``model0``, ``model1`` ... with virtual pipeline stages."""
    return "model" if count == 1 else f"model{index}"


def stored_args(args: argparse.Namespace, state: TrainState | None = None) -> argparse.Namespace:
    """The values of a run, equal on all ranks and of types that load without running code.

    Args:
        args: final values, or those of a checkpoint with its counters.
        state: the counters of a run.
    """
    plain: dict[str, Any] = {
        name: value
        for name, value in vars(args).items()
        if _is_plain(value) and name not in ("rank", "local_rank", GIVEN)
    }
    if hasattr(args, "persist_layer_norm"):  # Megatron-LM's flag, and ours, says the opposite
        plain["no_persist_layer_norm"] = not args.persist_layer_norm
    return argparse.Namespace(**plain | (state.saved() if state else {}))


def restore_rng(state: Any) -> None:
    """Set all generators of this rank to a saved state."""
    mine = state[0] if len(state) == 1 else state[parallel_state.get_data_parallel_rank()]
    random.setstate(mine["random_rng_state"])
    np.random.set_state(mine["np_rng_state"])
    torch.set_rng_state(mine["torch_rng_state"])
    device.current().generator().set_state(mine["cuda_rng_state"])
    get_cuda_rng_tracker().set_states(mine["rng_tracker_states"])


def _sharded_rng_state(args: argparse.Namespace) -> ShardedObject:
    """The generators of this rank; one entry per (pipeline, tensor) position, as Megatron-LM."""
    mine = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": device.current().generator().get_state(),
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }
    states: list[Any] = [mine]
    if args.data_parallel_random_init:
        states = [None] * parallel_state.get_data_parallel_world_size()
        dist.all_gather_object(states, mine, group=parallel_state.get_data_parallel_group())
    pp, tp = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    parallel = Parallel.of(args)
    sizes = (parallel.pipeline, parallel.tensor)
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if parallel.expert > 1:  # experts differ between data-parallel ranks
        replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        return ShardedObject(
            "rng_state", states, (*sizes, replicas), (pp, tp, replica), replica_id=0
        )
    return ShardedObject("rng_state", states, sizes, (pp, tp), replica_id=replica)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    if isinstance(value, enum.Enum):
        return type(value).__module__.startswith("megatron.core")
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)
