"""Defects of Megatron-FSDP.

Defect: ``fsdp_dtensor`` checkpoints split first layers of MLPs by their names.

Where: ``megatron.core.transformer.fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict`` takes every
first layer for a fused gate and up projection, also in a model that has layers without a gate
(vision and language, Megatron-LM PR 3936), and looks it up by its state-dict name with an
additional ``module.`` prefix. That is correct for a 16-bit model only: ``Float16Module`` omits its
own level from state-dict names but is a module level.
Symptom: silent halves of a weight that has none; "GPTModel has no attribute `module`" for an fp32
model.
Fix: look parameters up by their name below all wrappers, and split those of gated layers only.

Defect: Megatron-FSDP gives all tensor-parallel ranks one dropout mask.

Where: ``FullyShardedDataParallel.sync_rng_states_across_tp_group`` of
``megatron.core.distributed.fsdp.mcore_fsdp_adapter`` copies all generators of the first
tensor-parallel rank to the others, those too that differ on purpose.
Symptom: silent; the attention heads of each rank, and with sequence parallelism its part of the
sequence, are dropped with the same mask.
Fix: each rank keeps the generators that Megatron tracks; the others are the same before and after.
Versions: 0.16 and newer.

Defect: Megatron-FSDP adds up gradients wrongly.

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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import repair

NEEDED_WITH = ("use_megatron_fsdp",)
_FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp"


class _UnwrappedNames:
    """A wrapped model whose ``get_parameter`` ignores ``module.`` prefixes of the name."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def get_parameter(self, name: str) -> Any:
        inner = self._model
        while hasattr(inner, "module"):
            inner = inner.module
        while name.startswith("module."):
            name = name.removeprefix("module.")
        return inner.get_parameter(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def split_gated_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``handle_swiglu_in_state_dict``."""

    def handle_swiglu_in_state_dict(
        model: Any, model_state_dict: dict[str, Any], optimizer_state_dict: dict[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        gated, others = _by_gate(model, model_state_dict)
        states = (optimizer_state_dict or {}).get("state", {})
        gated_states, other_states = _by_gate(model, states)
        if optimizer_state_dict is not None:
            optimizer_state_dict = {**optimizer_state_dict, "state": gated_states}
        weights, optimizer = original(_UnwrappedNames(model), gated, optimizer_state_dict)
        if optimizer is not None:
            optimizer = {**optimizer, "state": {**optimizer["state"], **other_states}}
        return {**weights, **others}, optimizer

    return handle_swiglu_in_state_dict


def _by_gate(model: Any, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries that may be split, and those below a module without a gate."""
    inner = model
    while hasattr(inner, "module"):
        inner = inner.module
    gated = {name: value for name, value in state.items() if _has_gate(inner, name)}
    return gated, {name: value for name, value in state.items() if name not in gated}


def _has_gate(module: Any, name: str) -> bool:
    """Whether the innermost configuration on the way to a parameter has a gate."""
    gated = True
    while name.startswith("module."):
        name = name.removeprefix("module.")
    for part in name.split("."):
        config = getattr(module, "config", None)
        gated = getattr(config, "gated_linear_unit", gated)
        module = getattr(module, part, None)
    return gated


def keep_own_generators(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``FullyShardedDataParallel.sync_rng_states_across_tp_group``."""

    def sync_rng_states_across_tp_group(self: Any) -> None:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        own = get_cuda_rng_tracker().get_states()
        original(self)
        get_cuda_rng_tracker().set_states(own)

    return sync_rng_states_across_tp_group


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


PATCHES = (
    repair(
        "megatron.core.transformer.fsdp_dtensor_checkpoint:handle_swiglu_in_state_dict",
        split_gated_layers,
        "gate and up projections, and no others, are split in checkpoints of Megatron-FSDP",
        expects="(model, model_state_dict, optimizer_state_dict)",
        versions=">=0.15",
    ),
    *(
        repair(
            f"megatron.core.distributed.fsdp.mcore_fsdp_adapter:{name}"
            ".sync_rng_states_across_tp_group",
            keep_own_generators,
            "tensor-parallel ranks keep dropout masks of their own",
            expects="(self)",
            versions=versions,
        )
        for name, versions in (
            ("FullyShardedDataParallel", ">=0.16,<0.20"),
            ("FullyShardedDataParallelV1", ">=0.20"),
        )
    ),
    repair(
        f"{_FSDP}.param_and_grad_buffer:ParamAndGradBuffer.__init__",
        buffer_for_each_micro_batch,
        "the gradients of one rank are added up once",
        expects="(self, ddp_config, ...)",
        versions=">=0.15",
    ),
    repair(
        f"{_FSDP}.param_and_grad_buffer:GradReducePipeline.reduce_gradients",
        wait_for_the_last_micro_batch,
        "whole gradients are not reduced while they are added up",
        expects="(self, params, ...)",
        versions=">=0.15",
    ),
    repair(
        f"{_FSDP}.megatron_fsdp:MegatronFSDP.finish_grad_sync",
        reduce_what_waited,
        "whole gradients are reduced once, after the last micro-batch",
        expects="(self, ...)",
        versions=">=0.15",
    ),
    repair(
        f"{_FSDP}.param_and_grad_buffer:gradient_reduce_preprocessing",
        scale_before_the_average,
        "averaged gradients of experts are those over all tokens",
        expects="(grad_data, scaling_factor, ddp_config)",
        versions=">=0.15",
    ),
    repair(
        "megatron.core.optimizer.clip_grads:count_zeros_fp32",
        count_each_parameter_once,
        "the zeros of a parameter are counted once",
        expects="(parameters, grad_stats_parallel_group, use_decoupled_grad, ...)",
    ),
)
