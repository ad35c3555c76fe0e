"""Jobs and layouts in which faults are planted, and the random choice among them."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

TP2 = "--tensor-model-parallel-size 2"
SP2 = f"{TP2} --sequence-parallel"
_RING = "--context-parallel-algo megatron_cp_algo"
_HYBRID = "--context-parallel-algo hybrid_cp_algo --ulysses-degree-in-cp 2"
_ALL_GATHER = "--context-parallel-algo kvallgather_cp_algo"
_ZERO = "--use-distributed-optimizer"
_OVERLAP = f"{_ZERO} --overlap-grad-reduce --overlap-param-gather"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective"


@dataclass(frozen=True)
class Layout:
    """Sizes of a job, and what else does not change its numbers.

    Attributes:
        ranks: Of the job.
        flags: Of the layout.
        tags: What it has: ``tp``, ``sp``, ``cp``, ``ring``, ``pp``, ``vpp``, ``dp``, ``dp4``,
            ``zero``, ``ep``, ``etp``.
    """

    ranks: int
    flags: str
    tags: frozenset[str]


def layout(
    ranks: int, *, tp: int = 1, sp: bool = False, cp: int = 1, algo: str = "", pp: int = 1,
    vpp: bool = False, zero: str = "", ep: int = 1, etp: int = 0, more: str = "",
) -> Layout:  # fmt: skip
    """A layout by its sizes."""
    flags = [
        f"--tensor-model-parallel-size {tp}" * (tp > 1),
        "--sequence-parallel" * sp,
        f"--context-parallel-size {cp} {algo}" * (cp > 1),
        f"--pipeline-model-parallel-size {pp}" * (pp > 1),
        "--num-layers-per-virtual-pipeline-stage 1" * vpp,
        f"--expert-model-parallel-size {ep}" * (ep > 1),
        f"--expert-tensor-parallel-size {etp}" * (etp > 0),
        zero,
        more,
    ]
    have = {
        "tp": tp > 1, "sp": sp, "cp": cp > 1, "ring": algo == _RING, "pp": pp > 1, "vpp": vpp,
        "dp": ranks > tp * cp * pp, "dp4": ranks == 4 * tp * cp * pp, "zero": bool(zero),
        "ep": ep > 1, "etp": etp > 1, "etp1": etp == 1 and tp > 1, "reduced": ranks > tp * pp,
    }  # fmt: skip
    return Layout(ranks, " ".join(filter(None, flags)), frozenset(k for k, v in have.items() if v))


DENSE = (
    layout(2, tp=2),
    layout(2, tp=2, sp=True),
    layout(2, pp=2),
    layout(2, pp=2, vpp=True),
    layout(2, cp=2),
    layout(2, cp=2, algo=_RING),
    layout(2),
    layout(2, zero=_ZERO),
    layout(2, zero=_OVERLAP),
    layout(4, tp=4, sp=True),
    layout(4, tp=4),
    layout(4, cp=4, algo=_RING),
    layout(4, cp=4, algo=_HYBRID),
    layout(4, cp=4, algo=_ALL_GATHER),
    layout(4, pp=4),
    layout(4, zero=_ZERO),
    layout(4, tp=2, sp=True, pp=2),
    layout(4, tp=2, sp=True, pp=2, vpp=True),
    layout(4, tp=2, sp=True, cp=2, algo=_RING),
    layout(4, tp=2, cp=2),
    layout(4, tp=2, sp=True, zero=_OVERLAP),
    layout(4, cp=2, algo=_RING, pp=2),
    layout(4, cp=2, zero=_ZERO),
    layout(4, pp=2, vpp=True, zero=_ZERO),
)
EXPERTS = (
    layout(2, ep=2),
    layout(2, ep=2, zero=_ZERO),
    layout(2, tp=2, sp=True, ep=2, etp=1),
    layout(2, tp=2, sp=True, etp=1),
    layout(2, tp=2, sp=True, etp=2),
    layout(2, cp=2, algo=_RING, ep=2),
    layout(4, ep=4),
    layout(4, tp=4, sp=True, ep=4, etp=1),
    layout(4, tp=2, sp=True, ep=2, etp=2),
    layout(4, tp=2, sp=True, ep=2, etp=1, zero=_ZERO),
    layout(4, ep=2, pp=2),
    layout(4, ep=2, pp=2, vpp=True),
    layout(4, cp=2, ep=4),
)
_EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-ffn-hidden-size 64 "
    "--moe-token-dispatcher-type alltoall --moe-layer-freq [0,1,0,1] "
    "--moe-shared-expert-intermediate-size 64 --moe-aux-loss-coeff 0.01 "
    "--qk-layernorm --transformer-impl transformer_engine"
)
_LATENT = (
    "@latent --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 16 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16 --rope-type rope --qk-layernorm"
)
_PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss --calculate-per-token-loss"


@dataclass(frozen=True)
class Job:
    """A model and its data.

    Attributes:
        flags: Of every run.
        layouts: In which faults are planted.
        recorded: Flags of runs that record.
        trusted: Flags of the trusted run only.
    """

    flags: str
    layouts: tuple[Layout, ...]
    recorded: str = ""
    trusted: str = ""


_CONTEXT = tuple(one for one in DENSE if one.tags <= {"tp", "sp", "cp", "ring", "dp", "reduced"})
JOBS = {
    "dense": Job("", DENSE),
    "tokens": Job("--calculate-per-token-loss", DENSE),
    "tied": Job("@tied", tuple(one for one in DENSE if "pp" in one.tags)),
    "two steps": Job("", DENSE, "--record-steps 0,1 --train-iters 2"),
    "decay": Job("--weight-decay 0.3 --clip-grad 0.05", DENSE),
    "experts": Job(_EXPERTS, EXPERTS),
    "experts, tokens": Job(f"{_EXPERTS} --calculate-per-token-loss", EXPERTS),
    "latent": Job(_LATENT, tuple(one for one in DENSE if "cp" not in one.tags)),
    "documents": Job(_PACKED, _CONTEXT),
    "ahead": Job("--mtp-num-layers 1 --transformer-impl transformer_engine", DENSE),
    "dropout": Job("--hidden-dropout 0.1", (layout(1, more=RECOMPUTED),), trusted=RECOMPUTED),
}


def chosen(
    key: str, job: str, needs: Collection[str], seeds: int = 3, most: int = 4
) -> tuple[Layout, int]:
    """A layout at random that has what a fault needs, and the seed of its weights and data.

    Args:
        key: Decides; equal ones choose equally.
        job: Of :data:`JOBS`.
        needs: Tags; one that begins with ``-`` must not be there.
        seeds: How many of them there are.
        most: Ranks that it may have.
    """
    numbers = random.Random(key)
    fit = [one for one in JOBS[job].layouts if one.ranks <= most and _fits(one.tags, needs)]
    found = numbers.choice(fit)
    extra = "" if found.ranks == 1 else numbers.choice(("", "", RECOMPUTED, SELECTIVE))
    flags = f"{found.flags} {extra}".strip()
    return Layout(found.ranks, flags, found.tags), 1234 + numbers.randrange(seeds)


def _fits(tags: Collection[str], needs: Collection[str]) -> bool:
    """Whether a layout has all tags, one of ``a|b``, and none after ``-``."""
    return all(
        need[1:] not in tags
        if need.startswith("-")
        else any(one in tags for one in need.split("|"))
        for need in needs
    )
