"""Wrong flags of 2D tensor parallelism are refused with the numbers, before work starts."""

from __future__ import annotations

import pytest

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from mindspeed.features.tensor_parallel import tensor_parallel_2d

SIZES = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 176, "num_attention_heads": 8,
    "seq_length": 64, "tensor_model_parallel_size": 4, "context_parallel_size": 1, "swiglu": True,
}  # fmt: skip
GRID = {"tp_2d": True, "tp_x": 2, "tp_y": 2}
OLD = {"use_nd_matmul": True, "nd1_dim1_size": 2, "nd2_dim1_size": 2}
GQA = {"group_query_attention": True}

REFUSED = {
    "product": (
        GRID | {"tp_x": 4},
        r"--tp-x 4 \* --tp-y 2 = 8 must be .*-size 4.*--tp-x 2 --tp-y 2",
    ),
    "one-of-them-1": (GRID | {"tp_x": 4, "tp_y": 1}, "--tp-x 4 .* both must be > 1"),
    "no-grid": (GRID | {"tensor_model_parallel_size": 3}, "must be a product of two numbers > 1"),
    "heads": (GRID | {"num_attention_heads": 7}, "--num-attention-heads 7: must be .* --tp-x 2"),
    "groups": (GRID | GQA | {"num_query_groups": 1}, "--num-query-groups 1: must be .* --tp-x 2"),
    "hidden": (GRID | {"hidden_size": 63, "kv_channels": 8}, "--hidden-size 63: .* --tp-y 2"),
    "ffn": (GRID | {"ffn_hidden_size": 175}, "--ffn-hidden-size 175: must be .* --tp-x 2"),
    "length": (GRID | {"seq_length": 66}, r"--seq-length 66: .* --tp-x \* --tp-y = 4"),
    "length-of-context": (
        GRID | {"seq_length": 68, "context_parallel_size": 2, "cp_comm_type": ["p2p"]},
        r"--seq-length 68: .* = 4 \* --context-parallel-size 2",
    ),
    "two-overlaps": (
        GRID | {"enable_overlap_ag_with_matmul": True, "enable_overlap_matmul_with_rs": True},
        "--enable-overlap-ag-with-matmul and --enable-overlap-matmul-with-rs: .*choose one",
    ),
    "overlap-alone": (
        {"enable_backward_overlap_ag_with_matmul": True},
        "--enable-backward-overlap-ag-with-matmul: has no effect without --tp-2d",
    ),
    "size-alone": ({"tp_x": 2}, "--tp-x: has no effect without --tp-2d"),
    "both-names": (GRID | OLD, "--use-nd-matmul: is an older name of --tp-2d"),
    "old-unequal": (OLD | {"nd2_dim1_size": 4}, r"--nd1-dim1-size 2 \* --nd2-dim1-size 4 = 8"),
    "mixed-sizes": (OLD | {"tp_x": 2}, "give --nd1-dim1-size and --nd2-dim1-size only"),
    "experts": (GRID | {"num_experts": 4}, "--tp-2d: cannot be combined with --num-experts"),
    "latent": (GRID | {"multi_latent_attention": True}, "--multi-latent-attention"),
    "documents": (GRID | {"reset_attention_mask": True}, "--reset-attention-mask"),
    "lengths": (GRID | {"variable_seq_lengths": True}, "--variable-seq-lengths"),
    "adapters": (GRID | {"lora_target_modules": ["linear_qkv"]}, "--lora-target-modules"),
    "hybrid": (GRID | {"cp_comm_type": ["a2a+p2p"]}, "a2a.p2p: its groups do not fit --tp-2d"),
    "adaptive": (
        GRID | {"context_parallel_size": 2, "context_parallel_algo": "adaptive_cp_algo"},
        "adaptive_cp_algo: does not work with --tp-2d; choose megatron_cp_algo or ulysses_cp_algo",
    ),
    "norms": (GRID | {"recompute_norm": True}, "--tp-2d: cannot be combined with --recompute-norm"),
    "no-op": (GRID | {"noop_layers": (1,)}, "--tp-2d: cannot be combined with --noop-layers"),
    "chunks": (
        GRID | {"coc_parallel_num": 2, "sequence_parallel": True},
        "--tp-2d: cannot be combined with --coc-parallel-num",
    ),
    "fused": (GRID | {"coc_fused_kernel": True}, "--coc-fused-kernel: one kernel cannot use"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_flags_are_refused(case):
    values, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        resolve(SIZES | values, "cpu")


@pytest.mark.parametrize("values", [GRID, OLD, GRID | {"enable_overlap_matmul_with_rs": True}])
def test_right_flags_switch_it_on(values):
    enabled = resolve(SIZES | values, "cpu").enabled
    assert "tensor-parallel-2d" in {feature.name for feature in enabled}


def test_activations_are_sharded_and_no_mask_is_built():
    feature = resolve(SIZES | GRID, "cpu").features["tensor-parallel-2d"]
    corrected = feature.corrects(SIZES | GRID)
    assert corrected == {"sequence_parallel": True, "create_attention_mask_in_dataloader": False}


LLAMA_3_405B = GQA | {
    "hidden_size": 16384, "ffn_hidden_size": 53248, "num_attention_heads": 128,
    "num_query_groups": 8, "swiglu": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("x", "y", "warned"),
    [(8, 2, ""), (4, 4, ""), (2, 8, "2 x 8 sends 1.390"), (2, 2, "2 x 2 sends 1.275")],
)
def test_a_grid_that_sends_more_than_one_dimension_is_warned_of(x, y, warned, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    tensor_parallel_2d.report(LLAMA_3_405B, x, y)
    printed = capsys.readouterr().out
    assert f"grid {x} x {y}, hidden states [s/{x}, b, h/{y}]" in printed
    assert ("warning" in printed) == bool(warned) and warned in printed
    if (x, y) == (2, 8):
        assert "; 8 x 2 sends least" in printed and "4 x 4        0.794" in printed
    if (x, y) == (2, 2):
        assert "--sequence-parallel without --tp-2d sends least" in printed
    monkeypatch.setenv("RANK", "1")
    tensor_parallel_2d.report(LLAMA_3_405B, x, y)
    assert capsys.readouterr().out == ""
