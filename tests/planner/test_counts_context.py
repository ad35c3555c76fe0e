"""Context and tensor parallelism counted on FakeTensors: real and fake are equal to the byte."""

from __future__ import annotations

import pytest

from tests.planner.real_and_fake import compare

_FOUR = "--context-parallel-size 4 --bf16 --use-flash-attn --context-parallel-algo "
_TWO = (
    "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --bf16 "
    "--use-distributed-optimizer --use-flash-attn --context-parallel-algo "
)
_DOCUMENTS = " --reset-attention-mask --reset-position-ids --calculate-per-token-loss"
_TP = "--tensor-model-parallel-size 2 --sequence-parallel --bf16 "
_DELTA_NETS = (
    " --experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 12 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4"
)
_GRID = "--tensor-model-parallel-size 4 --tp-2d --tp-x 2 --tp-y 2 --bf16 --num-query-groups 8"
CASES = {
    "documents, ring": (4, _TWO + "megatron_cp_algo" + _DOCUMENTS),
    "ulysses, slopes": (4, _TWO + "ulysses_cp_algo --position-embedding-type alibi"),
    "double ring": (4, _FOUR + "megatron_cp_algo --cp-window-size 2 --attention-mask-type general"),
    "hybrid adaptive": (
        4,
        _FOUR + "hybrid_adaptive_cp_algo --ulysses-degree-in-cp 2 --adaptive-cp-granularity 8",
    ),
    "window": (
        4,
        _FOUR + "kvallgather_cp_algo --sparse-mode 4 --pre-tockens 16 --next-tockens 0",
    ),
    "cached keys": (4, _FOUR + "megatron_cp_algo --context-parallel-kv-cache-policy full"),
    "documents of 12": (
        4,
        _FOUR + "hybrid_cp_algo --ulysses-degree-in-cp 2 --fix-sub-seq-length 12" + _DOCUMENTS,
    ),
    "gated delta nets": (4, _TWO + "megatron_cp_algo" + _DOCUMENTS + _DELTA_NETS),
    "grid": (4, _GRID + " --enable-overlap-ag-with-matmul"),
    "uneven heads": (
        4,
        "--tensor-model-parallel-size 4 --sequence-parallel --unaligned-linear --bf16 "
        "--num-attention-heads 12 --num-query-groups 4 --hidden-size 96 --ffn-hidden-size 90",
    ),
    "products in parts": (
        4,
        _TP + "--use-ascend-coc --coc-parallel-num 2 --transformer-impl transformer_engine",
    ),
    "fused products": (4, _TP + "--use-ascend-mc2 --transformer-impl transformer_engine"),
}


@pytest.mark.weekly_cases(
    "double ring",
    "window",
    "uneven heads",
    "products in parts",
    "documents of 12",
    "ulysses, slopes",
    "cached keys",
    "fused products",
)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_fake_equals_real(ranks, name):
    world, flags = CASES[name]
    assert compare(ranks, world, flags, [world - 1]) == {}
