"""Valid small jobs, drawn by chance from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

BASE = (
    "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 200 --transformer-impl transformer_engine"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --disable-bias-linear"
)
STYLES = (
    "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 "
    "--disable-bias-linear --position-embedding-type rope",
    "--untie-embeddings-and-output-weights",
    "--attention-dropout 0.1 --hidden-dropout 0.1",
)
AGAIN = (
    "--recompute-granularity selective",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
    "--recompute-norm --recompute-activation-function",
)
SHARED = (
    "",
    "--use-distributed-optimizer",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
)


@dataclass(frozen=True)
class Drawn:
    """A job.

    Attributes:
        flags: its flags.
        devices: its ranks.
        stage: a pipeline rank.
    """

    flags: str
    devices: int
    stage: int


def draw(seed: int) -> Drawn:
    """The job of a seed."""
    chance = random.Random(seed)
    pp, tp, cp = chance.choice((1, 1, 2, 4, 6)), chance.choice((1, 2)), chance.choice((1, 1, 2))
    dp, mbs = chance.choice((1, 2, 3)), chance.choice((1, 2))
    layers, count = chance.randint(3, 7), chance.randint(1, 5) + 2 * pp
    flags = [BASE, chance.choice(("", "--bf16", "--bf16", "--fp16")), chance.choice(SHARED)]
    flags += [chance.choice(("", *STYLES)), chance.choice(("", "", *AGAIN))]
    if tp > 1:
        flags.append("--sequence-parallel")
    experts = cp == 1 and "--fp16" not in flags and chance.random() < 0.3
    if experts:
        flags.append(EXPERTS)
        flags.append(f"--expert-model-parallel-size {chance.choice((1, dp if dp < 3 else 1))}")
        flags.append(chance.choice(("", f"--moe-layer-freq ([0]*2+[1]*{layers * pp - 2})")))
    if pp > 1:
        many = chance.choice(("", "", "interleaved", "zb-h1"))
        if many == "interleaved" and pp < 6:
            layers, count = 2 * chance.randint(1, 3), pp * (count // pp)
            flags.append("--num-virtual-stages-per-pipeline-rank 2")
            flags = [one for one in flags if not one.startswith("--moe-layer-freq")]
        elif many == "zb-h1" and not experts and not any("full" in one for one in flags):
            flags.append("--pipeline-schedule zb-h1")
    flags.append(f"--micro-batch-size {mbs} --global-batch-size {count * mbs * dp}")
    flags.append(f"--num-layers {layers * pp} --pipeline-model-parallel-size {pp}")
    flags.append(f"--tensor-model-parallel-size {tp} --context-parallel-size {cp}")
    return Drawn(" ".join(filter(None, flags)), pp * tp * cp * dp, chance.randrange(pp))
