"""The local layer spec from the same parts: norms, core attention.

Megatron's own modules for ``--transformer-impl local`` refuse sequence parallelism, persistent
layer norm and zero-centered gamma in the norm, and packed documents, attention bias and different
key and value head sizes in the attention. These replacements keep Megatron's parameter names and
its class objects (only methods are replaced), and do all of that.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mindspeed.errors import ConfigError
from mindspeed.te import attention_policy, context_groups, kernels
from mindspeed.te.attention import Documents, own_value
from mindspeed.te.masks import Visibility, Window, visibility

if TYPE_CHECKING:
    from mindspeed.attention.mask import Mask
    from mindspeed.attention.packed import PackedBatch


class _Affine:
    """What both local norms add to torch's: zero-centered gamma and the sequence-parallel mark."""

    weight: torch.nn.Parameter
    zero_centered_gamma = False

    def _mark(self, zero_centered_gamma: bool, sequence_parallel: bool) -> None:
        self.zero_centered_gamma = zero_centered_gamma
        if zero_centered_gamma:
            torch.nn.init.zeros_(self.weight)
        for parameter in self.parameters():  # type: ignore[attr-defined]
            parameter.sequence_parallel = sequence_parallel


class LayerNorm(_Affine, torch.nn.LayerNorm):
    """torch's LayerNorm with Megatron's options."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return kernels.normalize(
            x,
            self.weight,
            self.bias,
            eps=self.eps,
            rms=False,
            zero_centered_gamma=self.zero_centered_gamma,
        )


class RMSNorm(_Affine, torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's options."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return kernels.normalize(
            x,
            self.weight,
            None,
            eps=self.eps,  # type: ignore[arg-type]
            rms=True,
            zero_centered_gamma=self.zero_centered_gamma,
        )


def new_norm(
    cls: type,
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> torch.nn.Module:
    """Build the norm ``config`` asks for; stands in for ``WrappedTorchNorm.__new__``.

    Args:
        cls: The class that is being called.
        config: Megatron's transformer configuration, which decides.
        hidden_size: Size of the last dimension.
        eps: Added to the variance.
        persist_layer_norm: Without effect: there is one kernel.
        zero_centered_gamma: Not read; ``config.layernorm_zero_centered_gamma`` is.
        normalization: Not read; ``config.normalization`` is.
    """
    if config.memory_efficient_layer_norm:
        raise ConfigError(
            "--memory-efficient-layer-norm is not available with --transformer-impl local; use "
            "--recompute-granularity selective --recompute-modules layernorm"
        )
    kinds = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
    if config.normalization not in kinds:
        raise ConfigError(f"--normalization {config.normalization} is not one of {list(kinds)}")
    norm = kinds[config.normalization](hidden_size, eps=eps)
    norm._mark(config.layernorm_zero_centered_gamma, config.sequence_parallel)
    return norm


def with_substitutes(upstream: type) -> type:
    """Megatron's ``DotProductAttention`` with our constructor's arguments and our computation."""

    class DotProductAttention(upstream):  # type: ignore[misc, valid-type]
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
        self.cp_groups = _context_groups(config, self.cp_comm_type, self.pg_collection)

    return wrapped


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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    attn_mask_type: Any = None,
    attention_bias: torch.Tensor | None = None,
    packed_seq_params: Any = None,
) -> torch.Tensor:
    """Attend; stands in for ``DotProductAttention.forward``.

    A given mask decides alone what is masked (it may separate documents); without one the module's
    mask type does.

    Args:
        self: Megatron's attention module.
        query: ``[s, b, h, d]``, or ``[t, h, d]`` when packed.
        key: Keys.
        value: Values.
        attention_mask: ``[b, 1, s, s]``, True is masked.
        attn_mask_type: Not read, like upstream: the module's own type counts.
        attention_bias: Added to the scaled scores.
        packed_seq_params: Borders of packed documents, and the group that shares the batch.
    """
    value = own_value(query, key, value, self.config)
    kind = "causal" if "causal" in self.attn_mask_type.name else "no_mask"
    kind, window = attention_policy.mask_type_and_window(kind, _window(self))
    causal = kind == "causal"
    scale = self.softmax_scale
    if self.config.apply_query_key_layer_scaling:
        scale *= self.layer_number
    options = {
        "scale": scale,
        "dropout": self.attention_dropout.p if self.training else 0.0,
        "sink": self.softmax_offset,
        "slopes": _slopes(self, query),
    }
    packed = getattr(packed_seq_params, "packed", None)
    documents = _documents(packed_seq_params)
    groups = _groups_of(self, packed_seq_params)
    mask = None if documents is not None else _user_mask(groups, query, key, packed)
    if mask is not None or context_groups.group_size(groups) > 1:
        from mindspeed.te import context_parallel

        if attention_bias is not None:
            raise NotImplementedError("--context-parallel-size does not work with a bias tensor")
        if attention_policy.mask_tensor(attention_mask, causal) is not None and packed is None:
            raise ConfigError(
                "--context-parallel-size needs --no-create-attention-mask-in-dataloader: a mask "
                "tensor of the whole sequence is not cut over ranks"
            )
        strategy = attention_policy.context_strategy(
            self.cp_comm_type, context_groups.lowest_level(groups)
        )
        options |= {"causal": causal, "window": window, "layer": self.layer_number}
        with _dropout_stream(self):
            if documents is not None:
                return context_parallel.attend_thd(
                    query, key, value, documents, groups, strategy, **options
                )
            return context_parallel.attend(
                query, key, value, groups, strategy, packed=packed, mask=mask, **options
            )
    with _dropout_stream(self):
        if documents is not None:
            return kernels.attend_packed(
                query, key, value, documents, kind, window=window, **options
            )
        if packed is not None:
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
            borders = Documents(packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv)
            out = kernels.attend_packed(q, k, v, borders, kind, window=window, **options)
            return out.unflatten(0, (packed.samples, -1)).transpose(0, 1)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        seen = _seen(q, k, causal, attention_policy.mask_tensor(attention_mask, causal), window)
        out = kernels.attend(q, k, v, seen, bias=attention_bias, **options)
    return out.permute(2, 0, 1, 3).flatten(2)


def _seen(
    q: torch.Tensor, k: torch.Tensor, causal: bool, mask: torch.Tensor | None, window: Window
) -> Visibility:
    len_q, len_k = q.shape[2], k.shape[2]
    if mask is not None and window is None:
        return Visibility(len_q, len_k, masked=mask.bool())
    kind = "causal_bottom_right" if causal else "no_mask"
    seen = visibility(kind, len_q, len_k, window=window, device=q.device)
    return seen if mask is None else replace(seen, masked=mask.bool())


def _user_mask(
    groups: Any, query: torch.Tensor, key: torch.Tensor, packed: PackedBatch | None
) -> Mask | None:
    if query.shape[0] != key.shape[0]:
        return None
    length = query.shape[0] * context_groups.group_size(groups)
    return context_groups.user_mask(length, query.shape[1], packed)


def _slopes(module: Any, query: torch.Tensor) -> torch.Tensor | None:
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


def _documents(packed: Any) -> Documents | None:
    """Borders of the documents of a ``thd`` batch."""
    if packed is None or packed.qkv_format != "thd":
        return None
    return Documents(
        packed.cu_seqlens_q,
        packed.cu_seqlens_kv,
        packed.cu_seqlens_q_padded,
        packed.cu_seqlens_kv_padded,
    )


def _dropout_stream(module: Any) -> Any:
    dropping = module.training and module.attention_dropout.p
    if module.config.sequence_parallel or not dropping:
        return contextlib.nullcontext()
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker().fork()
