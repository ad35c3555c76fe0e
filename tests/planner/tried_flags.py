"""Flags of features that are counted on FakeTensors only; the others are compared with real ranks.

``{folder}`` stands for a directory with the files :data:`FILES`.
"""

from __future__ import annotations

from typing import Any

_TE = "--transformer-impl transformer_engine "
_TP = "--tensor-model-parallel-size 2 --bf16 "
_SP = _TP + _TE + "--sequence-parallel "
_PP = "--pipeline-model-parallel-size 2 --bf16 --num-layers 4 "
_VIRTUAL = _PP + "--num-layers-per-virtual-pipeline-stage 1 "
_BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
_AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
_CP = "--context-parallel-size 2 --bf16 --use-flash-attn --context-parallel-algo "
_EP = "--expert-model-parallel-size 2 "
_EP4 = "--expert-model-parallel-size 4 "
_HIDDEN = "--moe-alltoall-overlap-comm "
_DEEPSPEED = _EP + "--moe-model-type deepspeed_moe ~--bf16 "
_SLICED = "--tensor-model-parallel-size 2 --sequence-parallel "
_DIST = "--use-distributed-optimizer "

FILES = {
    "slots.json": '{"experts": 8, "ranks": 2, "layers": {"1": [7, 6, 5, 4, 3, 2, 1, 0]}}',
    "plan.yaml": "all: {input_layernorm: recompute_output}\n0: {self_attention: offload}\n",
    "coc.json": '{"customized_coc": {"[64, 32, 64]": 2}, "recompute_all_gather": false}',
}
TRIED = {
    "fused operators": _TP + "--use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb "
    "--npu-deterministic --deterministic-mode --op-cal-tflops --memory-fragmentation 1 "
    "--optimizer fused_adam --mlp-layer-fusion ~--no-masked-softmax-fusion "
    "~--no-rope-fusion ~--no-bias-swiglu-fusion",
    "weight gradients fused": _TP + _TE + _DIST + "~--no-gradient-accumulation-fusion "
    "--disable-gloo-group --hccl-slice-size 10",
    "pools of memory": _TP + "--hccl-group-buffer-adaptive",
    "activation plan": _TP + _TE + "--activation-plan {folder}/plan.yaml",
    "adaptive, to the host": _TP + _TE + "--train-iters 20 --adaptive-recompute-device-swap "
    "--adaptive-recompute-device-size 20 --adaptive-recompute-profiling-step 5",
    "adaptive optimization": _TP + _TE + "--train-iters 20 --adaptive-memory-optimization",
    "slopes": _TP + "--use-flash-attn --position-embedding-type alibi --square-alibi-mask "
    "--fill-neg-inf --alibi-diagonal-opposite --alibi-fusion-attn-type 2",
    "masks": _TP + "--use-flash-attn --use-fusion-attn-v2 --shape-order BSND "
    "--attention-mask-on-cpu",
    "triangle": _TP + "--triangle-attn --triangle-block-size 16",
    "ring": _CP + "megatron_cp_algo --use-cp-send-recv-overlap "
    "--use-fused-ring-attention-update --megatron-cp-in-bnsd "
    "--context-parallel-kv-cache-policy full --context-parallel-cache-interval 1",
    "ulysses": _CP + "ulysses_cp_algo --use-ulysses-allgather-kv --num-query-groups 1",
    "groups of heads": _CP + "kvallgather_cp_algo --kvallgather-head-groups 2",
    "adaptive masks": _CP + "adaptive_cp_algo --adaptive-cp-without-coarse "
    "--adaptive-cp-overlap-degree 2",
    "adaptive, in order": _CP + "adaptive_cp_algo --adaptive-cp-only-reschedule",
    "masks of the user": _CP + "adaptive_cp_algo --attention-mask-type general "
    "--adaptive-cp-manually-set-mask-list",
    "masks of a batch": _CP + "adaptive_cp_algo --adaptive-cp-dynamic-attn-mask",
    "products with files": _SP + "--use-ascend-coc --coc-fused-kernel --coc-parallel-num 2 "
    "--coc-mode 0 --coc-cfgs {folder}/coc.json",
    "half batches": _SP + "--half-batch-overlap --micro-batch-size 2",
    "overlapped products": _SP + "--tp-comm-overlap",
    "recomputed without communication": _SP + _AGAIN + "--optimize-recomp-communication-level 2",
    "grid": "--tensor-model-parallel-size 4 --bf16 --tp-2d --tp-x 2 --tp-y 2 --num-query-groups 8 "
    "--enable-overlap-matmul-with-rs --enable-backward-overlap-ag-with-matmul",
    "grid of products": "--tensor-model-parallel-size 4 --bf16 "
    "--num-query-groups 8 --use-nd-matmul --nd1-dim1-size 2 --nd2-dim1-size 2",
    "first layers again": _VIRTUAL + _BLOCK + "--enable-recompute-layers-per-pp-rank",
    "first outputs again": _PP + "--recompute-norm --recompute-norm-num-layers 1 "
    "--recompute-activation-function --recompute-activation-function-num-layers 1",
    "messages": _PP + "--optimize-send-recv-comm --pipeline-num-transformer-layers [[1],[3]]",
    "several tensors": _PP + "--use-multiparameter-pipeline-model-parallel "
    "--use-manual-layer-allocation --manual-layers 3,1",
    "schedule in memory": _PP + "--pipeline-schedule auto --pipeline-memory-limit 8 "
    "--pipeline-schedule-dump {folder}/schedule.csv --pipeline-costs 1,1,1 "
    "--pipeline-trace {folder}/trace",
    "fold order": _VIRTUAL + "--fold-mode aiao --fold-order strict",
    "automated": _PP + "--automated-pipeline",
    "on the host": _TP
    + _TE
    + _DIST
    + "--swap-attention --swap-modules mlp --swap-min-bytes 1024 --swap-optimizer "
    "--swap-optimizer-times 2",
    "averaged slowly": _TP + _TE + "--optimizer-selection fused_ema_adamw --ema-decay 0.99",
    "profile": _TP + "--profile --profile-step-start 1 --profile-step-end 2",
    "fused experts": _EP + "--use-fused-moe-token-permute-and-unpermute --n-shared-experts 1 "
    "--moe-ffn-hidden-size 48 ~--no-gradient-accumulation-fusion "
    "--gemm-gradient-accumulation-fusion --moe-adaptive-recompute-activation "
    "--moe-adaptive-recompute-activation-scale 1.5",
    "groups of experts": _EP + _SLICED + "--expert-tensor-parallel-size 2 "
    "--moe-experts-pipeline-degree 2",
    "device bound": _EP + _HIDDEN + "--moe-device-bound 2 --moe-device-bound-overflow error",
    "symmetric memory": _EP + "--moe-device-bound 2 --moe-device-bound-exchange symmetric-memory",
    "some layers without memory": _EP + _HIDDEN + "--moe-zero-memory level1 "
    "--moe-zero-memory-num-layers 1",
    "hot experts of nodes": _EP4 + _HIDDEN + "--balanced-moe-experts "
    "--balanced-moe-hot-expert-num 2 --trans-hot-expert-group-num 2",
    "tensor parallel ranks of a node": _EP + _SLICED + "--moe-tp-extend-ep "
    "--moe-hierarchical-alltoallv --moe-alltoall-overlap-comm",
    "noisy gate": _DEEPSPEED + "--noisy-gate-policy RSample --moe-train-capacity-factor 1.5 "
    "--no-use-rts --num-layers 4 --expert-interval 2",
    "sinkhorn": _DEEPSPEED + "--moe-use-sinkhorn --moe-router-topk 1",
    "rearranged": _DEEPSPEED + "--enable-token-rearrange-opt",
    "pipe experts": _EP + _SLICED + "--use-pipe-experts --pipe-experts-multi-data 2 "
    "--pipe-experts-multi-stream",
    "behind attention, sliced": _DEEPSPEED + _SLICED + "--ampipe-degree 2 "
    "--ampipe-tp-sp-comm-overlap",
    "placed experts": _EP + _HIDDEN + "--moe-expert-placement {folder}/slots.json "
    "--moe-exchange-interval 100",
    "divided experts": _EP + "--zero-stage 3",
    "from the host": _TP + _TE + "--fine-grained-activation-offloading --offload-modules core_attn",
}
"""Name -> flags of a job of 4 ranks, 2 on each node."""
NOT_COUNTED: dict[str, str] = {
    "from the host": "--fine-grained-activation-offloading cannot be planned",
    "several tensors": "--use-multiparameter-pipeline-model-parallel cannot be planned",
    "divided experts": "--zero-stage 2 and 3 (--use-megatron-fsdp) cannot be planned with --num-ex",
    "masks of the user": "--adaptive-cp-manually-set-mask-list: generate_adaptive_cp_grid_mask",
    "symmetric memory": "--moe-device-bound-exchange symmetric-memory: needs NVIDIA GPUs",
    "pools of memory": "hccl-group-buffer: does not run on cpu",
}
"""Name in :data:`TRIED` -> beginning of what is said."""


WEEKLY = frozenset({
    *("weight gradients fused", "adaptive optimization", "masks", "ring", "groups of heads"),
    *("adaptive masks", "adaptive, in order", "grid", "overlapped products", "fold order"),
    *("first layers again", "first outputs again", "on the host", "profile"),
    *("some layers without memory", "tensor parallel ranks of a node", "hot experts of nodes"),
    *("sinkhorn", "rearranged", "messages"),
})  # fmt: skip
"""Names of those whose features another one has, too, or a daily case of ``test_counts*.py``."""


def outcomes(folder: str, names: list[str]) -> dict[str, str]:
    """What becomes of each: "counted", what a refusal says, or a crash; each in a forked child."""
    from mindspeed.planner import isolated

    for name, text in FILES.items():
        with open(f"{folder}/{name}", "w") as file:
            file.write(text)
    found = isolated.map(outcome, [(TRIED[name].format(folder=folder),) for name in names])
    return dict(zip(names, map(str, found), strict=True))


def outcome(flags: str) -> str:
    """What becomes of one."""
    from mindspeed.errors import MindSpeedError
    from mindspeed.planner.count.counted_step import count_step
    from tests.planner.real_and_fake import _args

    try:
        args = _args(flags, 4, "--dry-run")
        step: Any = count_step(args, micro_batches=args.pipeline_model_parallel_size)
    except MindSpeedError as error:
        return str(error)
    except SystemExit as error:
        return f"ended with {error.code}"
    assert step.peak > step.static.total() > 0
    assert step.flops.total > 0
    return "counted"
