"""Jobs for the ranks of ``test_fsdp``: run the example of docs/attention-plans.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

PAGE = Path(__file__).resolve().parents[2] / "docs" / "attention-plans.md"
BORDERS = (0, 100, 130, 256)


def example() -> dict[str, Any]:
    """The names that the block below ``<!-- example -->`` defines."""
    found = re.search(r"^<!-- example -->\n+```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    assert found is not None
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(found.group(1), str(PAGE), "exec"), names)
    return names


def step(sharded: bool) -> tuple[float, dict[str, Any]]:
    """Mean loss of all ranks, and the whole gradients."""
    names = example()
    torch.manual_seed(1)
    model = names["Model"]().double()
    if sharded:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    tokens = torch.randint(64, (257,), generator=torch.Generator().manual_seed(0))
    loss = names["train_step"](model, tokens[:-1], tokens[1:], BORDERS)
    dist.all_reduce(loss)
    grads = {name: p.grad.full_tensor() if sharded else p.grad for name, p in
             model.named_parameters()}  # fmt: skip
    return float(loss) / dist.get_world_size(), {name: x.tolist() for name, x in grads.items()}


def main() -> None:
    """The example as it is printed."""
    names = example()
    names["dist"] = type("Joined", (), {**vars(dist), "init_process_group": lambda: None})
    names["main"]()
