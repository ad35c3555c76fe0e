"""Shards of ZeRO stages 2 and 3, by Megatron-FSDP, and gradients in any stage.

What the stages are is in :mod:`mindspeed.training.resolve_zero`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from mindspeed.built_model import unwrap
from mindspeed.checkpoint.fsdp_state import contents, is_sharded
from mindspeed.errors import ConfigError
from mindspeed.lora.attach import adapted
from mindspeed.lora.state import remember_base
from mindspeed.lora.state import sharded_state as adapter_state
from mindspeed.training import sharded_init
from mindspeed.training.resolve_zero import STRATEGIES


def shard(config: Any, ddp: Any, module: Any) -> Any:
    """Wrap a stage so that ranks keep shards of its gradients, and of its parameters in stage 3.

    Args:
        config: Megatron's configuration of the model.
        ddp: Its configuration of data parallelism, with the sharding strategy.
        module: The stage, with its weights: they are handed out here.

    Raises:
        ConfigError: A parameter would have to be sharded inside a row.
        CheckpointError: One could not be saved.
    """
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    (stage,) = unwrap([module])
    if adapted([stage]):
        remember_base(stage)
    state = adapter_state(stage) if adapted([stage]) else stage.sharded_state_dict()
    held = contents(module, state)
    parameters = ddp.data_parallel_sharding_strategy == STRATEGIES[3]
    # Shards are reduced and gathered as layers go by; there is no other way to run.
    ddp = replace(ddp, overlap_grad_reduce=True, overlap_param_gather=parameters)
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    for parameter in frozen:  # Megatron registers hooks on them, which torch refuses
        parameter.register_post_accumulate_grad_hook = _never
    # Modules with an instance attribute `reset_parameters` give their parameters one by one.
    config.init_model_with_meta_device = sharded_init.is_sharded(stage)
    sharded_init.keep_buffers(stage)
    try:
        chunk = FullyShardedDataParallel(config=config, ddp_config=ddp, module=module)
    except RuntimeError as error:
        if "is invalid for input of size" not in str(error):
            raise
        raise ConfigError(
            "--zero-stage 2 and 3 shard parameters between rows, and Megatron-FSDP cannot do that "
            "with a parameter that is smaller than a row of another one; use another number of "
            "ranks, a larger --lora-r, or --zero-stage 1"
        ) from error
    finally:
        config.init_model_with_meta_device = False
    for parameter in frozen:
        del parameter.register_post_accumulate_grad_hook
    # A hook that copies the optimizer's weights over those that a checkpoint was just read into.
    chunk.module._load_state_dict_post_hook.remove()
    chunk.contents = held
    return chunk


def gradients(chunk: Any) -> list[torch.Tensor]:
    """This rank's shards of a stage's gradients, in any ZeRO stage.

    Without sharding one flat buffer ``[n]`` each, padding included; else one tensor per parameter,
    ``[rows, ...]`` with the parameter's other dimensions. fp32 or the dtype of the parameters.
    """
    if is_sharded(chunk):  # not the buffers: their padding is what memory happened to hold
        named = chunk.param_and_grad_buffer.optimizer_named_parameters
        return [kept for _, parameter in named if (kept := gradient(parameter)) is not None]
    return [b.grad_data for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's shard of a parameter's gradient, in any ZeRO stage.

    Args:
        parameter: Any shape and dtype; a DTensor in stages 2 and 3.

    Returns:
        ``main_grad``, else ``grad``: the parameter's shape, in stages 2 and 3 this rank's
        ``[rows, ...]``; None where there is none.
    """
    found = getattr(parameter, "main_grad", parameter.grad)
    kept: torch.Tensor | None = getattr(found, "_local_tensor", found)
    return kept


def _never(hook: Any) -> None:
    """Replaces the registration of a gradient hook on a frozen parameter."""
