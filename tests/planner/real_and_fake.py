"""One step of a job counted twice: on real ranks that communicate, and on FakeTensors.

Experts are routed by the balanced rule, on real ranks as on FakeTensors.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.support.trainer_job import command

SETUP = "tests.support.warm"
SMALL = "--num-layers 2 --seq-length 32 --train-iters 3"
EXPERTS = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
    --num-query-groups=4 --seq-length 32 --vocab-size 120 --train-iters 20 --bf16
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2 --micro-batch-size 1 --global-batch-size 8
    --moe-token-dispatcher-type alltoall --moe-grouped-gemm --transformer-impl transformer_engine
"""
"""The base of jobs whose flags name the size of expert parallelism."""


def _args(given: str, world: int, *more: str) -> Any:
    """Final values of :func:`words_of`."""
    from mindspeed.training.initialize import prepare

    return prepare(words_of(given, *more), world).args


def words_of(given: str, *more: str) -> list[str]:
    """The flags of the tiny model and ``given``; ``~--flag`` takes one of its switches away."""
    words = given.split()
    base = EXPERTS if "--expert-model-parallel-size" in words else SMALL
    flags = command([*more, *base.split(), *(x for x in words if not x.startswith("~"))])
    for word in words:
        if word.startswith("~"):
            flags.remove(word[1:])
    if "--multi-latent-attention" in flags:  # it has no groups of queries
        flags = [word for word in flags if not word.startswith("--num-query-groups=")]
    return flags


def real(flags: str, chosen: Sequence[int], imbalance: float) -> dict[str, Any] | None:
    """Figures of this rank of a job that runs; None on ranks that are not counted."""
    import torch.distributed as dist

    from mindspeed.journal import Journal
    from mindspeed.planner.count.balanced_routing import balanced_routing
    from mindspeed.planner.count.counted_step import count_here
    from mindspeed.planner.count.fake_world import keep_meshes_real
    from mindspeed.training import setup
    from tests.planner.unheld import Unheld

    rank = int(os.environ["RANK"])
    args = _args(flags, int(os.environ["WORLD_SIZE"]))
    args.check_for_nan_in_loss_and_grad = False
    setup.initialize(args)
    dist.send_object_list = _unseen(dist.send_object_list)
    dist.recv_object_list = _unseen(dist.recv_object_list)
    if args.use_megatron_fsdp:  # on the host, whatever the device
        keep_meshes_real(Journal())
    with balanced_routing(args, imbalance):
        if rank not in chosen:
            return _run(args)
        with Unheld():
            return figures(count_here(args, rank))


def _run(args: Any) -> None:
    """As many steps as :func:`count_here` runs, without instruments."""
    from mindspeed.instruments.live_memory import LiveMemory
    from mindspeed.planner.count.loop import StepOfRank

    step = StepOfRank(args, LiveMemory())
    step.run()
    step.run()


def _unseen(exchange: Any) -> Any:
    """Messages of pickled objects, which have no size before they exist: losses for the log."""
    from torch.utils._python_dispatch import _disable_current_modes

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return exchange(*args, **kwargs)

    return run


def fake(flags: str, world: int, ranks: Sequence[int], imbalance: float) -> list[dict[str, Any]]:
    """Figures of some ranks of a job of which nothing runs."""
    from mindspeed.planner.count.counted_step import count_step
    from mindspeed.planner.expert_loads import ExpertLoads

    args = _args(flags, world, "--dry-run")
    args.expert_loads = ExpertLoads(imbalance)
    return [figures(count_step(args, rank)) for rank in ranks]


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
        "host": step.host,
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
    pool: Any,
    world: int,
    flags: str,
    chosen: Sequence[int],
    imbalance: float = 1.0,
    ranks_per_node: int | None = None,
) -> dict[str, Any]:
    """Differences between the real and the fake run of some ranks.

    Args:
        pool: runs functions on ranks (fixture ``ranks``).
        world: ranks of the job.
        flags: added to the tiny model's.
        chosen: ranks that are counted.
        imbalance: of the routing.
        ranks_per_node: what the launcher says; default: all.
    """
    env = {"LOCAL_WORLD_SIZE": str(ranks_per_node or world)}
    options: dict[str, Any] = {"setup": SETUP, "backend": None, "timeout": 240, "env": env}
    (counted,) = pool(1, fake, flags, world, list(chosen), imbalance, **options)
    measured = pool(world, real, flags, list(chosen), imbalance, **options)
    first = measured[chosen[0]]
    assert any(n for key, n in first["communication"].items() if key[-1] == "payload")
    found = {}
    for rank, one in zip(chosen, counted, strict=True):
        found |= {f"rank {rank}: {k}": v for k, v in differences(measured[rank], one).items()}
    return found
