"""Routing of Megatron's routers, recorded: the last micro-batches of a training.

Every rank keeps counts and the experts of some tokens on the device, and writes them when the
training ends (:mod:`mindspeed.moe.load.routing`). Ranks do not communicate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mindspeed.moe.load.hook import on_routing
from mindspeed.moe.load.routing import LayerRouting, write

MICRO_BATCHES, TOKENS = 16, 64
"""Micro-batches that are kept, and tokens of each whose experts are."""

_Kept = tuple[torch.Tensor, torch.Tensor]  # rows [experts], experts of tokens [tokens, topk]


class RoutingRecorder:
    """Records the routers of this rank.

    Args:
        folder: gets the file of this rank.
        experts: of a layer.
        topk: experts of a token.
        tokens: of a micro-batch whose experts are kept.
    """

    def __init__(self, folder: Path, experts: int, topk: int, tokens: int = TOKENS) -> None:
        self._folder, self._experts, self._topk, self._tokens = folder, experts, topk, tokens
        self._layers: list[tuple[Any, deque[_Kept]]] = []

    def chunk(self, model: torch.nn.Module, config: Any, vp_stage: int | None) -> None:
        """Record the routers of a model chunk."""
        from megatron.core.transformer.moe.router import TopKRouter

        for module in model.modules():
            if isinstance(module, TopKRouter):
                kept: deque[_Kept] = deque(maxlen=MICRO_BATCHES)
                self._layers.append((module, kept))
                on_routing(module, self._keeper(kept))

    def _keeper(self, kept: deque[_Kept]) -> Callable[[torch.Tensor], None]:
        def keep(routing_map: torch.Tensor) -> None:
            few = routing_map[:: max(1, -(-routing_map.shape[0] // self._tokens))]
            there, chosen = few.to(torch.int8).topk(self._topk)
            chosen = chosen.masked_fill(there == 0, -1)  # dropped
            kept.append((routing_map.sum(0), chosen.to(torch.int16)))

        return keep

    @contextmanager
    def train(self) -> Iterator[None]:
        """Write the file when a training ends."""
        yield
        import torch.distributed as dist
        from megatron.core import parallel_state

        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        layers = {
            int(router.layer_number or 0): _layer(kept) for router, kept in self._layers if kept
        }
        sizes = dist.get_world_size(), self._experts, self._topk
        write(self._folder, dist.get_rank(), (group.rank(), group.size()), sizes, layers)


def _layer(kept: deque[_Kept]) -> LayerRouting:
    rows = torch.stack([counts for counts, _ in kept]).sum(0).tolist()
    chosen = torch.cat([tokens for _, tokens in kept]).tolist()
    experts = [tuple(sorted(one for one in token if one >= 0)) for token in chosen]
    return LayerRouting(rows, [(0, token) for token in experts])
