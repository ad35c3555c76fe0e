"""``deep_ep.HybridEPBuffer`` on a CPU, by what its documentation says, for Megatron's binding.

    with emulated():
        from megatron.core.transformer.moe.fused_a2a import hybrid_ep_dispatch

Parameters have the library's names. The result is as long as it was asked to be; behind the last
row lies not-a-number. What the host would wait for is refused: a call without that length.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from tests.moe.symmetric_emulator import unwatched


class HybridEPBuffer:
    """Rows to the ranks of their experts, by expert, and back.

    Args:
        group: Of the experts.
        hidden_dim: Elements of a row; buffers grow.
        max_num_of_tokens_per_rank: The most tokens of a rank; buffers grow.
        num_local_experts: Experts of a rank.
        use_fp8: Refused.
        num_sms_dispatch_api: Ignored.
        num_sms_combine_api: Ignored.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
    ) -> None:
        assert not use_fp8
        self._group, self._local = group, num_local_experts

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        num_of_experts_per_rank: int | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
    ) -> tuple[Any, ...]:
        """Rows, probabilities, no scales, sizes of the experts, and what the way back needs."""
        assert num_permuted_tokens is not None, "the host would wait for the device"
        assert handle is not None or non_blocking
        with unwatched(), torch.no_grad():
            if handle is None:
                assert routing_map is not None and routing_map.dtype == torch.bool
                assert num_of_experts_per_rank == self._local
                handle = self._preprocessed(routing_map)
            where, experts, sizes, _ = handle
            everything = self._gathered(hidden)
            rows = self._filled(everything.flatten(0, 1)[where], num_permuted_tokens)
            row_probs = None
            if probs is not None:
                assert probs.dtype == torch.float32
                of_all = self._gathered(probs).flatten(0, 1)[where, experts]
                row_probs = self._filled(of_all, num_permuted_tokens)
        return rows, row_probs, None, sizes, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: tuple[Any, ...],
        pad_multiple: None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sums of the rows of each token, and the probabilities of its experts."""
        with unwatched(), torch.no_grad():
            where, experts, _, (tokens, all_experts) = handle
            ranks, rank = self._group.size(), self._group.rank()
            sums = hidden.new_zeros(ranks * tokens, hidden.shape[1], dtype=torch.float32)
            sums.index_add_(0, where, hidden[: len(where)].float())
            dist.all_reduce(sums, group=self._group)
            own = sums.view(ranks, tokens, -1)[rank].to(hidden.dtype)
            if probs is None:
                return own, None
            spread = probs.new_zeros(ranks * tokens, all_experts)
            spread[where, experts] = probs[: len(where)]
            dist.all_reduce(spread, group=self._group)
        return own, spread.view(ranks, tokens, -1)[rank]

    def _preprocessed(self, routing_map: torch.Tensor) -> tuple[Any, ...]:
        """Token and expert of each row of this rank, sizes, and the shape of the map."""
        first = self._group.rank() * self._local
        own = self._gathered(routing_map).flatten(0, 1)[:, first : first + self._local]
        experts, where = own.t().nonzero(as_tuple=True)
        return where, experts + first, own.sum(0), tuple(routing_map.shape)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """``[ranks, *x.shape]``."""
        parts = [torch.empty_like(x.contiguous()) for _ in range(self._group.size())]
        dist.all_gather(parts, x.contiguous(), group=self._group)
        return torch.stack(parts)

    def _filled(self, rows: torch.Tensor, length: int) -> torch.Tensor:
        """Behind ``rows [m, ...]`` not-a-number up to ``length``."""
        out = rows.new_full((length, *rows.shape[1:]), torch.nan)
        out[: len(rows)] = rows[:length]
        return out


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Let Megatron's binding find the library."""
    from megatron.core.transformer.moe import fused_a2a

    package = ModuleType("deep_ep")
    package.HybridEPBuffer = HybridEPBuffer  # type: ignore[attr-defined]
    sys.modules["deep_ep"] = package
    try:
        importlib.reload(fused_a2a)
        yield
    finally:
        del sys.modules["deep_ep"]
        importlib.reload(fused_a2a)
