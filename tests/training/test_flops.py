"""Model FLOPs by hand, layer for layer."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed import session
from mindspeed.profiling.model_flops import flops_of_tokens
from mindspeed.training.token_counts import (
    FixedLengthCounter,
    TokenCounts,
    keys_of_a_query,
    model_shape,
    sample_counts,
    training_flops,
)


def shape(**changes: Any) -> argparse.Namespace:
    values = {
        "num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 704, "num_attention_heads": 8,
        "num_query_groups": 2, "group_query_attention": True, "kv_channels": 32, "seq_length": 128,
        "padded_vocab_size": 1024, "swiglu": True, "quick_geglu": False, "num_experts": None,
        "mtp_num_layers": None, "multi_latent_attention": False, "attention_output_gate": False,
        "moe_latent_size": None,
    }  # fmt: skip
    return argparse.Namespace(**(values | changes))


def matmul(m: int, k: int, n: int) -> int:
    return 2 * m * k * n


def test_dense_model_with_grouped_queries_and_swiglu():
    s, h, ffn, vocab = 128, 256, 704, 1024
    qkv = matmul(s, h, 256 + 2 * 64)
    scores_and_values = 2 * matmul(s, 256, s) // 2  # causal: half of the square
    layer = qkv + scores_and_values + matmul(s, 256, h) + 2 * matmul(s, h, ffn) + matmul(s, ffn, h)
    forward = 4 * layer + matmul(s, h, vocab)
    assert training_flops(shape(), 3) == 3 * 3 * forward


def test_plain_mlp_has_two_matrices_and_every_head_its_key():
    args = shape(swiglu=False, group_query_attention=False)
    s, h = 128, 256
    layer = matmul(s, h, 3 * h) + matmul(s, h, s) + matmul(s, h, h) + 2 * matmul(s, h, 704)
    assert training_flops(args, 1) == 3 * (4 * layer + matmul(s, h, 1024))


@pytest.mark.parametrize("frequency, sparse", [(1, 4), (2, 2), ([0, 1, 1, 1], 3)])
def test_expert_flops_count_top_k_tokens(frequency, sparse):
    moe = {
        "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 128,
        "moe_shared_expert_intermediate_size": 64, "moe_layer_freq": frequency,
    }  # fmt: skip
    s, h = 128, 256
    dense = 3 * matmul(s, h, 704)
    routed = 3 * (2 * matmul(s, h, 128) + matmul(s, h, 64))
    difference = training_flops(shape(**moe), 1) - training_flops(shape(), 1)
    assert difference == 3 * sparse * (routed - dense)


def test_experts_with_a_latent_size_have_two_projections():
    moe = {
        "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 128,
        "moe_shared_expert_intermediate_size": 64, "moe_layer_freq": 1, "moe_latent_size": 48,
    }  # fmt: skip
    s, h, latent = 128, 256, 48
    projections = matmul(s, h, latent) + matmul(s, latent, h)
    experts = 3 * (2 * matmul(s, latent, 128) + matmul(s, h, 64))
    difference = training_flops(shape(**moe), 1) - training_flops(shape(), 1)
    assert difference == 3 * 4 * (projections + experts - 3 * matmul(s, h, 704))


@pytest.mark.parametrize("frequency", [2, [0, 1, 1, 0]])
def test_layers_that_do_not_compute_are_left_out(frequency, monkeypatch):
    """The seam ``computing_layers``: here the first two of four layers are no-op layers."""
    drop = SimpleNamespace(pipe=lambda layers: layers[2:])
    active = SimpleNamespace(seams=SimpleNamespace(computing_layers=drop))
    args = shape(num_experts=8, moe_layer_freq=frequency)
    assert sum(model_shape(args).moe_layers) == 2
    monkeypatch.setattr(session, "current", lambda: active)
    assert sorted(model_shape(args).moe_layers) == [False, True]
    assert model_shape(shape(mtp_num_layers=1)).moe_layers == (False,) * 3


MLA = {
    "multi_latent_attention": True, "group_query_attention": False, "q_lora_rank": 48,
    "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip


def test_latent_attention_counts_its_low_rank_projections():
    s, h, heads = 128, 256, 8
    query = matmul(s, h, 48) + matmul(s, 48, heads * 24) + 2 * s * 48
    latent = matmul(s, h, 32) + matmul(s, 32, heads * 32) + 2 * s * 32
    core = (matmul(s, heads * 24, s) + matmul(s, heads * 16, s)) // 2
    layer = (
        query + latent + matmul(s, h, 8) + core + matmul(s, heads * 16, h) + 3 * matmul(s, h, 704)
    )
    assert training_flops(shape(**MLA), 1) == 3 * (4 * layer + matmul(s, h, 1024))


def test_sequences_of_any_lengths_cost_what_each_costs_alone():
    lengths = [128, 7, 40]
    together = flops_of_tokens(model_shape(shape()), sum(lengths), sum(n * n for n in lengths) / 2)
    assert together == sum(training_flops(shape(seq_length=n), 1) for n in lengths)


def test_a_window_counts_the_keys_that_queries_see():
    """Layers 1 and 3 of 4 see 8 keys at most; sequences shorter than that see all of theirs."""
    windows = {"window_size": (7, 0), "window_attn_skip_freq": 2}
    for length, pairs in ((128, 128 * 8 - 32), (8, 32), (5, 12.5)):
        args = shape(seq_length=length, **windows)
        lacking = 3 * 4 * 256 * 2 * (length**2 / 2 - pairs)
        whole = training_flops(shape(seq_length=length), 1)
        assert whole - training_flops(args, 1) == lacking
        assert FixedLengthCounter(args).take(3) == TokenCounts(
            3 * length, 3 * length, 3 * (length**2 / 2 + pairs) / 2
        )
    items = [{"tokens": torch.zeros(128), "cu_seqlens": torch.tensor([0, 5, 8])}]
    items.append({"tokens": torch.zeros(128)})
    counts = sample_counts(items, keys_of_a_query(shape(**windows)))
    assert counts.tolist() == [136, 25 + 9 + 128**2 // 2 + 128 * 8 - 32]


MOE = {
    "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 128,
    "moe_shared_expert_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("pattern", [None, [1, 1, 1, 0], [0, 0, 0, 1]])
def test_a_prediction_layer_is_one_more_layer_of_the_last_kind_and_one_more_output(depth, pattern):
    """It joins two vectors of hidden size (DeepSeek-V3, equation 21) and has three norms."""
    s, h, vocab = 128, 256, 1024
    moe = {} if pattern is None else {**MOE, "moe_layer_freq": pattern}
    attention = matmul(s, h, 256 + 2 * 64) + matmul(s, 256, s) + matmul(s, 256, h)
    dense = 3 * matmul(s, h, 704)
    routed = 3 * (2 * matmul(s, h, 128) + matmul(s, h, 64))
    mlp = routed if pattern is not None and pattern[-1] else dense
    joined = matmul(s, 2 * h, h) + 2 * s * 3 * h
    difference = training_flops(shape(**moe, mtp_num_layers=depth), 1) - training_flops(
        shape(**moe), 1
    )
    assert difference == 3 * depth * (attention + mlp + joined + matmul(s, h, vocab))
