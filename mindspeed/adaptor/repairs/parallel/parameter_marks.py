"""Defect: parameters are marked for other ranks than those that hold them.

Where: ``megatron.core``: experts take the ranks of dense layers whenever there is one
expert-parallel rank, also if their tensor-parallel size is another one (Megatron-LM PR 5916); the
clipping norm looks for duplicates of experts among the tensor-parallel ranks instead of the
expert-tensor-parallel ones, and a bias of experts is summed over ranks with other experts; the
learnable attention sink is sharded by heads and not marked (PR 7530); the output norm of gated
delta nets, which sees the heads of one rank, is reduced under sequence parallelism only, and the
norm of latent queries, which sees all of them, is reduced without it (issue 7452); the copy of the
embedding on the stage of multi-token prediction is not marked as an embedding (PR 5034); a layer
that does not draw its weight (``perform_initialization=False``, weights to be loaded) does not mark
it (Megatron-Bridge PR 992).
Symptom: silent. With one expert-parallel rank, tensor-parallel size 2 and expert tensor-parallel
size 1 the gradients of experts are never summed, and the copies diverge. In the other cases the
gradient, or its norm and with it clipping, is wrong by up to the tensor-parallel size. With
``--decoupled-lr`` or Muon the copies of the embedding are updated differently.
Fix: :mod:`mindspeed.te.parameter_marks` marks them when they are made; the norm asks the ranks that
hold the parameter; gradients are summed by the marks alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from mindspeed.adaptor.patch import repair
from mindspeed.te.parameter_marks import (
    counted,
    mark_attention_sink,
    mark_experts,
    mark_tensor_parallel,
)


def mark_expert_parameters(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``MoELayer.__init__``."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        if isinstance(self.experts, torch.nn.Module):
            mark_experts(self.experts, self.config)

    return __init__


def mark_shard(dim: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A wrapper of ``__init__`` of a layer whose ``weight`` is sharded along ``dim``."""

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.weight is not None and not hasattr(self.weight, "tensor_model_parallel"):
                mark_tensor_parallel(self.weight, dim)

        return __init__

    return wrap


def count_by_holders(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap ``param_is_not_tensor_parallel_duplicate``."""

    def param_is_not_tensor_parallel_duplicate(param: Any, *args: Any, **kwargs: Any) -> bool:
        from megatron.core import parallel_state

        param = getattr(param, "orig_param", param)  # a shard of Megatron-FSDP lacks some marks
        if getattr(param, "allreduce", True):
            return original(param, *args, **kwargs)
        group = parallel_state.get_expert_tensor_parallel_group(check_initialized=False)
        if group is None:
            return original(param, *args, **kwargs)
        return counted(param, tp_rank=0, expert_tp_rank=group.rank())

    return param_is_not_tensor_parallel_duplicate


def copy_mark_of_experts(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``copy_tensor_model_parallel_attributes``, which marks the optimizer's copies."""

    def copy_tensor_model_parallel_attributes(destination_tensor: Any, source_tensor: Any) -> None:
        original(destination_tensor, source_tensor)
        if hasattr(source_tensor, "allreduce"):
            destination_tensor.allreduce = source_tensor.allreduce

    return copy_tensor_model_parallel_attributes


def mark_sink(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``__init__`` of core attention."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        mark_attention_sink(self)

    return __init__


def mark_norm_of_heads(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``GatedDeltaNet.__init__``: each rank normalises its heads with the same weight."""

    def __init__(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, config, *args, **kwargs)
        for parameter in self.out_norm.parameters():
            parameter.sequence_parallel = config.tensor_model_parallel_size > 1

    return __init__


def mark_copy_of_embedding(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``LanguageModule.setup_embeddings_and_output_layer``."""

    def setup_embeddings_and_output_layer(self: Any) -> None:
        original(self)
        if getattr(self, "mtp_process", False):
            self.embedding.word_embeddings.weight.is_embedding_or_output_parameter = True

    return setup_embeddings_and_output_layer


def sum_by_marks(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``_allreduce_non_tensor_model_parallel_grads``.

    Marks are only set under sequence parallelism, or where a gradient is partial without it. The
    norm of latent queries is found by its name; it is marked like every other norm.
    """

    def _allreduce_non_tensor_model_parallel_grads(
        model: Any, config: Any, *args: Any, **kwargs: Any
    ) -> None:
        by_marks = copy.copy(config)
        by_marks.sequence_parallel = True
        if getattr(config, "multi_latent_attention", False):
            by_marks.qk_layernorm = False
        original(model, by_marks, *args, **kwargs)

    return _allreduce_non_tensor_model_parallel_grads


def leave_whole_norms(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``_allreduce_layernorm_grads``, which before 0.15 sums norms by their names, too.

    The norm of latent queries sees all of them, on every rank.
    """

    def _allreduce_layernorm_grads(model: Any, config: Any) -> None:
        if config.sequence_parallel or not getattr(config, "multi_latent_attention", False):
            original(model, config)

    return _allreduce_layernorm_grads


_CORE = "megatron.core"
_SHARDED_DIMS = {"VocabParallelEmbedding": 0, "ColumnParallelLinear": 0, "RowParallelLinear": 1}

PATCHES = (
    repair(
        f"{_CORE}.transformer.moe.moe_layer:MoELayer.__init__",
        mark_expert_parameters,
        "gradients of experts are summed over the ranks that have the same experts",
        expects="(self, config, submodules, layer_number, ...)",
    ),
    *(
        repair(
            f"{_CORE}.tensor_parallel.layers:{layer}.__init__",
            mark_shard(dim),
            "weights that are loaded instead of drawn are known as shards",
        )
        for layer, dim in _SHARDED_DIMS.items()
    ),
    repair(
        f"{_CORE}.tensor_parallel.layers:param_is_not_tensor_parallel_duplicate",
        count_by_holders,
        "the norm counts each parameter of experts once among the ranks that have it",
        expects="(param, ...)",
    ),
    repair(
        f"{_CORE}.tensor_parallel.layers:copy_tensor_model_parallel_attributes",
        copy_mark_of_experts,
        "an optimizer's copies of experts are known as such",
        expects="(destination_tensor, source_tensor)",
    ),
    repair(
        f"{_CORE}.transformer.dot_product_attention:DotProductAttention.__init__",
        mark_sink,
        "the norm counts the attention sinks of all tensor-parallel ranks",
    ),
    *(
        repair(
            f"{_CORE}.ssm.{target}.__init__",
            mark_norm_of_heads,
            "the gradient of a norm that sees one rank's heads is summed over the ranks",
            expects="(self, config, submodules, layer_number, ...)",
            versions=versions,
        )
        for target, versions in (
            ("gated_delta_net:GatedDeltaNet", ">=0.16,<0.19"),
            ("gated_delta_net.common:_GDNBase", ">=0.19"),
        )
    ),
    repair(
        f"{_CORE}.models.common.language_module.language_module:"
        "LanguageModule.setup_embeddings_and_output_layer",
        mark_copy_of_embedding,
        "optimizers know every copy of the embedding as one",
        expects="(self)",
        versions="<0.18",
    ),
    repair(
        f"{_CORE}.distributed.finalize_model_grads:_allreduce_non_tensor_model_parallel_grads",
        sum_by_marks,
        "partial gradients are summed by the marks of parameters",
        expects="(model, config, tp_group)",
        versions=">=0.15",
    ),
    repair(
        f"{_CORE}.distributed.finalize_model_grads:_allreduce_layernorm_grads",
        leave_whole_norms,
        "the same for norms of latent attention",
        expects="(model, config)",
        versions="<0.15",
    ),
)
PATCHES_OF_TRANSFORMER_ENGINE = (
    repair(
        f"{_CORE}.extensions.transformer_engine:TEDotProductAttention.__init__",
        mark_sink,
        "the norm counts the attention sinks of all tensor-parallel ranks",
    ),
)
"""Where Megatron finds Transformer Engine or its substitute, else the class does not exist."""
