"""Gated delta net in a Megatron layer: linear attention of Qwen3-Next and Qwen3.5.

    x -> in_proj -> [q k v] [z] [beta] [alpha]
    [q k v] -> causal convolution of each channel, SiLU
    gated delta rule (mindspeed.ops.gated_delta_rule), norm of each head, times SiLU(z)
    -> out_proj

Under context parallelism an all-to-all gives each rank all tokens of some value heads and of the
key heads that they use (:mod:`mindspeed.attention.ulysses_all_to_all`), whatever algorithm the
attention of other layers runs and however it shards the sequence; a second one brings the outputs
back. z stays where it is. With U ranks each sends (U - 1) / U of queries, keys, values, beta, alpha
and outputs of its tokens, forward and backward.

Parameters, their names and how tensor parallelism shards them are those of ``GatedDeltaNet`` in
Megatron Core 0.16, except that the norm of the heads stores its weight, not the deviation from one;
this layer knows packed documents and context parallelism, and needs no ``fla`` package. Source:
Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from mindspeed import device as devices
from mindspeed.attention.packed_batch import cu_seqlens_of_samples
from mindspeed.attention.sequence_sharding import SequenceSharding
from mindspeed.attention.ulysses_all_to_all import HeadAllToAll
from mindspeed.device.host_tensors import numbers
from mindspeed.errors import ConfigError
from mindspeed.ops.causal_conv1d import causal_conv1d
from mindspeed.ops.gated_delta_rule import chunk_gated_delta_rule
from mindspeed.te import kernels
from mindspeed.te.context_parallel import megatron_layout, sharded_documents

if TYPE_CHECKING:
    from mindspeed.attention.packed_batch import PackedBatch


@functools.cache
def mixed_attention(attention: type, pattern: tuple[bool, ...]) -> type:
    """What a layer spec builds: a delta net or ``attention``, by the number of the layer."""

    class MixedAttention:
        """Chooses; is never built itself."""

        def __new__(
            cls, config: Any, submodules: Any, layer_number: int, *args: Any, **kwargs: Any
        ) -> Any:
            made = DeltaNet if pattern[layer_number - 1] else attention
            return made(config, submodules, layer_number, *args, **kwargs)

    return MixedAttention


@dataclass(frozen=True)
class _HeadParameters:
    """Parameters of the heads that a rank computes.

    Attributes:
        taps: Of the convolution, ``[channels of queries, keys and values, taps]``.
        A_log: ``[n_v]``.
        dt_bias: ``[n_v]``.
    """

    taps: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor


class _Weight(torch.nn.Module):
    """A weight under the name that Megatron's module gives it."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class DeltaNet(torch.nn.Module):
    """Linear attention in the place of a layer's ``self_attention``.

    Args:
        config: Megatron Core's configuration of the layer.
        submodules: Of a ``SelfAttention``: the classes of the two linear layers are taken.
        layer_number: Number of the layer, from 1.
        pg_collection: Process groups of tensor and context parallelism.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        layer_number: int,
        *unused: Any,
        pg_collection: Any = None,
        **more: Any,
    ) -> None:
        super().__init__()
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.transformer.spec_utils import build_module

        group = None if pg_collection is None else pg_collection.tp
        self.group = group or parallel_state.get_tensor_model_parallel_group()
        context = getattr(pg_collection, "cp", None)
        self.context_group = context or parallel_state.get_context_parallel_group()
        self.config, self.layer_number = config, layer_number
        ranks = self.group.size()
        self.heads = (config.linear_num_key_heads // ranks, config.linear_num_value_heads // ranks)
        self.channels = (config.linear_key_head_dim, config.linear_value_head_dim)
        q, v = (heads * channels for heads, channels in zip(self.heads, self.channels, strict=True))
        self.sizes = {"query": q, "key": q, "value": v, "z": v}
        self.sizes |= {"beta": self.heads[1], "alpha": self.heads[1]}
        groups = {} if pg_collection is None else {"tp_group": group}
        shared = {"config": config, "bias": False, "is_expert": False, **groups}
        self.in_proj = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            sum(self.sizes.values()) * ranks,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **shared,
        )
        self.out_proj = build_module(
            submodules.linear_proj,
            v * ranks,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **shared,
        )

        def parameter(*shape: int) -> torch.nn.Parameter:
            device = torch.device("cpu")
            if not config.use_cpu_initialization:
                device = devices.current().torch_device()
            return torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))

        self.conv1d = _Weight(parameter(2 * q + v, 1, config.linear_conv_kernel_dim))
        self.dt_bias, self.A_log = parameter(self.heads[1]), parameter(self.heads[1])
        self.out_norm = _Weight(parameter(self.channels[1]))
        # A rank's gradient is that of its heads; the mark says that it is summed over the ranks.
        self.out_norm.weight.sequence_parallel = True  # type: ignore[attr-defined]
        for sharded in (self.conv1d.weight, self.dt_bias, self.A_log):
            tensor_parallel.set_tensor_model_parallel_attributes(sharded, True, 0, 1)
        if config.perform_initialization:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                self._draw()

    @torch.no_grad()
    def _draw(self) -> None:
        torch.nn.init.kaiming_uniform_(self.conv1d.weight, a=5**0.5)
        self.A_log.copy_(torch.empty_like(self.A_log, dtype=torch.float32).uniform_(1, 16).log())
        self.dt_bias.fill_(1)
        self.out_norm.weight.fill_(1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend causally; a mask tensor is not read.

        Args:
            hidden_states: ``[s, b, h]`` of this rank's tokens, with sequence parallelism
                ``[s / ranks, b, h]``.
            packed_seq_params: The documents of the micro-batch, or None.

        Returns:
            As ``hidden_states``, and None.

        Raises:
            ConfigError: A cache of keys and values, or fewer value heads than context-parallel
                ranks.
        """
        if inference_context is not None:
            raise ConfigError(
                "a gated delta net keeps a state, not keys and values: generate with recompute=True"
            )
        x, _ = self.in_proj(hidden_states)
        tokens, samples = x.shape[:2]
        documents, sharding = _documents(
            packed_seq_params, tokens, samples, self.context_group.size()
        )
        convolved = sum(self.sizes[name] for name in _CONVOLVED)
        mixed, z, beta, alpha = (
            x.transpose(0, 1)
            .flatten(0, 1)
            .split([convolved, *(self.sizes[name] for name in ("z", "beta", "alpha"))], -1)
        )
        if sharding is None:
            out = self._attend(mixed, beta, alpha, documents, self._of_all_heads())
        else:
            out = self._attend_to_all(mixed, beta, alpha, documents, sharding)
        eps = self.config.layernorm_epsilon
        normed = kernels.normalize(out, self.out_norm.weight, None, eps=eps, rms=True)
        gated = normed * functional.silu(z.unflatten(-1, (-1, self.channels[1])).float())
        out = gated.to(x.dtype).flatten(-2).view(samples, tokens, -1).transpose(0, 1)
        result, bias = self.out_proj(out.contiguous())
        return result, bias

    def _of_all_heads(self) -> _HeadParameters:
        return _HeadParameters(self.conv1d.weight.squeeze(1), self.A_log, self.dt_bias)

    def _attend(
        self,
        mixed: torch.Tensor,
        beta: torch.Tensor,
        alpha: torch.Tensor,
        documents: tuple[int, ...],
        heads: _HeadParameters,
    ) -> torch.Tensor:
        """Convolution and delta rule: ``[t, 2 q + v]`` and ``[t, n_v]`` to ``[t, n_v, d_v]``."""
        mixed = causal_conv1d(mixed[None], heads.taps, silu=True, cu_seqlens=documents)
        keys, values = self.channels
        v = beta.shape[-1] * values
        qk = (mixed.shape[-1] - v) // 2
        q, k, v = mixed.split([qk, qk, v], -1)
        decay = functional.softplus(alpha.float() + heads.dt_bias.float())
        out, _ = chunk_gated_delta_rule(
            q.unflatten(-1, (-1, keys)),
            k.unflatten(-1, (-1, keys)),
            v.unflatten(-1, (-1, values)),
            -heads.A_log.float().exp() * decay[None],
            beta.sigmoid()[None],
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=documents,
        )
        return out[0]

    def _attend_to_all(
        self,
        mixed: torch.Tensor,
        beta: torch.Tensor,
        alpha: torch.Tensor,
        documents: tuple[int, ...],
        sharding: SequenceSharding,
    ) -> torch.Tensor:
        """:meth:`_attend` over the tokens of all context-parallel ranks. Collective."""
        group, (key_heads, value_heads) = self.context_group, self.heads
        if value_heads < group.size():
            raise ConfigError(
                f"gated delta net: {value_heads} value heads of a tensor-parallel rank over "
                f"{group.size()} context-parallel ranks; lower --context-parallel-size or "
                "--tensor-model-parallel-size"
            )
        exchange, share = HeadAllToAll(sharding, group.rank(), group), value_heads // key_heads
        q, k, v = self._heads_of(mixed, 1)
        with_gates = torch.cat([v, beta[..., None], alpha[..., None]], -1)
        # The exchange repeats keys where the values of a rank use them unequally often.
        with_gates, q, k = exchange.to_heads(with_gates, q, k, share)
        v, beta, alpha = with_gates.split([v.shape[-1], 1, 1], -1)
        own = exchange.heads(exchange.rank, value_heads)
        used = [head // share for head in own]
        used = used if len(used) == q.shape[1] else sorted(set(used))
        parts = self._heads_of(self.conv1d.weight.squeeze(1), 0)
        mine = (part[rows] for part, rows in zip(parts, (used, used, [*own]), strict=True))
        heads = slice(own.start, own.stop)
        parameters = _HeadParameters(
            torch.cat([part.flatten(0, 1) for part in mine]),
            self.A_log[heads],
            self.dt_bias[heads],
        )
        mixed = torch.cat([x.flatten(1) for x in (q, k, v)], -1)
        out = self._attend(mixed, beta[..., 0], alpha[..., 0], documents, parameters)
        return exchange.to_sequence(out, value_heads)

    def _heads_of(self, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Queries, keys and values of the convolution's channels, with a dimension of heads."""
        parts = x.split([self.sizes[name] for name in _CONVOLVED], dim)
        counts = (self.heads[0], self.heads[0], self.heads[1])
        return [part.unflatten(dim, (n, -1)) for part, n in zip(parts, counts, strict=True)]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None, **unused: Any
    ) -> Any:
        """Megatron's layout: each part of the joint matrices is a tensor of its own."""
        from megatron.core.ssm.gated_delta_net import _split_tensor_factory
        from megatron.core.transformer.utils import (
            make_sharded_tensors_for_checkpoint,
            sharded_state_dict_default,
        )

        state: dict[str, Any] = {}
        own = {"A_log": self.A_log, "dt_bias": self.dt_bias}
        state |= make_sharded_tensors_for_checkpoint(
            own, prefix, dict.fromkeys(own, 0), sharded_offsets
        )
        for name, axes in (("conv1d", {"weight": 0}), ("out_norm", {})):
            module = getattr(self, name).state_dict(prefix="", keep_vars=True)
            where = f"{prefix}{name}."
            state |= make_sharded_tensors_for_checkpoint(module, where, axes, sharded_offsets)
        for name in ("in_proj", "out_proj"):
            where = f"{prefix}{name}."
            state |= sharded_state_dict_default(
                getattr(self, name), where, sharded_offsets, metadata
            )
        for key, names in (("in_proj.weight", tuple(self.sizes)), ("conv1d.weight", _CONVOLVED)):
            sizes = [self.sizes[name] for name in names]
            state[prefix + key] = _split_tensor_factory(state[prefix + key], sizes, [*names], 0)
        return state


_CONVOLVED = ("query", "key", "value")


def _documents(
    params: Any, tokens: int, samples: int, ranks: int
) -> tuple[tuple[int, ...], SequenceSharding | None]:
    """Ends of documents in the concatenated samples, and how ranks share these, if they do.

    Args:
        params: Megatron's ``packed_seq_params`` or this library's, or None.
        tokens: Of a sample on this rank.
    """
    packed: PackedBatch | None = getattr(params, "packed", None)
    if packed is not None:
        return packed.cu_seqlens, packed.sharding if ranks > 1 else None
    if params is None:
        ends = cu_seqlens_of_samples(samples, tokens * ranks)
        return ends, megatron_layout(tokens * ranks, ranks, samples) if ranks > 1 else None
    # Padding belongs to the document before it, which it follows, so nothing sees it.
    padded = getattr(params, "cu_seqlens_q_padded", None)
    ends = tuple(numbers(params.cu_seqlens_q if padded is None else padded))
    return ends, sharded_documents(ends, ranks).sharding if ranks > 1 else None
