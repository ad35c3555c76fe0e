"""Core attention of the local layer spec.

Megatron's own ``DotProductAttention`` for ``--transformer-impl local`` refuses packed documents,
attention bias and different head sizes of keys and values. The replacement keeps Megatron's
parameter names and class objects (only methods are replaced), describes its call and lets
:mod:`mindspeed.te.core_attention` decide which attention runs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from mindspeed.te import attention_policy, core_attention
from mindspeed.te.attention import Documents
from mindspeed.te.core_attention import AttentionCall
from mindspeed.te.masks import Visibility, Window, visibility


def with_substitutes(upstream: type) -> type:
    """Megatron's ``DotProductAttention`` with our constructor's arguments and our computation."""

    class DotProductAttention(upstream):  # type: ignore[misc, valid-type]
        softcap: float | None = None  # set on the built module
        __init__ = accept_head_sizes(upstream.__init__)  # type: ignore[misc]
        forward = core_attention_forward

    DotProductAttention.__module__ = upstream.__module__
    DotProductAttention.__qualname__ = upstream.__qualname__
    DotProductAttention.__doc__ = upstream.__doc__
    return DotProductAttention


def accept_head_sizes(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``DotProductAttention.__init__``: accept the head sizes of keys and values."""

    @functools.wraps(init)
    def wrapped(
        self: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        if softmax_scale is None and k_channels is not None:
            softmax_scale = k_channels**-0.5
        bound = inspect.signature(init).bind(self, *args, softmax_scale=softmax_scale, **kwargs)
        config = bound.arguments["config"]
        # Upstream's constructor refuses a split sequence, which it could not attend over.
        bound.arguments["config"] = alone = copy.copy(config)
        alone.context_parallel_size = 1
        init(*bound.args, **bound.kwargs)
        self.config = config
        self.cp_comm_type = bound.arguments.get("cp_comm_type") or "p2p"
        if not hasattr(self, "pg_collection"):  # before 0.16
            self.pg_collection = bound.arguments.get("pg_collection") or _global_groups()
        self.cp_groups = _context_groups(config, self.cp_comm_type, self.pg_collection)

    return wrapped


def _global_groups() -> SimpleNamespace:
    """Megatron's groups of a model that was given none."""
    from megatron.core import parallel_state

    return SimpleNamespace(
        tp=parallel_state.get_tensor_model_parallel_group(check_initialized=False),
        cp=parallel_state.get_context_parallel_group(check_initialized=False),
    )


def _context_groups(config: Any, comm_type: str, collection: Any) -> Any:
    """Groups that share a sequence, in the form of Transformer Engine; None for one rank."""
    if config.context_parallel_size == 1:
        return None
    if comm_type != "a2a+p2p":
        return collection.cp
    from megatron.core.parallel_state import get_hierarchical_context_parallel_groups

    return get_hierarchical_context_parallel_groups()


def core_attention_forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    attn_mask_type: Any = None,
    attention_bias: Tensor | None = None,
    packed_seq_params: Any = None,
) -> Tensor:
    """Attend; stands in for ``DotProductAttention.forward``.

    A mask tensor alone decides what is masked (it may separate documents); without one the module's
    mask type does.

    Args:
        query: ``[s, b, h, d]``, or ``[t, h, d]`` when packed; any floating dtype.
        key: ``[s, b, h_kv, d]`` or ``[t, h_kv, d]``.
        value: ``[s, b, h_kv, d_v]`` or ``[t, h_kv, d_v]``.
        attention_mask: bool ``[b, 1, s, s]``, True is masked.
        attn_mask_type: Not read, like upstream: the module's own type counts.
        attention_bias: Added to the scaled scores.
        packed_seq_params: Cumulative lengths of packed documents, and the group that shares them.
    """
    kind = "causal" if "causal" in self.attn_mask_type.name else "no_mask"
    kind, window = attention_policy.mask_type_and_window(kind, _window(self))
    causal = kind == "causal"
    mask = attention_policy.mask_tensor(attention_mask, causal)
    packed = getattr(packed_seq_params, "packed", None)
    documents = _documents(packed_seq_params)
    scale = self.softmax_scale
    if self.config.apply_query_key_layer_scaling:
        scale *= self.layer_number
    self_attention = getattr(self, "attention_type", "self") == "self"
    call = AttentionCall(
        layout="sbhd" if documents is None else "thd",
        mask_type=kind,
        window=window,
        visibility=lambda: _visibility(query, key, causal, mask, window),
        scale=scale,
        dropout=self.attention_dropout.p if self.training else 0.0,
        random_stream=lambda: _dropout_stream(self),
        bias=attention_bias,
        slopes=_slopes(self, query) if self_attention else None,
        sink=getattr(self, "softmax_offset", None),  # since 0.15
        documents=documents,
        packed=packed,
        packed_documents=None if packed is None else _cu_seqlens(packed_seq_params),
        self_attention=self_attention,
        mask_tensor=mask is not None,
        groups=_groups_of(self, packed_seq_params),
        comm_type=self.cp_comm_type,
        layer=self.layer_number,
        softcap=self.softcap,
        config=self.config,
    )
    return core_attention.attend(query, key, value, call)  # type: ignore[no-any-return]


def _visibility(
    query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, window: Window
) -> Visibility:
    len_q, len_k = query.shape[0], key.shape[0]
    if mask is not None and window is None:
        return Visibility(len_q, len_k, masked=mask.bool())
    kind = "causal_bottom_right" if causal else "no_mask"
    seen = visibility(kind, len_q, len_k, window=window, device=query.device)
    return seen if mask is None else replace(seen, masked=mask.bool())


def _slopes(module: Any, query: Tensor) -> Tensor | None:
    heads = query.shape[-2]
    tp_group = module.pg_collection.tp
    first = heads * (0 if tp_group is None else tp_group.rank())
    return attention_policy.alibi_slopes(
        module.config.num_attention_heads, first, heads, query.device
    )


def _window(module: Any) -> Window:
    return getattr(module.scale_mask_softmax, "window_size", None)


def _groups_of(module: Any, packed: Any) -> Any:
    """The groups that share the sequence; those of the batch where it has its own."""
    if getattr(packed, "cp_group", None) is not None:
        return packed.cp_group
    alone = getattr(packed, "local_cp_size", None) == 1
    return None if alone else module.cp_groups


def _documents(params: Any) -> Documents | None:
    """The documents of a ``thd`` batch."""
    if params is None or params.qkv_format != "thd":
        return None
    padded = (params.cu_seqlens_q_padded, params.cu_seqlens_kv_padded)
    return Documents(params.cu_seqlens_q, params.cu_seqlens_kv, *padded)


def _cu_seqlens(params: Any) -> Documents:
    """The documents inside the samples of an ``sbhd`` batch."""
    return Documents(params.cu_seqlens_q, params.cu_seqlens_kv)


def _dropout_stream(module: Any) -> Any:
    dropping = module.training and module.attention_dropout.p
    if module.config.sequence_parallel or not dropping:
        return contextlib.nullcontext()
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker().fork()
