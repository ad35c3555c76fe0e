"""Defect: Megatron-FSDP adds up gradients wrongly.

Where: ``megatron.core.distributed.fsdp``. The reduction during backward adds the sum of the ranks
to this rank's part of the gradients, from which the sum was made, wherever ranks hold whole
gradients: with ``optim`` and ``--overlap-grad-reduce``, and with ``optim_grads`` and
``optim_grads_params`` for parameters of which one rank holds the only copy (Megatron-LM issue 6660:
one data-parallel rank, or experts with as many expert-parallel as data-parallel ranks). With
``--ddp-average-in-collective`` the gradients of experts are averaged over the ranks that have the
same experts, not over all ranks whose tokens they saw (issue 7452). ``count_zeros_fp32`` counts the
zeros of a parameter on each tensor-parallel rank that holds a copy of it.
Symptom: silent; gradients, or those of experts, are up to several times too large, from the first
step with ``optim``, from two micro-batches on otherwise. The number of zeros in the log is, too.
Fix: with ``optim`` gradients are reduced once, after the last micro-batch. The gradients of one
rank have a buffer for each micro-batch, like all others. Experts are scaled before the average.
Zeros are counted where the norm is.
Versions: all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import Patch

OWNER = "repair:fsdp-gradients"
NEEDED_WITH = ("use_megatron_fsdp",)


def buffer_for_each_micro_batch(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``ParamAndGradBuffer.__init__``."""

    def __init__(self: Any, ddp_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, ddp_config, *args, **kwargs)
        if ddp_config.data_parallel_sharding_strategy not in ("optim_grads", "optim_grads_params"):
            return
        for group in self.parameter_groups:
            gradients = group.main_grad_buffer
            if gradients is not None and gradients.dp_world_size == 1:
                gradients.is_data_distributed = True

    return __init__


def wait_for_the_last_micro_batch(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``GradReducePipeline.reduce_gradients``, which backward calls."""

    def reduce_gradients(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        if self.buffer.ddp_config.data_parallel_sharding_strategy != "optim":
            original(self, params, *args, **kwargs)

    return reduce_gradients


def reduce_what_waited(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``MegatronFSDP.finish_grad_sync``; without overlap Megatron reduces there itself."""

    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        config = self.ddp_config
        if config.data_parallel_sharding_strategy == "optim" and config.overlap_grad_reduce:
            self.param_and_grad_buffer.reduce_scatter_gradients()
        original(self, *args, **kwargs)

    return finish_grad_sync


def scale_before_the_average(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``gradient_reduce_preprocessing``, which forgets the factor if ranks average."""

    def gradient_reduce_preprocessing(grad_data: Any, scaling_factor: Any, ddp_config: Any) -> Any:
        if ddp_config.average_in_collective and scaling_factor is not None:
            grad_data.mul_(scaling_factor)
        return original(grad_data, scaling_factor, ddp_config)

    return gradient_reduce_preprocessing


def count_each_parameter_once(original: Callable[..., float]) -> Callable[..., float]:
    """Wrap ``count_zeros_fp32``."""

    def count_zeros_fp32(parameters: Any, *args: Any, **kwargs: Any) -> float:
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
        from megatron.core.transformer.module import param_is_not_shared

        given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        group = kwargs.get("tp_group")
        counted = [
            parameter
            for parameter in given
            if not getattr(parameter, "__fsdp_param__", False)
            or (
                param_is_not_shared(parameter)
                and param_is_not_tensor_parallel_duplicate(parameter, group)
            )
        ]
        return original(counted, *args, **kwargs)

    return count_zeros_fp32


_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"

PATCHES = (
    Patch(
        f"{_FSDP}.param_and_grad_buffer:ParamAndGradBuffer.__init__",
        buffer_for_each_micro_batch,
        OWNER,
        "the gradients of one rank are added up once",
        expects="(self, ddp_config, ...)",
    ),
    Patch(
        f"{_FSDP}.param_and_grad_buffer:GradReducePipeline.reduce_gradients",
        wait_for_the_last_micro_batch,
        OWNER,
        "whole gradients are not reduced while they are added up",
        expects="(self, params, ...)",
    ),
    Patch(
        f"{_FSDP}.megatron_fsdp:MegatronFSDP.finish_grad_sync",
        reduce_what_waited,
        OWNER,
        "whole gradients are reduced once, after the last micro-batch",
        expects="(self, ...)",
    ),
    Patch(
        f"{_FSDP}.param_and_grad_buffer:gradient_reduce_preprocessing",
        scale_before_the_average,
        OWNER,
        "averaged gradients of experts are those over all tokens",
        expects="(grad_data, scaling_factor, ddp_config)",
    ),
    Patch(
        "megatron.core.optimizer.clip_grads:count_zeros_fp32",
        count_each_parameter_once,
        OWNER,
        "the zeros of a parameter are counted once",
        expects="(parameters, grad_stats_parallel_group, use_decoupled_grad, ...)",
    ),
)
