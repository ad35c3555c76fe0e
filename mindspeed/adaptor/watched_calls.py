"""Modules and classes of Megatron in which planning watches decisions and computations, by name."""

from __future__ import annotations

from typing import Any


def schedule_steps() -> Any:
    """The module whose ``forward_step`` and ``backward_step`` every schedule of Megatron calls."""
    from megatron.core.pipeline_parallel import schedules

    return schedules


def parts_of_layers() -> tuple[Any, Any]:
    """Classes of the parts that run one by one beside those of another micro-batch.

    Returns:
        Of all parts, which have ``_forward`` and ``_backward``; and of those of a layer, which have
        ``backward_dw``, too.
    """
    from megatron.core.models.gpt.fine_grained_callables import TransformerLayerNode
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    return ScheduleNode, TransformerLayerNode


def layers_in_parts() -> Any:
    """The class of the parts of a layer, whose ``run`` runs those of one or of two layers."""
    from megatron.core.models.common.model_chunk_schedule_plan import TransformerLayerSchedulePlan

    return TransformerLayerSchedulePlan


def layer_of_parts(parts: Any) -> Any:
    """The transformer layer that was cut into parts, inside one of multi-token prediction, too."""
    return getattr(parts.layer, "transformer_layer", parts.layer)


def model_of_part(part: Any) -> Any:
    """The chunk of a part; None for that of the loss."""
    state = getattr(part, "chunk_state", None)
    return None if state is None else state.model


def routing() -> tuple[Any, Any]:
    """The class of routers, and the module in which they collect losses and figures of layers."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    return TopKRouter, moe_utils


def sharded_data_parallel() -> tuple[tuple[Any, str], tuple[tuple[Any, str], ...]]:
    """Calls of Megatron-FSDP that make device meshes, compare or copy what ranks have."""
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer

    return (FullyShardedDataParallel, "_init_dist_index"), (
        (param_and_grad_buffer, "validate_uneven_dtensor"),
        (FullyShardedDataParallel, "sync_rng_states_across_tp_group"),
    )
