"""Jobs for the ranks of test_mtp_repairs.py."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.adaptor.versions import at_least
from tests.adaptor.layer_repair_ranks import configured, one_rank


def learning_rates_of_embeddings(repaired: bool, tied: bool) -> float:
    """The rate of this stage's embedding under ``--decoupled-lr 7``; the last one predicts more."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, _get_param_groups
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from mindspeed.adaptor.repairs.parallel import parameter_marks
    from mindspeed.adaptor.versions.trainer import optimizer_overrides

    arguments = {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2}
    configured(parameter_marks, arguments, repaired)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    model = _stage(tied)
    config = OptimizerConfig(lr=1.0, min_lr=0.0, decoupled_lr=7.0)
    if at_least("0.16"):
        given = (config, optimizer_overrides(config)["config_overrides"])
    else:
        given = (None, None, 1.0, config.lr, config.min_lr, config.decoupled_lr, 0.0)
    embedding = model.embedding.word_embeddings.weight
    (rate,) = [
        group["max_lr"]
        for group in _get_param_groups([model], *given)
        if any(parameter is embedding for parameter in group["params"])
    ]
    return float(rate)


def _stage(tied: bool) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs

    from tests.support import gpt_ranks

    config = gpt_ranks.config(
        "layernorm-gelu-bias", pipeline_model_parallel_size=2, mtp_num_layers=1,
        pipeline_dtype=torch.float32,
    )  # fmt: skip
    layers = specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    prediction = specs.get_gpt_mtp_block_spec(config, layers, use_transformer_engine=True)
    return GPTModel(
        config, layers, vocab_size=32, max_sequence_length=8, mtp_block_spec=prediction,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
    )  # fmt: skip


def without_targets(repaired: bool) -> tuple[float, bool]:
    """The prediction loss of a micro-batch whose mask is zero; whether all gradients are zero."""
    from mindspeed.adaptor.repairs.layers import mtp
    from tests.support import gpt_ranks
    from tests.support.release import prediction_losses

    configured(mtp, {"mtp_num_layers": 1}, repaired)
    one_rank()
    model = gpt_ranks.build(gpt_ranks.config("layernorm-gelu-bias", mtp_num_layers=1), "te")
    tokens = torch.arange(16)[None]
    mask = torch.zeros(1, 16)
    loss = model(tokens, tokens, None, labels=tokens, loss_mask=mask)
    (loss * mask).sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    zero = bool(gradients) and all(not bool(grad.any()) for grad in gradients)
    return float(prediction_losses()[0]), zero


def gradients_of_four_tokens(
    repaired: bool, per_token: bool, masked: bool
) -> dict[str, torch.Tensor]:
    """Gradients of the mean loss over the first four tokens, with two predictions more.

    Args:
        repaired: With the repair.
        per_token: The loss is a sum, and gradients are divided by the tokens.
        masked: The model gets the loss mask; else the labels alone.
    """
    from mindspeed.adaptor.repairs.layers import mtp
    from tests.support import gpt_ranks

    configured(mtp, {"mtp_num_layers": 2}, repaired)
    one_rank()
    config = gpt_ranks.config(
        "layernorm-gelu-bias", mtp_num_layers=2, calculate_per_token_loss=per_token
    )
    model = gpt_ranks.build(config, "te")
    tokens = torch.arange(16)[None]
    mask = (tokens < 4).float()
    labels = torch.where(mask > 0, tokens, -100)
    loss = model(tokens, tokens, None, labels=labels, loss_mask=mask if masked else None)
    ((loss * mask).sum() / (1 if per_token else 4)).backward()
    return {
        name: p.grad / (4 if per_token else 1)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def packed_gradients(repaired: bool, recompute: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Gradients of a model with a prediction layer, of two packed documents."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from mindspeed.adaptor.repairs.layers import mtp
    from tests.support import gpt_ranks

    configured(mtp, {"mtp_num_layers": 1, **recompute}, repaired)
    one_rank()
    config = gpt_ranks.config("layernorm-gelu-bias", mtp_num_layers=1, **recompute)
    model = gpt_ranks.build(config, "te")
    tokens = torch.arange(16)[None]
    starts = torch.tensor([0, 7, 16], dtype=torch.int32)
    packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=9, max_seqlen_kv=9)
    loss = model(tokens, tokens, None, labels=tokens, packed_seq_params=packed)
    loss.sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def attention_of_layers(repaired: bool) -> list[str]:
    """Of a decoder of one ordinary layer and one gated delta net: what the builder is told."""
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.transformer import TransformerConfig

    from mindspeed.adaptor.repairs.layers import mtp

    variant = {"experimental_attention_variant": "gated_delta_net", "mtp_num_layers": 1}
    configured(mtp, variant, repaired)
    one_rank()
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, linear_attention_freq=[0, 1],
        linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_conv_kernel_dim=4, activation_func=torch.nn.functional.silu,
        normalization="RMSNorm", add_bias_linear=False, transformer_impl="transformer_engine",
        **variant,
    )  # fmt: skip
    layers = specs.get_gpt_decoder_layer_specs(config, use_transformer_engine=True)
    return [layer.submodules.self_attention.module.__name__ for layer in layers]
