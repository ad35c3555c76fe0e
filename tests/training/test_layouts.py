"""Every parallel layout and memory option trains like one rank, from the same initial weights.

Megatron's default flags: Transformer Engine spec, fused gradient accumulation, persistent layer
norm. Tolerances: fp32 losses 1e-6 relative, gradient norms 1e-4 relative, bf16 losses 1e-2. The
same matrix runs through Megatron-LM's own script in ``tests/megatron_lm``.
"""

from __future__ import annotations

import pytest

from tests.training.one_rank import assert_same_training, column

TIED = "--group-query-attention --num-query-groups 4"
UNTIED = "--untie-embeddings-and-output-weights"
GQA = f"{TIED} {UNTIED}"
MOE = (
    f"{GQA} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 64 "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
)
MLA = (
    f"{UNTIED} --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16"
)
MOE_PATTERN = f"{MOE} --moe-layer-freq [0,1,0,1]"
LOCAL = f"{GQA} --transformer-impl local"
LOCAL_8 = f"{UNTIED} --transformer-impl local"
# Linear biases for positions, and layers with and without a window.
ALIBI = f"{GQA} --position-embedding-type alibi --window-size 20,0 --window-attn-skip-freq 2"
# Additional tokens: the loss of each is a mean of its own.
MTP = f"{GQA} --mtp-num-layers 2"
MTP_TIED = f"{TIED} --mtp-num-layers 2"
# Sizes that two ranks cannot share evenly.
UNEVEN = (
    f"{UNTIED} --num-attention-heads 10 --num-query-groups 5 --kv-channels 8 "
    "--ffn-hidden-size 171 --seq-length 63"
)
# Ranks that share each sample take two at once: half the passes, other micro-batches than one rank.
PAIRS = "--micro-batch-size 2"
CP = f"{PAIRS} --context-parallel-size"
ALGO = "--context-parallel-algo"
TP, PP = f"{PAIRS} --tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
TP_8 = f"{PAIRS} --tensor-model-parallel-size 8"
TP_2D = f"{PAIRS} --tensor-model-parallel-size 4 --tp-2d --tp-x 2 --tp-y 2"
PP4 = "--pipeline-model-parallel-size 4 --pipeline-num-transformer-layers"
DISTRIBUTED = "--use-distributed-optimizer"
INSTANCES = f"{DISTRIBUTED} --num-distributed-optimizer-instances 2 --overlap-grad-reduce"

LAYOUTS = {
    "data-parallel": (2, GQA, ""),
    "tensor-parallel": (2, GQA, TP),
    "sequence-parallel": (2, GQA, f"{TP} --sequence-parallel"),
    "pipeline": (2, GQA, PP),
    "virtual-pipeline": (2, GQA, f"{PP} --num-layers-per-virtual-pipeline-stage 1"),
    "uneven-pipeline": (2, GQA, f"{PP} --num-layer-list 1,3"),
    "uneven-virtual-pipeline-moe": (4, MOE_PATTERN, f"{PP4} [[0,1],[1,0]*3]"),
    "uneven-pipeline-mtp": (2, MTP, f"{PP} --use-manual-layer-allocation --manual-layers 4,0"),
    "uneven-pipeline-recompute": (
        2,
        GQA,
        f"{PP} --num-layer-list 3,1 --recompute-module-list 2,1 --recompute-type 0",
    ),
    "uneven-virtual-pipeline-noop": (
        2,
        f"{GQA} --num-layers 5 --noop-layers 2",
        f"{PP} --pipeline-num-transformer-layers [[1,1],[2,1]]",
    ),
    "distributed-optimizer": (2, GQA, DISTRIBUTED),
    "zero-2-tensor-sequence": (4, TIED, f"{TP} --sequence-parallel --zero-stage 2"),
    "zero-3-experts": (4, MOE, "--expert-model-parallel-size 2 --zero-stage 3"),
    "optimizer-instances-experts": (4, MOE, f"--expert-model-parallel-size 2 {INSTANCES}"),
    "optimizer-instances-pipeline": (4, TIED, f"{PP} {INSTANCES} --overlap-param-gather"),
    "overlap-grad-reduce": (2, GQA, "--overlap-grad-reduce"),
    "overlap-param-gather": (
        2,
        GQA,
        f"{DISTRIBUTED} --overlap-grad-reduce --overlap-param-gather",
    ),
    "full-recompute": (
        2,
        GQA,
        f"{TP} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "selective-recompute": (2, GQA, f"{TP} --recompute-granularity selective"),
    "tensor-pipeline-sequence": (4, GQA, f"{TP} {PP} --sequence-parallel {DISTRIBUTED}"),
    "tensor-2d-recompute": (
        4,
        GQA,
        f"{TP_2D} --enable-overlap-matmul-with-rs --enable-backward-overlap-ag-with-matmul "
        f"{DISTRIBUTED} --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "tensor-2d-pipeline": (
        8,
        GQA,
        f"{TP_2D} {PP} --num-layers-per-virtual-pipeline-stage 1 --transformer-impl local "
        "--enable-overlap-ag-with-matmul",
    ),
    "tensor-2d-context": (8, GQA, f"{TP_2D} {CP} 2 {ALGO} megatron_cp_algo"),
    "tensor-8": (8, UNTIED, f"{TP_8} --sequence-parallel {DISTRIBUTED}"),
    "tensor-8-latent": (8, MLA, f"{TP_8} --sequence-parallel"),
    "tensor-8-shared-keys": (8, GQA, TP_8),  # 4 groups: two ranks have the same
    "tensor-2d-4-by-2": (8, UNTIED, f"{TP_8} --tp-2d --tp-x 4 --tp-y 2"),
    "tensor-2d-2-by-4": (
        8,
        LOCAL_8,
        f"{TP_8} --tp-2d --tp-x 2 --tp-y 4 --enable-overlap-matmul-with-rs {DISTRIBUTED}",
    ),
    "moe-expert-parallel": (2, MOE, "--expert-model-parallel-size 2"),
    "moe-expert-tensor": (
        4,
        MOE,
        f"{TP} --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 2",
    ),
    "mla-tensor-parallel": (2, MLA, TP),
    "mla-pipeline": (2, MLA, PP),
    "local-tensor-parallel": (2, LOCAL, TP),
    "local-sequence-parallel": (2, LOCAL, f"{TP} --sequence-parallel"),
    "unaligned-tensor": (2, UNEVEN, f"{TP} --unaligned-linear"),
    "unaligned-tensor-pipeline-sequence": (
        4,
        UNEVEN,
        f"{TP} {PP} --num-layers-per-virtual-pipeline-stage 1 --sequence-parallel "
        f"--unaligned-linear {DISTRIBUTED}",
    ),
    "unaligned-packed-recompute-communication": (
        2,
        f"{UNEVEN} --reset-attention-mask --reset-position-ids",
        f"{TP} --sequence-parallel --unaligned-linear --optimize-recomp-communication-level 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "local-unaligned-sequence-recompute": (
        4,
        f"{UNEVEN} --transformer-impl local",
        f"{PAIRS} --tensor-model-parallel-size 4 --sequence-parallel --unaligned-linear "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "context-ulysses": (2, GQA, f"{CP} 2"),
    "context-ring-cache": (
        2,
        GQA,
        f"{CP} 2 {ALGO} megatron_cp_algo --use-fused-ring-attention-update "
        "--context-parallel-kv-cache-policy full --context-parallel-cache-interval 1",
    ),
    "context-adaptive": (2, GQA, f"{CP} 2 {ALGO} adaptive_cp_algo"),
    "context-all-gather-pipeline": (
        4,
        GQA,
        f"{CP} 2 {ALGO} kvallgather_cp_algo --kvallgather-head-groups 2 {PP}",
    ),
    "context-hybrid-recompute": (
        4,
        GQA,
        f"{CP} 4 {ALGO} hybrid_cp_algo --ulysses-degree-in-cp 2 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "context-tensor-sequence": (4, GQA, f"{CP} 2 --cp-comm-type p2p {TP} --sequence-parallel"),
    "context-by-layer": (2, GQA, f"{CP} 2 --cp-comm-type p2p a2a all_gather p2p"),
    "mtp-context": (2, MTP, f"{CP} 2"),
    "mtp-context-pipeline": (4, MTP, f"{CP} 2 {PP}"),
    "mtp-tied-pipeline": (2, MTP_TIED, PP),
    "mtp-tied-tensor-pipeline": (4, MTP_TIED, f"{TP} {PP} {DISTRIBUTED}"),
    "mla-context": (2, MLA, f"{CP} 2 {ALGO} megatron_cp_algo"),
    "local-context-double-ring": (
        4,
        LOCAL,
        f"{CP} 4 {ALGO} megatron_cp_algo --cp-window-size 2 --recompute-granularity selective",
    ),
    "alibi-windows-context-pipeline-recompute": (
        4,
        ALIBI,
        f"{CP} 2 {ALGO} adaptive_cp_algo {PP} "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    "local-context-hybrid-adaptive": (
        4,
        LOCAL,
        f"{CP} 4 {ALGO} hybrid_adaptive_cp_algo --ulysses-degree-in-cp 2",
    ),
}

# With Megatron's default, 0.02, scores of attention are nearly zero in so small a model, and losses
# are the same with any positions.
SHARP = "--init-method-std 0.1"
SLOW = {"tensor-2d-pipeline", "tensor-2d-context"}  # eight ranks
# Layouts that another row has with more beside.
WEEKLY = {
    *("full-recompute", "mtp-tied-pipeline", "local-tensor-parallel", "tensor-8"),
    *("context-ulysses", "context-adaptive", "moe-expert-parallel", "tensor-2d-4-by-2"),
    *("tensor-2d-context", "tensor-2d-2-by-4", "tensor-8-shared-keys", "tensor-8-latent"),
    *("mla-pipeline", "optimizer-instances-pipeline", "distributed-optimizer"),
    *("overlap-grad-reduce", "tensor-pipeline-sequence", "local-sequence-parallel"),
    *("mtp-context-pipeline", "mtp-tied-tensor-pipeline", "uneven-virtual-pipeline-noop"),
    *("zero-2-tensor-sequence", "tensor-2d-pipeline", "unaligned-tensor"),
    *("local-unaligned-sequence-recompute", "context-tensor-sequence", "virtual-pipeline"),
    *("tensor-parallel", "uneven-pipeline", "local-context-double-ring"),
    "selective-recompute",  # its tensors are compared in compare/test_equal.py
    "zero-3-experts",  # in checkpoint/test_shards.py
    "tensor-2d-recompute",  # the grid trains in tensor_parallel/two_dimensional
    "local-context-hybrid-adaptive",  # counted rank by rank in planner/test_counts_context.py
}


def marks(layout):
    """Those of a row of the matrix."""
    given = ((pytest.mark.slow, SLOW), (pytest.mark.weekly, WEEKLY))
    return [mark for mark, names in given if layout in names]


SIZES = "--ffn-hidden-size 192 --fp8-format hybrid --fp8-recipe"  # that fp8 takes when cut in two
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FP8_DELAYED = f"{GQA} {SIZES} delayed --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
# Layouts that leave the blocks, or the tensors, that share a scaling factor as they are.
FP8_LAYOUTS = {
    "tensorwise-pipeline-recompute": (2, f"{GQA} {SIZES} tensorwise", f"{PP} {RECOMPUTE}"),
    "blockwise-distributed-optimizer": (2, f"{GQA} {SIZES} blockwise", DISTRIBUTED),
    "mxfp8-tensor-sequence": (
        2,
        f"{GQA} {SIZES} mxfp8",
        f"{TP} --micro-batch-size 1 --sequence-parallel",
    ),
    "tensorwise-expert-parallel": (
        2,
        f"{MOE} {SIZES} tensorwise",
        "--expert-model-parallel-size 2",
    ),
    "delayed-virtual-pipeline": (
        2,
        FP8_DELAYED,
        f"{PP} --num-layers-per-virtual-pipeline-stage 1",
    ),
    "delayed-recompute": (1, FP8_DELAYED, RECOMPUTE),
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("layout", [pytest.param(name, marks=marks(name)) for name in LAYOUTS])
def test_layout_trains_like_one_rank(layout, one_rank):
    world_size, model, flags = LAYOUTS[layout]
    reference = one_rank(f"{model} {SHARP}")
    assert_same_training(reference.train(world_size, flags), reference.records)


@pytest.mark.parametrize("model", [GQA, MLA], ids=["gqa", "mla"])
def test_the_matrix_sees_positions(model, one_rank):
    """Other angles of the rotary embedding are more than rounding to the losses."""
    reference = one_rank(f"{model} {SHARP}")
    (other, *_), (loss, *_) = (
        column(records, "lm_loss")
        for records in (reference.train(1, "--rotary-base 9000"), reference.records)
    )
    assert abs(other / loss - 1) > 3e-6  # three times what layouts may differ


@pytest.mark.weekly_cases("False")
@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_run_continues_with_other_layers_on_each_stage(first, one_rank, tmp_path):
    reference = one_rank(MOE_PATTERN)
    uneven = f"{PP4} [[0,1],[1,0]*3]"
    sizes, flags = ((4, 1), (uneven, "")) if first else ((1, 4), ("", uneven))
    records = reference.resumed(sizes, flags)
    assert column(records, "lm_loss") == pytest.approx(
        column(reference.records, "lm_loss")[2:], rel=1e-6
    )


EXPERT_OVERLAP = "--overlap-moe-expert-parallel-comm"
DELAYED = f"{EXPERT_OVERLAP} --delay-wgrad-compute"


OVERLAPPED = {
    "overlap": EXPERT_OVERLAP,
    "delayed": f"{DELAYED} --overlap-grad-reduce",
    "delayed-unfused": f"{DELAYED} --no-gradient-accumulation-fusion",
    "delayed-unfused-distributed": (
        f"{DELAYED} --no-gradient-accumulation-fusion --overlap-grad-reduce {DISTRIBUTED}"
    ),
}


@pytest.mark.weekly_cases("delayed-unfused", "delayed")
@pytest.mark.slow
@pytest.mark.parametrize("flags", OVERLAPPED.values(), ids=OVERLAPPED)
def test_overlapped_moe_micro_batches_train_like_sequential_ones(flags, one_rank):
    reference = one_rank(MOE)
    experts = "--bf16 --expert-model-parallel-size 2 --global-batch-size 8"
    plain = reference.plain(2, f"{experts} --exit-interval 3")
    assert_same_training(reference.train(2, f"{experts} {flags}"), plain, loss=1e-5, norm=1e-3)


@pytest.mark.slow
def test_bf16_follows_fp32(one_rank):
    reference = one_rank(GQA)
    records = reference.train(2, f"--bf16 {TP} --sequence-parallel")
    expected = column(reference.records[:2], "lm_loss")
    assert column(records, "lm_loss") == pytest.approx(expected, rel=1e-2)


@pytest.mark.weekly_cases(
    "tensorwise-pipeline-recompute", "delayed-recompute", "blockwise-distributed-optimizer"
)
@pytest.mark.slow
@pytest.mark.parametrize("layout", FP8_LAYOUTS)
def test_fp8_trains_like_one_rank_and_close_to_fp32(layout, one_rank):
    world_size, model, flags = FP8_LAYOUTS[layout]
    reference = one_rank(model)
    records = reference.train(world_size, flags)
    # With expert parallelism an expert's tensor holds the tokens of all ranks: another maximum.
    loss = 1e-4 if "expert" in layout else 1e-5
    assert_same_training(records, reference.records, loss=loss, norm=100 * loss)
    found = column(records, "lm_loss")
    plain = column(one_rank(model.split(" --fp8")[0]).records[: len(found)], "lm_loss")
    assert found == pytest.approx(plain, rel=1e-2) and found != pytest.approx(plain, rel=1e-6)


@pytest.mark.weekly_cases("delayed")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_fp8_across_tensor_parallel_ranks_follows_fp32(recipe, one_rank):
    reference = one_rank(f"{GQA} --ffn-hidden-size 192")
    flags = f"--bf16 {TP} --sequence-parallel --fp8-format e4m3 --fp8-recipe {recipe}"
    records = reference.train(2, flags)
    expected = column(reference.records[:2], "lm_loss")
    assert column(records, "lm_loss") == pytest.approx(expected, rel=1e-2)


@pytest.mark.slow
def test_a_failure_names_the_first_tensor_that_differs(one_rank):
    reference = one_rank(GQA)
    records = reference.train(2, f"{TP} --sequence-parallel --norm-epsilon 1e-2")
    with pytest.raises(AssertionError, match=r"lm_loss: .*, not ") as failure:
        assert_same_training(records, reference.records)
    first = "FIRST DIFFERENCE: step 0, micro-batch 0, forward, decoder.layers.0.self_attention."
    assert f"{first}linear_qkv, output" in str(failure.value)  # whose norm is inside


def test_the_comparison_can_fail(one_rank):
    reference = one_rank(GQA)
    records = reference.train(1, "--seed 4321")
    expected = column(reference.records[:2], "lm_loss")
    assert column(records, "lm_loss") != pytest.approx(expected, rel=1e-6)
