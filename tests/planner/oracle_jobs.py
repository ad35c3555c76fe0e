"""Jobs of 4 and 8 ranks of all areas, whose bytes on real ranks are those of the planner.

LISTED["experts: alltoall"]         # those that are listed, by area and name
draw(7, attempt=0)                  # one that is drawn by chance; another attempt if refused
"""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.planner import (
    test_counts,
    test_counts_context,
    test_counts_experts,
    test_counts_pairs,
    test_counts_pipeline,
)


class Job(NamedTuple):
    """A job.

    Attributes:
        world: its ranks.
        flags: added to those of the tiny model.
        imbalance: load of the first expert-parallel rank over the mean.
        ranks_per_node: what the launcher says; None: all.
    """

    world: int
    flags: str
    imbalance: float = 1.0
    ranks_per_node: int | None = None


_PP4 = "--pipeline-model-parallel-size 4 --bf16 "
_PP2 = "--pipeline-model-parallel-size 2 --bf16 "
_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --bf16 "
_TE = "--transformer-impl transformer_engine "
_DIST = "--use-distributed-optimizer "
_OVERLAP = _DIST + "--overlap-grad-reduce --overlap-param-gather "
_FULL = "--recompute-granularity full --recompute-method "
_SELECTIVE = "--recompute-granularity selective --recompute-modules "
_ODD = "--hidden-size 80 --num-attention-heads 8 --ffn-hidden-size 100 --vocab-size 997 "
_MLA = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 4 --v-head-dim 12 "
)
_LORA = "--dry-run --lora-r 4 --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2 "
_CHUNKS = "--num-layers-per-virtual-pipeline-stage "
_SWAPS = "--swap-attention --swap-min-bytes 1024 "
_SCHEDULE = "--pipeline-schedule "
AREAS = {
    "1F1B": {
        "deep": Job(4, "--num-layers 12 --global-batch-size 24 " + _PP4),
        "eight stages": Job(8, "--num-layers 8 --global-batch-size 20 " + _PP4.replace("4", "8")),
        "uneven": Job(4, _PP4 + "--num-layers 8 --num-layer-list 1,3,2,2 --global-batch-size 12"),
        "divided states": Job(8, _PP2 + _TP2 + "--num-layers 4 --global-batch-size 16 " + _OVERLAP),
    },
    "interleaved": {
        "four stages": Job(4, f"--num-layers 16 --global-batch-size 16 {_PP4}{_CHUNKS}2"),
        "eight ranks": Job(8, f"--num-layers 8 --global-batch-size 16 {_PP4}{_TP2}{_CHUNKS}1"),
        "three chunks": Job(4, f"--num-layers 6 --global-batch-size 16 {_PP2}{_CHUNKS}1"),
        "overlapped": Job(
            4, f"--num-layers 8 --global-batch-size 16 {_PP2}{_CHUNKS}1 {_OVERLAP}"
        ),
    },
    "other schedules": {
        "zb-h1": Job(4, f"--num-layers 8 --global-batch-size 16 {_PP4}{_SCHEDULE}zb-h1"),
        "zb-v": Job(4, f"--num-layers 8 --global-batch-size 16 {_PP4}{_SCHEDULE}zb-v"),
        "v-half": Job(4, f"--num-layers 8 --global-batch-size 16 {_PP4}{_SCHEDULE}v-half"),
        "zb-wave": Job(
            4, f"--num-layers 8 --global-batch-size 8 {_PP2}{_CHUNKS}1 {_SCHEDULE}zb-wave"
        ),
        "nanopipe": Job(
            4, f"--num-layers 8 --global-batch-size 16 {_PP4}{_CHUNKS}1 --use-nanopipe"
        ),
        "dualpipev": Job(
            8,
            "--num-layers 8 --global-batch-size 32 --schedules-method dualpipev "
            + _PP4
            + "--tensor-model-parallel-size 2 --sequence-parallel",
        ),
    },
    "recomputed": {
        "groups": Job(4, f"--num-layers 5 --bf16 {_FULL}uniform --recompute-num-layers 2"),
        "first layers": Job(4, f"--num-layers 5 {_TP2}{_FULL}block --recompute-num-layers 2"),
        "core attention": Job(4, _TP2 + _TE + _SELECTIVE + "core_attn"),
        "norms": Job(4, _TP2 + _TE + _SELECTIVE + "layernorm"),
        "whole feed forward": Job(4, _PP2 + _TE + _SELECTIVE + "mlp"),
        "stages": Job(
            8, f"--num-layers 8 --global-batch-size 16 {_PP4}{_TP2}{_FULL}uniform "
            "--recompute-num-layers 1",
        ),
    },
    "paddings": {
        "eight replicas": Job(8, "--bf16 --global-batch-size 32 " + _ODD + _OVERLAP),
        "small buckets": Job(
            8, "--bf16 --micro-batch-size 1 --ddp-bucket-size 20000 " + _ODD + _OVERLAP
        ),
        "fp32, four": Job(4, _ODD + _DIST),
        "stages": Job(8, _PP2 + _ODD + _DIST + "--num-layers 4"),
    },
    "on the host": {
        "activations": Job(4, _TP2 + _TE + _SWAPS + "--num-layers 4"),
        "activations and states": Job(4, _TP2 + _TE + _OVERLAP + _SWAPS + "--swap-optimizer"),
    },
    "fp8": {
        "tensorwise": Job(4, _TP2 + _TE + "--ffn-hidden-size 192 --fp8-format hybrid "
                          "--fp8-recipe tensorwise " + _DIST),
        "delayed, stages": Job(4, _PP2 + _TE + "--ffn-hidden-size 192 --fp8-format hybrid "
                               "--fp8-recipe delayed"),
    },
    "more tokens": {
        "one stage": Job(4, _TP2 + _DIST + "--mtp-num-layers 1"),
        "stages": Job(8, _PP2 + _TP2 + "--num-layers 4 --mtp-num-layers 1 --global-batch-size 16"),
    },
    "latent attention": {
        "experts": Job(4, "--expert-model-parallel-size 2 " + _MLA + _DIST),
        "recomputed": Job(4, _TP2 + _MLA + _FULL + "uniform --recompute-num-layers 1"),
    },
    "adapters": {
        "divided": Job(4, _TP2 + _TE + _LORA),
        "stages, recomputed": Job(
            4, _PP2 + _LORA + "--num-layers 4 " + _FULL + "uniform --recompute-num-layers 1"
        ),
    },
}  # fmt: skip
"""Area -> name -> job."""
_COUNTED = {
    "dense": test_counts,
    "context": test_counts_context,
    "experts": test_counts_experts,
    "pairs": test_counts_pairs,
    "schedules": test_counts_pipeline,
}
"""Area -> module whose cases have other figures compared as well."""


LISTED = {f"{area}: {name}": job for area, jobs in AREAS.items() for name, job in jobs.items()}
LISTED |= {
    f"{area}: {name}": Job(*case[:2], *case[3:])
    for area, module in _COUNTED.items()
    for name, case in module.CASES.items()
}
SEEDS = range(54)
"""Seeds of the jobs that are drawn."""

_EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall " + (
    "--moe-grouped-gemm --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
)
_STYLES = (
    *("", "", "", "~--swiglu", "~--untie-embeddings-and-output-weights", _MLA, _ODD, _LORA),
    *("--attention-dropout 0.1 --hidden-dropout 0.1", "--mtp-num-layers 1"),
    *("--add-qkv-bias --qk-layernorm", "--normalization LayerNorm"),
)  # fmt: skip
_AGAIN = (
    *("", "", "", "", _SELECTIVE + "core_attn", "--recompute-norm --recompute-activation-function"),
    *(_FULL + "uniform --recompute-num-layers 1", _FULL + "uniform --recompute-num-layers 2"),
    *(_FULL + "block --recompute-num-layers 1", _SELECTIVE + "layernorm core_attn"),
)
_STATES = (
    *("", "", _DIST, _DIST, _OVERLAP, _OVERLAP + "--ddp-bucket-size 20000"),
    *(_DIST + "--reuse-fp32-param", _DIST + "--grad-reduce-in-bf16", "--zero-stage 2"),
    *("--zero-stage 3", _OVERLAP + "--swap-optimizer", "--accumulate-allreduce-grads-in-fp32"),
)
_CONTEXT = ("megatron_cp_algo", "ulysses_cp_algo", "kvallgather_cp_algo")
_ONE, _TWO = ("", "zb-h1"), ("interleaved", "zb-v", "dualpipev", "nanopipe")
"""Schedules of stages of one and of two chunks."""


def draw(seed: int, attempt: int = 0) -> Job:
    """The job of a seed; flags may contradict each other, which the next attempt does not."""
    chance = random.Random(1000 * seed + attempt)
    world = chance.choice((4, 4, 4, 8))
    pp = chance.choice((1, 2, 2, 4))
    tp = chance.choice([x for x in (1, 2) if world // pp % x == 0])
    cp = chance.choice([x for x in (1, 1, 2) if world // pp // tp % x == 0])
    dp = world // (pp * tp * cp)
    precision = chance.choice(("", "--bf16", "--bf16", "--bf16", "--fp16 --loss-scale 1024"))
    flags = [precision, chance.choice(("", _TE)), *map(chance.choice, (_STYLES, _AGAIN, _STATES))]
    if tp > 1:
        flags.append(chance.choice(("", "--sequence-parallel")))
    if cp > 1:
        flags.append(f"--use-flash-attn --context-parallel-algo {chance.choice(_CONTEXT)}")
    if chance.random() < 0.3:
        flags.append(f"{_EXPERTS}--moe-ffn-hidden-size {chance.choice((32, 48))} {_TE}")
        flags.append(f"--expert-model-parallel-size {chance.choice((1, dp))}")
        flags = [one.replace(" linear_fc", " experts.linear_fc") for one in flags]
    if chance.random() < 0.1:
        flags.append(_SWAPS)
    layers, count = pp * chance.randint(1, 3), chance.randint(1, 4) + pp
    if pp > 1:
        schedule = chance.choice(("", "", *_ONE, *_TWO))
        if schedule in _TWO:
            layers, count = 2 * pp * chance.randint(1, 2), pp * chance.randint(2, 3)
        flags.append(_FLAGS_OF.get(schedule, f"{_SCHEDULE}{schedule}").format(layers // pp // 2))
    batch = chance.choice((1, 2))
    flags.append(f"--num-layers {layers} --pipeline-model-parallel-size {pp}")
    flags.append(f"--tensor-model-parallel-size {tp} --context-parallel-size {cp}")
    flags.append(f"--micro-batch-size {batch} --global-batch-size {count * batch * dp}")
    return Job(world, " ".join(filter(None, (one.strip() for one in flags))))


_FLAGS_OF = {
    "": "",
    "interleaved": _CHUNKS + "{}",
    "nanopipe": _CHUNKS + "{} --use-nanopipe",
    "dualpipev": "--schedules-method dualpipev",
}
