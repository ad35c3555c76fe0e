"""``--unaligned-linear``: what it refuses, and how it says so."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve

ON = {
    "unaligned_linear": True,
    "tensor_model_parallel_size": 4,
    "num_attention_heads": 25,
    "ffn_hidden_size": 96,
    "seq_length": 1025,
}


def problems(**values):
    with pytest.raises(ConfigError) as caught:
        resolve(ON | values, "cpu")
    return str(caught.value)


def test_flag():
    enabled = [feature.name for feature in resolve(ON, "cpu").enabled]
    assert enabled == ["unaligned-linear"]
    assert "unaligned-linear" not in [f.name for f in resolve({}, "cpu").enabled]


@pytest.mark.parametrize(
    "values",
    [
        {"num_attention_heads": 24},  # rows are not sharded
        {"num_attention_heads": 24, "seq_length": 1024, "sequence_parallel": True},
        {"tensor_model_parallel_size": 1},
        {"num_attention_heads": 8, "group_query_attention": True, "num_query_groups": 2},
    ],
)
def test_no_effect(values):
    assert "--unaligned-linear: has no effect" in problems(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"ffn_hidden_size": 97},
        {"num_attention_heads": 24, "sequence_parallel": True},
        {"num_attention_heads": 20, "group_query_attention": True, "num_query_groups": 5},
    ],
)
def test_one_uneven_size_is_enough(values):
    assert resolve(ON | values, "cpu").enabled


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"num_experts": 4}, "--num-experts"),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers"),
        ({"use_legacy_models": True}, "--use-legacy-models"),
        ({"lora_target_modules": ("linear_qkv",)}, "--lora-target-modules"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"use_ascend_mc2": True}, "--use-ascend-mc2"),
        ({"use_ascend_coc": True, "coc_parallel_num": 2}, "--use-ascend-coc"),
        ({"fp8": "hybrid"}, "--fp8-format"),
        ({"optimizer": "muon"}, "--optimizer muon"),
        ({"position_embedding_type": "alibi"}, "--position-embedding-type alibi"),
        ({"sequence_parallel": True, "variable_seq_lengths": True}, "--variable-seq-lengths"),
    ],
)
def test_conflicts_name_both_flags(values, flag):
    text = problems(**values)
    assert "--unaligned-linear" in text and flag in text


def test_coc_by_environment(monkeypatch):
    monkeypatch.setenv("COC_PARALLEL_NUM", "2")
    (line,) = [line for line in problems().splitlines() if "COC_PARALLEL_NUM" in line]
    assert line.startswith("--unaligned-linear: cannot be combined with COC_PARALLEL_NUM: ranks")
    monkeypatch.setenv("COC_PARALLEL_NUM", "1")
    assert resolve(ON, "cpu").enabled


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"num_attention_heads": 3}, "--num-attention-heads 3"),
        ({"num_attention_heads": 9, "group_query_attention": True, "num_query_groups": 3},
         "--num-query-groups 3"),
        ({"ffn_hidden_size": 3}, "--ffn-hidden-size 3"),
        ({"seq_length": 3, "sequence_parallel": True}, "--seq-length 3"),
    ],
)  # fmt: skip
def test_every_rank_needs_a_part(values, flag):
    text = problems(**values)
    assert f"cannot give each of 4 ranks a part of {flag}" in text


def test_groups_must_divide_heads_and_sizes_are_needed():
    text = problems(num_attention_heads=25, group_query_attention=True, num_query_groups=6)
    assert "6 does not divide --num-attention-heads 25" in text
    assert "--ffn-hidden-size" in problems(ffn_hidden_size=None)
