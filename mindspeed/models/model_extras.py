"""Parts of some model families that Megatron Core lacks.

=============================  ============================================  ===================
``--add-dense-bias``           a bias on the attention's output projection   InternLM, Seed-OSS
``--embed-layernorm``          a norm after the word embeddings              BLOOM
``--embedding-multiplier``     a factor on the word embeddings               Gemma, Granite
``--lm-norm-weight``           output layer with rows of length one          Baichuan 2
``--logits-divisor``           a divisor of the logits                       Granite
``--final-logit-softcap``      logits between two bounds, by tanh            Gemma 2
``--z-loss-weight``            a loss on the largest logit                   Baichuan 2
``--mask-padded-vocab``        logits of padding entries are -infinity       every family
``--rope-parameters``          scaled rotary embeddings                      Phi, Qwen, GLM, ...
``--geglu``                    a gated linear unit with GeLU                 Gemma
``--attention-logit-softcap``  attention scores between two bounds, by tanh  Gemma 2
=============================  ============================================  ===================

The parts of a layer stand in :mod:`mindspeed.models.megatron_layers`, those of Llama 4's attention
in :mod:`mindspeed.models.megatron_chunks`, choices of experts in
:mod:`mindspeed.models.megatron_choice`. What follows changes a layer
spec (:func:`change_spec`) or a built model (:func:`change_model`), through PyTorch's hooks, so that
Megatron's modules keep their classes, parameter names and sharding. ALiBi of BLOOM and Baichuan 13B
is a feature (:mod:`mindspeed.features.attention.alibi`).
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mindspeed.adaptor.versions.trainer import scale_rotation
from mindspeed.errors import ConfigError
from mindspeed.flags import read
from mindspeed.models import megatron_choice, megatron_chunks, megatron_layers
from mindspeed.models.model_config import ModelConfig
from mindspeed.models.rope_parameters import RopeParameters
from mindspeed.profiling.model_flops import linear_pattern
from mindspeed.spmd import Collective, I, V, typed


def problems(model: ModelConfig, ranks: int, *, fused_router: bool) -> Iterator[str]:
    """Flags that have no effect without another one, or no value that this release can use.

    Args:
        model: final values.
        ranks: context parallel size.
        fused_router: of ``--moe-router-fusion``.
    """
    if model.qk_norm_after_rope and not model.qk_layernorm:
        yield "--qk-norm-after-rope has no effect without --qk-layernorm: add it, or drop both"
    if model.qk_norm_over_all_heads and model.qk_layernorm:
        yield "--qk-norm-over-all-heads takes the place of --qk-layernorm: give one of them"
    if model.local_rotary_base and not isinstance(model.window_attn_skip_freq, list):
        yield (
            "--local-rotary-base counts in layers with a window: give --window-size, and "
            "--window-attn-skip-freq as a list, such as ([1]*5+[0])*4"
        )
    if model.attention_logit_softcap and ranks > 1:
        yield (
            "--attention-logit-softcap: ranks cannot share a sequence of bounded scores; take "
            "--context-parallel-size 1"
        )
    if model.attention_logit_softcap and model.softmax_type != "vanilla":
        yield f"--attention-logit-softcap does not work with --softmax-type {model.softmax_type}"
    yield from megatron_chunks.problems(model, model.no_rope_freq, model.seq_length, ranks)
    yield from megatron_choice.problems(model, fused_router=fused_router)
    rotary = model.position_embedding_type == "rope" and not model.multi_latent_attention
    if model.rope_parameters and not rotary:
        yield (
            "--rope-parameters has no effect without --position-embedding-type rope, or with "
            "--multi-latent-attention, which has --rope-type yarn: drop it"
        )
    elif model.rope_parameters:
        try:
            RopeParameters.of(model.rope_parameters)
        except ConfigError as error:
            yield str(error)


@functools.cache
def with_bias(linear: type) -> type:
    """A linear layer that has a bias whatever the configuration says."""

    class BiasedLinear(linear):  # type: ignore[misc]
        """A projection with a bias."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "bias": True})
            self.__class__ = linear  # by which features and adapters know what to convert

    return BiasedLinear


def change_spec(args: argparse.Namespace, spec: Any) -> Any:
    """Put the special modules into a layer spec or a block of layer specs."""
    model = read(ModelConfig, args)
    heads = model.num_attention_heads
    groups = model.num_query_groups if model.group_query_attention else heads
    mixed = model.experimental_attention_variant == "gated_delta_net"
    linear = tuple(linear_pattern(vars(args))) if mixed else None
    layers = getattr(spec, "layer_specs", [spec])
    for layer in {id(layer): layer for layer in layers}.values():  # alike layers share one
        attention = layer.submodules.self_attention.submodules
        if model.add_dense_bias:
            attention.linear_proj = with_bias(attention.linear_proj)
        megatron_layers.change_layer_spec(model, layer, heads, groups, linear)
    return spec


def change_model(args: argparse.Namespace, model: Any) -> None:
    """Add the extras of a built stage that no layer spec has."""
    extras = read(ModelConfig, args)
    with_engine = extras.transformer_impl == "transformer_engine"
    megatron_layers.change_layers(extras, model, with_engine, extras.qk_l2_norm)
    if extras.rope_parameters:
        _scale_positions(extras.rope_parameters, extras.rotary_base, model)
    if extras.local_rotary_base:
        rotation = megatron_layers.LocalRotation(
            extras.local_rotary_base,
            _first_frequency(extras),
            extras.rotary_interleaved,
        )
        assert isinstance(extras.window_attn_skip_freq, list)  # see problems
        megatron_layers.rotate_locally(rotation, extras.window_attn_skip_freq, model)
    if hasattr(model, "embedding"):
        if extras.embed_layernorm:
            _normalize_embeddings(model)
        if extras.embedding_multiplier != 1.0:
            scale = functools.partial(_scale, extras.embedding_multiplier)
            model.embedding.word_embeddings.register_forward_hook(scale)
    if not model.post_process:
        return
    if extras.logits_divisor != 1.0 or extras.final_logit_softcap:
        bound = functools.partial(_bound_logits, extras.logits_divisor, extras.final_logit_softcap)
        model.output_layer.register_forward_hook(bound)
    if extras.lm_norm_weight:
        # Fused weight gradients would go past the normalisation, into a buffer.
        model.output_layer.gradient_accumulation_fusion = False
        model.output_layer.register_forward_pre_hook(_normalize_weight, with_kwargs=True)
    if extras.z_loss_weight:
        _add_z_loss(extras.z_loss_weight, model)
    vocab_size = extras.vocab_size
    if extras.mask_padded_vocab and vocab_size and vocab_size < extras.padded_vocab_size:
        mask = functools.partial(_mask_padding, vocab_size)
        model.output_layer.register_forward_hook(mask)


def _scale_positions(parameters: str, base: int, model: Any) -> None:
    """Other frequencies in the rotary embedding, and a factor on its sine and cosine."""
    scaling = RopeParameters.of(parameters)
    scale_rotation(model.config, scaling.scale, f"--rope-parameters {scaling.rope_type}")
    rotary = model.rotary_pos_emb
    channels = 2 * rotary.inv_freq.numel()
    plain = rotary.get_freqs_non_repeated

    def scaled(max_seq_len: int, offset: int = 0) -> torch.Tensor:
        frequencies = scaling.frequencies(base, channels, max_seq_len)
        rotary.inv_freq = frequencies.to(rotary.inv_freq.device)
        return plain(max_seq_len, offset)

    rotary.get_freqs_non_repeated = scaled
    rotary.depends_on_length = scaling.depends_on_length


def _first_frequency(model: ModelConfig) -> float:
    """Radians per position of the model's first pair of channels: 1, unless it is scaled."""
    if model.rope_parameters:
        channels = int(model.kv_channels * model.rotary_percent)
        scaling = RopeParameters.of(model.rope_parameters)
        return float(scaling.frequencies(model.rotary_base, channels, 1)[0])
    return 1.0 / (model.rotary_seq_len_interpolation_factor or 1)


def _scale(factor: float, module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Scale in the embeddings' dtype, which rounds the factor, too."""
    return output * torch.tensor(factor, dtype=output.dtype)


def _bound_logits(divisor: float, cap: float | None, module: Any, inputs: Any, output: Any) -> Any:
    logits, bias = output
    if divisor != 1.0:
        logits = logits / divisor
    if cap:
        logits = torch.tanh(logits / cap) * cap
    return logits, bias


def _add_z_loss(weight: float, model: Any) -> None:
    """``weight * (largest logit)^2`` for each token, on top of its cross entropy."""
    cross_entropy = model.compute_language_model_loss

    def loss(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        from megatron.core import parallel_state

        # First, because the cross entropy may work in place.
        largest = largest_logit(logits, parallel_state.get_tensor_model_parallel_group())
        return cross_entropy(labels, logits) + weight * largest.transpose(0, 1).square()

    model.compute_language_model_loss = loss


def largest_logit(logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The largest logit of each token over the vocabulary of all ranks.

    Its gradient goes to the first largest entry. Moves two numbers per token.

    Args:
        logits: ``[s, b, v / ranks]``, this rank's part of the vocabulary.
        group: Tensor-parallel ranks, in the order of their parts.

    Returns:
        ``[s, b]`` in fp32, the same on all ranks.
    """
    result: torch.Tensor = _LargestLogit.apply(logits, group)
    return result


@typed(Collective(V, I))
class _LargestLogit(torch.autograd.Function):
    """Saves one index and one bool per token."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        mine, index = logits.detach().max(-1)
        mine = mine.float()
        largest = mine.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        owner = torch.where(mine == largest, rank, ranks)
        dist.all_reduce(owner, op=dist.ReduceOp.MIN, group=group)
        ctx.save_for_backward(index, owner == rank)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return largest

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        index, own = ctx.saved_tensors
        result = torch.zeros(ctx.shape, dtype=ctx.dtype, device=gradient.device)
        value = (gradient * own).to(ctx.dtype)
        return result.scatter_(-1, index[..., None], value[..., None]), None


def _normalize_embeddings(model: Any) -> None:
    """Behind the word embeddings; with sequence parallelism they are already this rank's part."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = model.config
    norm = WrappedTorchNorm(config, config.hidden_size, eps=config.layernorm_epsilon)
    model.embedding.word_embeddings_layernorm = norm
    model.embedding.word_embeddings.register_forward_hook(lambda module, inputs, out: norm(out))


def _normalize_weight(
    module: Any, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Every row is a token and lies whole on one rank, so this needs no communication."""
    return inputs, {**options, "weight": F.normalize(module.weight)}


def _mask_padding(vocab_size: int, module: Any, inputs: Any, output: Any) -> Any:
    """-infinity in the columns of padding entries: they take no part in loss or sampling."""
    from megatron.core import parallel_state

    logits, bias = output
    rank = parallel_state.get_tensor_model_parallel_rank()
    gathered = logits.shape[-1] != module.output_size_per_partition
    first = 0 if gathered else rank * logits.shape[-1]
    real = max(0, min(vocab_size - first, logits.shape[-1]))
    if real == logits.shape[-1]:
        return output
    columns = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(columns >= real, float("-inf")), bias
