"""States of the distributed optimizer in files, through Gloo and through staged groups."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.instruments import CommLedger
from tests.optimizer.optimizer_ranks import Case, Outcome, job

FILE = "distrib_optim.pt"


def case(slice_size: int | None) -> Case:
    """A run with Gloo groups, or with slices of so many elements."""
    flags: dict[str, Any] = {}
    if slice_size is not None:
        flags = {"disable_gloo_group": True, "hccl_slice_size": slice_size}
    return Case(flags=flags, distributed=True)


def saved_and_loaded(folder: str, slice_size: int) -> dict[str, Any]:
    """Files of both runs, and what resuming from the staged one gives."""
    found: dict[str, Any] = {}
    for name, size in {"gloo": None, "staged": slice_size}.items():
        with job(case(size)) as one:
            for number in range(2):
                one.step(number, Outcome())
            part = one.optimizer.chained_optimizers[0]
            shards = [
                bucket.grad_data.numel() // dist.get_world_size()
                for buffer in part.buffers
                for bucket in buffer.buckets
            ]
            with CommLedger() as ledger:
                one.save(Path(folder) / name, "torch")
            inner = part.data_parallel_group
            found[name] = {
                "gather": ledger.calls("gather", group=inner),
                "shards": shards,
                "group": type(part.data_parallel_group_gloo).__name__,
            }
            truth = Outcome()
            one.step(2, truth)
            found[name]["digest"] = truth.digests[0]
    dist.barrier()
    for name, size in {"gloo": None, "staged": slice_size}.items():
        with job(case(size)) as one:  # each reads the file of the other
            other = {"gloo": "staged", "staged": "gloo"}[name]
            one.step(5, Outcome())
            one.load(Path(folder) / other, "torch")
            resumed = Outcome()
            one.step(2, resumed)
            found[name]["resumed"] = resumed.digests[0]
    return found


def clamped() -> list[str]:
    """Warnings about a slice that is larger than any shard, and the size in use."""
    records: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logging.getLogger("mindspeed").addHandler(Handler(logging.WARNING))
    with job(case(10**9)) as one:
        part = one.optimizer.chained_optimizers[0]
        largest = max(b.grad_data.numel() for buffer in part.buffers for b in buffer.buckets)
        group = part.data_parallel_group_gloo
        assert group.slice_size == largest // dist.get_world_size()
    return records


def groups_of_a_job(flags: list[str]) -> dict[str, Any]:
    """Trains with our trainer; descriptions and backends of the groups that were created."""
    from tests.support import trainer_job

    made: list[tuple[str, str]] = []

    def watch() -> None:
        new_group = dist.new_group

        def watched(*args: Any, **kwargs: Any) -> Any:
            made.append((str(kwargs.get("backend")), kwargs.get("group_desc") or ""))
            return new_group(*args, **kwargs)

        dist.new_group = watched

    result = trainer_job.train(flags, watch)
    return {**result, "groups": made}


def states(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file of states, by name."""
    state = torch.load(path, weights_only=False)
    found = {}
    for index, dtypes in state.items():
        if isinstance(index, int):
            for tensors in dtypes.values():
                found |= {f"{index} {k}": v for k, v in tensors.items() if torch.is_tensor(v)}
    return found
