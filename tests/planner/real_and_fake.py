"""One step of a job counted twice: on real ranks that communicate, and on FakeTensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.support.trainer_job import command

SETUP = "tests.support.warm"
ATTEMPTS = 3
"""A thread of gloo may hold a tensor of a collective a little longer than its ``wait``, on a busy
machine until after the peak: real ranks are measured again where the peak alone is larger."""
SMALL = "--num-layers 2 --seq-length 32 --train-iters 3"


def _args(given: str, world: int, *more: str) -> Any:
    from mindspeed.training.initialize import prepare

    flags = command([*more, *SMALL.split(), *given.split()])
    if "--multi-latent-attention" in flags:  # it has no groups of queries
        index = flags.index("--num-query-groups")
        del flags[index : index + 2]
    return prepare(flags, world).args


def real(flags: str) -> dict[str, Any]:
    """Figures of this rank of a job that runs."""
    import torch.distributed as dist

    from mindspeed.planner.counted_step import count_here
    from mindspeed.training import setup

    args = _args(flags, int(os.environ["WORLD_SIZE"]))
    args.check_for_nan_in_loss_and_grad = False
    setup.initialize(args)
    dist.send_object_list = _unseen(dist.send_object_list)
    dist.recv_object_list = _unseen(dist.recv_object_list)
    return figures(count_here(args, int(os.environ["RANK"])))


def _unseen(exchange: Any) -> Any:
    """Messages of pickled objects, which have no size before they exist: losses for the log."""
    from torch.utils._python_dispatch import _disable_current_modes

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return exchange(*args, **kwargs)

    return run


def fake(flags: str, world: int, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Figures of some ranks of a job of which nothing runs."""
    from mindspeed.planner.counted_step import count_step

    args = _args(flags, world, "--dry-run")
    return [figures(count_step(args, rank)) for rank in ranks]


def figures(step: Any) -> dict[str, Any]:
    """What must be equal: bytes, FLOPs, and communications by kind, group and phase."""
    sent: Counter[Any] = Counter()
    for one in step.communications:
        if one.op != "barrier" and len(one.ranks) > 1:
            key = one.op, one.description, one.ranks, one.phase
            sent.update({(*key, "calls"): 1, (*key, "payload"): one.payload})
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


def compare(pool: Any, world: int, flags: str, chosen: Sequence[int]) -> dict[str, Any]:
    """Differences between the real and the fake run of some ranks.

    Args:
        pool: runs functions on ranks (fixture ``ranks``).
        world: ranks of the job.
        flags: added to the tiny model's.
        chosen: ranks that are counted.
    """
    (counted,) = pool(1, fake, flags, world, list(chosen), setup=SETUP, backend=None, timeout=240)
    for _ in range(ATTEMPTS):
        measured = pool(world, real, flags, setup=SETUP, backend=None, timeout=240)
        assert any(n for key, n in measured[0]["communication"].items() if key[-1] == "payload")
        found = {}
        for rank, one in zip(chosen, counted, strict=True):
            found |= {f"rank {rank}: {k}": v for k, v in differences(measured[rank], one).items()}
        if not found or not all("peak" in name for name in found):
            break
    return found
