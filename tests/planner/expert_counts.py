"""A step with experts counted on real ranks that route by the balanced rule, and on FakeTensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.support.trainer_job import command

SETUP = "tests.support.warm"
SMALL = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
    --num-query-groups 4 --seq-length 32 --vocab-size 120 --train-iters 3
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2 --micro-batch-size 1 --global-batch-size 8
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --transformer-impl transformer_engine
"""


def _args(flags: str, world: int, *more: str) -> Any:
    from mindspeed.training.initialize import prepare

    return prepare(command([*more, *SMALL.split(), *flags.split()]), world).args


def real(flags: str, imbalance: float) -> dict[str, Any]:
    """Figures of this rank of a job that runs."""
    from mindspeed.planner.balanced_routing import balanced_routing
    from mindspeed.planner.counted_step import count_here
    from mindspeed.training import setup

    args = _args(flags, int(os.environ["WORLD_SIZE"]))
    args.check_for_nan_in_loss_and_grad = False
    setup.initialize(args)
    with balanced_routing(args, imbalance):
        return figures(count_here(args, int(os.environ["RANK"])))


def fake(flags: str, world: int, ranks: Sequence[int], imbalance: float) -> list[dict[str, Any]]:
    """Figures of some ranks of a job of which nothing runs."""
    from mindspeed.planner.counted_step import count_step

    args = _args(flags, world, "--dry-run")
    return [figures(count_step(args, rank, imbalance=imbalance)) for rank in ranks]


def figures(step: Any) -> dict[str, Any]:
    """What must be equal: bytes, FLOPs, and communications by kind, group and phase."""
    sent: Counter[Any] = Counter()
    for one in step.communications:
        if one.op != "barrier" and len(one.ranks) > 1:
            key = one.op, one.description, one.ranks, one.phase
            sent.update({(*key, "calls"): 1, (*key, "payload"): one.payload})
            sent.update({(*key, "wire"): one.wire})
    return {
        "micro-batches": step.micro_batches,
        "parameters": step.parameters,
        "static": dict(step.static),
        "peak": step.peak,
        "at peak": dict(step.at_peak),
        "FLOPs": step.flops,
        "communication": dict(sent),
    }


def differences(real: dict[str, Any], fake: dict[str, Any]) -> dict[str, Any]:
    """Figures that are not equal: name -> (real, fake)."""
    found: dict[str, Any] = {}
    for name in real:
        one, other = (x[name] if isinstance(x[name], dict) else {"": x[name]} for x in (real, fake))
        for key in one.keys() | other.keys():
            if one.get(key) != other.get(key):
                found[f"{name} {key}"] = one.get(key), other.get(key)
    return found


def compare(
    pool: Any, world: int, flags: str, chosen: Sequence[int], imbalance: float = 1.0
) -> dict[str, Any]:
    """Differences between the real and the fake run of some ranks.

    Args:
        pool: runs functions on ranks (fixture ``ranks``).
        world: ranks of the job.
        flags: added to the tiny model's.
        chosen: ranks that are counted.
        imbalance: of the routing.
    """
    options = {"setup": SETUP, "backend": None, "timeout": 240}
    measured = pool(world, real, flags, imbalance, **options)
    (counted,) = pool(1, fake, flags, world, list(chosen), imbalance, **options)
    assert any(value for key, value in measured[0]["communication"].items() if key[-1] == "payload")
    found = {}
    for rank, one in zip(chosen, counted, strict=True):
        found |= {f"rank {rank}: {k}": v for k, v in differences(measured[rank], one).items()}
    return found
