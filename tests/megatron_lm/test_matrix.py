"""Unmodified ``pretrain_gpt.py`` plus one import line: every layout equals the one-rank run.

Megatron's default flags: Transformer Engine spec, fused gradient accumulation, persistent layer
norm. fp32 losses are compared at a relative tolerance of 2e-6 (the printed digits), gradient norms
at 1e-3 (three printed decimals); bf16 losses at 1e-2.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_lm.launch import Run, pretrain
from tests.support.release import brought_by

pytestmark = [
    pytest.mark.slow,
    pytest.mark.megatron_lm,
    pytest.mark.usefixtures("forked_scripts"),
]

MODEL = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 176 --num-attention-heads 8 "
    "--group-query-attention --num-query-groups 4 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --seq-length 64 --max-position-embeddings 64 "
    "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.1"  # so that positions count
)
MOE = (
    f"{MODEL} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
)
MLA = (
    f"{MODEL.replace('--group-query-attention --num-query-groups 4 ', '')} "
    "--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16"
)
LOCAL = f"{MODEL} --transformer-impl local"
DELTA = (
    f"{MODEL} --experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 8 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4"
)
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 4 --lr 1e-3 --lr-decay-iters 10 "
    "--seed 1234 --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --eval-iters 0 "
    "--eval-interval 1000 --log-interval 1 --distributed-timeout-minutes 2"
)

LAYOUTS = {
    "data-parallel": (2, MODEL, ""),
    "tensor-parallel": (2, MODEL, "--tensor-model-parallel-size 2"),
    "sequence-parallel": (2, MODEL, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "tensor-2d": (
        4,
        MODEL,
        "--tensor-model-parallel-size 4 --tp-2d --tp-x 2 --tp-y 2 --use-distributed-optimizer "
        "--enable-overlap-ag-with-matmul",
    ),
    "pipeline": (2, MODEL, "--pipeline-model-parallel-size 2"),
    "virtual-pipeline": (
        2,
        MODEL,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ),
    "uneven-pipeline": (
        2,
        MODEL,
        "--pipeline-model-parallel-size 2 --pipeline-num-transformer-layers [[0,2],[1,1]]",
    ),
    "dualpipev": (
        2,
        MODEL,
        "--pipeline-model-parallel-size 2 --schedules-method dualpipev --eval-iters 1 "
        "--eval-interval 2",
    ),
    "waves": (
        2,
        MODEL,
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--pipeline-schedule zb-wave",
    ),
    "zb-v-tensor-distributed-optimizer": (
        4,
        MODEL.replace("--untie-embeddings-and-output-weights ", ""),
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --tensor-model-parallel-size 2 "
        "--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce",
    ),
    "swap-attention": (
        2,
        MODEL,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--swap-attention --swap-min-bytes 0 --recompute-num-layers 1",
    ),
    "distributed-optimizer": (2, MODEL, "--use-distributed-optimizer"),
    "overlap-grad-reduce": (2, MODEL, "--overlap-grad-reduce"),
    "overlap-param-gather": (
        2,
        MODEL,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    "adaptive-memory": (
        2,
        MODEL,
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--adaptive-memory-optimization --adaptive-recompute-profiling-step 2",
    ),
    "adaptive-memory-moe": (
        2,
        MOE,
        "--expert-model-parallel-size 2 --adaptive-recompute-device-swap "
        "--adaptive-recompute-profiling-step 2 --memory-fragmentation auto",
    ),
    "full-recompute": (
        2,
        MODEL,
        "--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1",
    ),
    "selective-recompute": (1, MODEL, "--recompute-granularity selective"),
    "tensor-x-pipeline-sequence-parallel": (
        4,
        MODEL,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel "
        "--use-distributed-optimizer",
    ),
    "moe-expert-parallel": (2, MOE, "--expert-model-parallel-size 2"),
    "mla-tensor-parallel": (2, MLA, "--tensor-model-parallel-size 2"),
    "gated-delta-nets": (2, DELTA, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "local-spec": (2, LOCAL, "--tensor-model-parallel-size 2"),
    "local-spec-sequence-parallel": (
        2,
        LOCAL,
        "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "context-ulysses": (2, MODEL, "--context-parallel-size 2"),
    "context-by-layer": (
        2,
        MODEL,
        "--context-parallel-size 2 --cp-comm-type p2p a2a all_gather p2p",
    ),
    "context-hybrid": (
        4,
        MODEL,
        "--context-parallel-size 4 --context-parallel-algo hybrid_cp_algo "
        "--ulysses-degree-in-cp 2 --recompute-granularity selective",
    ),
    "context-adaptive-tensor": (
        4,
        MODEL,
        "--context-parallel-size 2 --context-parallel-algo adaptive_cp_algo "
        "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
    "local-context-ring-pipeline": (
        4,
        LOCAL,
        "--context-parallel-size 2 --context-parallel-algo megatron_cp_algo "
        "--pipeline-model-parallel-size 2",
    ),
}


# Layouts that another row has with more beside; tests/training/test_layouts.py has most of them.
WEEKLY = (
    *("data-parallel", "tensor-parallel", "sequence-parallel", "pipeline", "virtual-pipeline"),
    *("overlap-grad-reduce", "selective-recompute", "local-spec", "context-ulysses", "waves"),
)

# Layouts that older releases do not have: those of features say so by their flag, and before 0.16
# Megatron's script groups products of experts in bf16 only.
SINCE = {
    "0.15": ("uneven-pipeline", "dualpipev", "waves", "zb-v-tensor-distributed-optimizer"),
    "0.16": (
        *("tensor-2d", "context-adaptive-tensor", "gated-delta-nets"),
        *("adaptive-memory-moe", "moe-expert-parallel"),
    ),
}


def _marks(layout: str) -> list[pytest.MarkDecorator]:
    since = [brought_by(release) for release, names in SINCE.items() if layout in names]
    return [*since, *[pytest.mark.weekly] * (layout in WEEKLY)]


class Reference:
    """A model's initial weights, saved by one rank, and the one-rank run that starts from them.

    Every run loads the same weights: Megatron draws other initial weights for other layouts.
    """

    def __init__(self, directory: Path, model: str) -> None:
        self.model = model
        self.weights = directory / "weights"
        save = f"--save {self.weights} --save-interval 1 --train-iters 1 --lr 0 --min-lr 0"
        save += " --seed 7"  # not that of the runs, which show thus that they load
        pretrain(directory, 1, *f"{model} {TRAINING} {save}".split())
        self.run = self.train(directory, 1, "")

    def train(self, directory: Path, nproc: int, flags: str) -> Run:
        """Four iterations from the saved weights with ``flags`` on ``nproc`` ranks."""
        load = f"--load {self.weights} --finetune --no-load-optim --no-load-rng"
        return pretrain(directory, nproc, *f"{self.model} {TRAINING} {load} {flags}".split())


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """``reference(model)``: made once for each model."""
    made: dict[str, Reference] = {}

    def get(model: str) -> Reference:
        if model not in made:
            made[model] = Reference(tmp_path_factory.mktemp("one_rank"), model)
        return made[model]

    return get


@pytest.mark.parametrize("layout", [pytest.param(name, marks=_marks(name)) for name in LAYOUTS])
def test_layout_equals_the_one_rank_run(layout, reference, tmp_path):
    nproc, model, flags = LAYOUTS[layout]
    one_rank = reference(model)
    run = one_rank.train(tmp_path, nproc, flags)
    assert len(run.losses) == 4
    assert run.losses == pytest.approx(one_rank.run.losses, rel=2e-6)
    assert run.grad_norms == pytest.approx(one_rank.run.grad_norms, abs=2e-3)


def test_bf16_tensor_parallel_follows_the_fp32_run(reference, tmp_path):
    one_rank = reference(MODEL)
    run = one_rank.train(tmp_path, 2, "--bf16 --tensor-model-parallel-size 2")
    assert run.losses == pytest.approx(one_rank.run.losses, rel=1e-2)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8"])
def test_fp8_follows_the_fp32_run(recipe, reference, tmp_path):
    one_rank = reference(MODEL.replace("--ffn-hidden-size 176", "--ffn-hidden-size 192"))
    flags = f"--bf16 --tensor-model-parallel-size 2 --fp8-format hybrid --fp8-recipe {recipe}"
    run = one_rank.train(tmp_path, 2, flags)
    assert run.losses == pytest.approx(one_rank.run.losses, rel=1e-2)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--fp8-format e4m3 --fp8-param-gather --use-distributed-optimizer", "not emulated"),
        ("--fp4-format e2m1", "--fp4-format"),
    ],
)
def test_fp8_modes_without_emulation_are_refused(flags, text, tmp_path):
    with pytest.raises(AssertionError, match=text):
        pretrain(tmp_path, 1, *MODEL.split(), *TRAINING.split(), "--bf16", *flags.split())


def test_the_comparison_can_fail_another_seed_gives_other_losses(reference, tmp_path):
    one_rank = reference(MODEL)
    run = one_rank.train(tmp_path, 1, "--seed 4321")
    assert run.losses != pytest.approx(one_rank.run.losses, rel=2e-6)


@brought_by("0.16")  # before it, ranks share the rows of a gate and its values as one matrix
def test_tensor_parallel_ranks_shard_the_master_weights_of_one_rank(tmp_path):
    flags = f"{MODEL} {TRAINING} --use-cpu-initialization".split()
    one_rank = pretrain(tmp_path, 1, *flags)
    run = pretrain(tmp_path, 2, *flags, "--tensor-model-parallel-size", "2")
    assert run.losses == pytest.approx(one_rank.losses, rel=2e-6)
