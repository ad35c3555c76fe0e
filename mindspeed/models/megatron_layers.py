"""Parts of a layer that Megatron Core lacks: norms in other places, positions layer by layer.

================================  ==============================================  ==================
``--norm-placement``              norms behind attention and MLP, too or only     GLM-4, Gemma, OLMo
``--qk-norm-over-all-heads``      one norm over the channels of all heads         OLMo, MiniMax-M2
``--qk-norm-after-rope``          norms of queries and keys after the rotation    Hunyuan
``--residual-multiplier``         factor on the output of attention and MLP       Granite
``--local-rotary-base``           another rotary base in layers with a window     Gemma 3, OLMo 3
================================  ==============================================  ==================

The norms are modules at the joints that a layer's spec has, so that whoever runs a layer piece by
piece runs them, too.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mindspeed import device as devices
from mindspeed.errors import ConfigError
from mindspeed.models.extra_flags import ModelExtras
from mindspeed.models.megatron_choice import change_routers
from mindspeed.models.megatron_chunks import set_chunks, with_chunks
from mindspeed.models.megatron_delta_net import mixed_attention
from mindspeed.tensor_parallel.two_dimensional.norm import norm


def change_layer_spec(
    extras: ModelExtras, layer: Any, heads: int, groups: int, linear: tuple[bool, ...] | None
) -> None:
    """Put the special modules into the spec of one layer.

    Args:
        extras: the flags.
        layer: Megatron's spec, changed in place.
        heads: of queries, on all ranks.
        groups: heads of keys, on all ranks.
        linear: whether the attention of a layer is linear, for each; None: there is no such flag.
    """
    attention = layer.submodules.self_attention
    parts = attention.submodules
    if extras.norm_placement == "post":
        _drop_input_norms(layer.submodules)
    if extras.qk_norm_over_all_heads:
        parts.q_layernorm = over_heads(heads)
        parts.k_layernorm = over_heads(groups)
    if extras.qk_norm_after_rope:
        parts.q_layernorm = parts.k_layernorm = None
        parts.core_attention = with_norms(parts.core_attention)
    if extras.attention_chunk_size or extras.nope_temperature:
        parts.core_attention = with_chunks(parts.core_attention)
    if linear is not None:
        attention.module = mixed_attention(attention.module, linear)
    if extras.local_rotary_base:
        attention.module = with_local_rotation(attention.module)


def change_layers(extras: ModelExtras, model: Any, with_engine: bool, qk_l2_norm: bool) -> None:
    """Add what the layers of a built stage have and no layer spec says.

    Args:
        extras: the flags.
        model: the stage, changed in place.
        with_engine: its norms are Transformer Engine's.
        qk_l2_norm: ``--qk-l2-norm``.
    """
    layers = [*model.decoder.layers]
    if getattr(model, "mtp_process", False):
        layers += [depth.transformer_layer for depth in model.mtp.layers]
    change_routers(extras, layers)
    if extras.attention_chunk_size or extras.nope_temperature or qk_l2_norm:
        set_chunks(extras, model, qk_l2_norm)
    if extras.attention_logit_softcap:
        _bound_scores(extras.attention_logit_softcap, layers)
    if extras.norm_placement == "pre" and extras.residual_multiplier == 1.0:
        return
    for layer in layers:
        for name in ("self_attn_bda", "mlp_bda"):
            add = getattr(layer, name)
            behind = None if extras.norm_placement == "pre" else _norm_of(layer.config, with_engine)
            setattr(layer, name, ScaledAddition(add, behind, extras.residual_multiplier))


def _bound_scores(cap: float, layers: list[Any]) -> None:
    for layer in layers:
        core = layer.self_attention.core_attention
        if not hasattr(core, "softcap"):
            raise ConfigError(
                f"--attention-logit-softcap: {type(core).__module__} has no bounded scores; take "
                "--transformer-impl local"
            )
        core.softcap = cap


def _norm_of(config: Any, with_engine: bool) -> torch.nn.Module:
    """A norm of the kind that the layers have."""
    made: torch.nn.Module
    if with_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        made = TENorm(config, config.hidden_size, eps=config.layernorm_epsilon)
    else:
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        made = WrappedTorchNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
    return made


def _drop_input_norms(parts: Any) -> None:
    """Attention and MLP take their input as it is."""
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
    )
    from megatron.core.transformer.identity_op import IdentityOp

    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    attention, mlp = parts.self_attention.submodules, parts.mlp.submodules
    if attention.linear_qkv is TELayerNormColumnParallelLinear:
        attention.linear_qkv = TEColumnParallelLinear
    if getattr(mlp, "linear_fc1", None) is TELayerNormColumnParallelLinear:
        mlp.linear_fc1 = TEColumnParallelLinear


class ScaledAddition(torch.nn.Module):
    """Bias, norm, factor, dropout and residual connection behind attention or MLP.

    Args:
        add: Megatron's ``get_bias_dropout_add``: bias, dropout and residual connection.
        norm: Norm of the output; None without one.
        multiplier: Factor on the output.
    """

    def __init__(
        self, add: Callable[..., Any], norm: torch.nn.Module | None, multiplier: float
    ) -> None:
        super().__init__()
        self.add, self.norm, self.multiplier = add, norm, multiplier

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """The function that Megatron's layer calls with output, bias and residual."""
        plain = self.add(training, fused)

        def add(
            output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, prob: float
        ) -> torch.Tensor:
            x, bias = output
            x = x if bias is None else x + bias
            x = x if self.norm is None else self.norm(x)
            result: torch.Tensor = plain((x * self.multiplier, None), residual, prob)
            return result

        return add


class HeadsNorm(torch.nn.Module):
    """RMSNorm over the channels of all heads, which tensor-parallel ranks share.

    Args:
        config: Megatron Core's configuration of the layer.
        hidden_size: Channels of a head.
        eps: Added to the mean square.
    """

    heads: int

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        from megatron.core import parallel_state, tensor_parallel

        self.eps, self.group = eps, parallel_state.get_tensor_model_parallel_group()
        if self.heads % self.group.size():
            raise ConfigError(
                f"--qk-norm-over-all-heads: {self.heads} heads are not divisible by "
                f"--tensor-model-parallel-size {self.group.size()}"
            )
        channels = self.heads * hidden_size // self.group.size()
        device = torch.device("cpu")
        if not config.use_cpu_initialization:
            device = devices.current().torch_device()
        self.weight = torch.nn.Parameter(
            torch.ones(channels, dtype=config.params_dtype, device=device)
        )
        tensor_parallel.set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``[..., heads / ranks, head]``; shape and dtype stay."""
        flat = norm(x.flatten(-2), self.weight, None, eps=self.eps, group=self.group, rms=True)
        return flat.view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> Any:
        """The weight, sharded over tensor-parallel ranks."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


@functools.cache
def over_heads(heads: int) -> type:
    """A norm over so many heads of all ranks, as a layer's spec takes it."""
    return type("HeadsNorm", (HeadsNorm,), {"heads": heads})


@functools.cache
def with_norms(attention: type) -> type:
    """A core attention that normalises each head of its queries and keys first."""

    class NormedAttention(attention):  # type: ignore[misc]
        """Core attention with norms of queries and keys, which are rotated already."""

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            from megatron.core.transformer.torch_norm import WrappedTorchNorm

            # Named so that Megatron sums their gradients over ranks, which have heads of their own.
            size, eps = config.kv_channels, config.layernorm_epsilon
            self.q_layernorm = WrappedTorchNorm(config, size, eps=eps)
            self.k_layernorm = WrappedTorchNorm(config, size, eps=eps)

        def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return super().forward(
                self.q_layernorm(query), self.k_layernorm(key), value, *args, **kwargs
            )

        def sharded_state_dict(
            self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
        ) -> Any:
            from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

            own: dict[str, Any] = {}
            for name in ("q_layernorm", "k_layernorm"):
                state = getattr(self, name).state_dict(prefix="", keep_vars=True)
                where = f"{prefix}{name}."
                own |= make_sharded_tensors_for_checkpoint(state, where, {}, sharded_offsets)
            return own

    return NormedAttention


@functools.cache
def with_local_rotation(attention: type) -> type:
    """A self-attention whose rotary embedding has another base where the layer has a window."""

    class LocallyRotated(attention):  # type: ignore[misc]
        """Self-attention that turns the model's rotary angles into those of its own base."""

        def forward(self, *args: Any, rotary_pos_emb: Any = None, **kwargs: Any) -> Any:
            if self.local_rotation is not None and rotary_pos_emb is not None:
                rotary_pos_emb = self.local_rotation(rotary_pos_emb)
            return super().forward(*args, rotary_pos_emb=rotary_pos_emb, **kwargs)

        local_rotation: Callable[[torch.Tensor], torch.Tensor] | None = None

    return LocallyRotated


def rotate_locally(rotation: LocalRotation, windows: Sequence[int], model: Any) -> None:
    """Give layers with a window their own rotary base, without the scaling of the others.

    Args:
        rotation: by the other base.
        windows: for each layer of the whole model whether it has a window.
        model: a built stage, changed in place.
    """
    for layer in model.decoder.layers:
        if windows[layer.layer_number - 1]:
            attention = layer.self_attention
            attention.local_rotation = rotation
            attention.config = copy.copy(attention.config)
            for name in ("rotary_scaling_factor", "mscale", "mscale_all_dim"):
                vars(attention.config).pop(f"yarn_{name}", None)


class LocalRotation:
    """Rotary angles of one base as those of another, at the same positions.

    Args:
        base: The new base.
        first: Radians per position of the first pair of channels in the angles that come in.
        interleaved: Channels 2i and 2i + 1 are a pair, not i and i + d/2.
    """

    def __init__(self, base: float, first: float, interleaved: bool) -> None:
        self.base, self.first, self.interleaved = base, first, interleaved

    def __call__(self, angles: torch.Tensor) -> torch.Tensor:
        """New angles, ``[s, 1, 1, d]`` in fp32 as those that come in."""
        channels = angles.shape[-1]
        positions = (angles[..., :1] / self.first).round()
        exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=angles.device)
        half = positions / self.base ** (exponents / channels)
        if self.interleaved:
            return half.repeat_interleave(2, dim=-1)
        return torch.cat((half, half), dim=-1)
