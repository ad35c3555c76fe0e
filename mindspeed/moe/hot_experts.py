"""Hot experts: those that many tokens go to are computed where the tokens are.

    counts   rows of every rank for every expert, known to all ranks
    hot      N times: the largest expert of the rank with the most rows

Every rank receives the weights of the hot experts and computes its own tokens with them, so these
rows do not travel, and the rank that owns such an expert no longer computes all of them. Each rank
chooses from the same counts, so all choose the same. The gradients of the weights go back to the
owner, in a fixed order of sums.

Sources: FasterMoE (PPoPP 2022), whose shadowed experts are the largest ones; here the choice
follows the loads of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mindspeed.moe.collectives import GatherRows
from mindspeed.moe.dispatch.all_to_all import ExpertGroups
from mindspeed.moe.host_copy import HostValue
from mindspeed.moe.interpreter import Chunk, Communicate, Compute
from mindspeed.moe.split_phase import Collective
from mindspeed.spmd import Local, typed
from mindspeed.te import kernels
from mindspeed.te.expert_range import expert_weights, experts_with_weights


def loads(counts: torch.Tensor, hot: Sequence[int] = ()) -> torch.Tensor:
    """Rows that each rank computes.

    Args:
        counts: int64 ``[ranks, experts]``, rows of each rank for each expert; a rank owns as many
            consecutive experts as every other.
        hot: experts whose rows stay.

    Returns:
        int64 ``[ranks]``.
    """
    ranks = counts.shape[0]
    sent = counts.clone()
    sent[:, list(hot)] = 0
    return sent.sum(0).view(ranks, -1).sum(1) + counts[:, list(hot)].sum(1)


def choose(counts: torch.Tensor, most: int) -> list[int]:
    """Hot experts: one after the other the largest of the rank that is most loaded then.

    Args:
        counts: int64 ``[ranks, experts]``, as for :func:`loads`.
        most: how many at most; fewer if the most loaded rank has none left with rows.

    Returns:
        Their indices, ascending.
    """
    local = counts.shape[1] // counts.shape[0]
    total, hot = counts.sum(0), list[int]()
    while len(hot) < most:
        rank = int(loads(counts, hot).argmax())
        sizes = total[rank * local : (rank + 1) * local].clone()
        sizes[[e - rank * local for e in hot if e // local == rank]] = 0
        if not sizes.any():
            break
        hot.append(rank * local + int(sizes.argmax()))
    return sorted(hot)


@dataclass
class HotExperts:
    """The stages ``choose``, ``weights`` and ``hot`` of one call of a layer.

    Attributes:
        experts: Megatron's ``TEGroupedMLP``.
        most: hot experts, N.
        messages: in which their weights are sent, M.
    """

    groups: ExpertGroups
    experts: Any
    most: int
    messages: int = 1
    _hot: list[int] = field(default_factory=list)
    _counts: torch.Tensor | None = None

    def compute(self, stages: Mapping[str, Compute]) -> dict[str, Compute]:
        """The layer's stages with the hot experts."""

        def unpermute(chunk: Chunk) -> None:
            stages["unpermute"](chunk)
            tensors = chunk.tensors
            tensors["output"] = tensors["output"] + tensors.pop("hot_output")

        own = {"choose": self.choose, "hot": self.hot, "unpermute": unpermute}
        return {**stages, **own}

    def communicate(self, stages: Mapping[str, Communicate]) -> dict[str, Communicate]:
        """The layer's communications and that of the weights."""
        return {**stages, "weights": self.weights}

    def choose(self, chunk: Chunk) -> None:
        """Choose; the rows of hot experts leave ``routing_map [n, experts]`` and the counts."""
        counts = chunk.values["host_counts"].get().view(self.groups.ep.size(), -1)
        self._hot, self._counts = choose(counts, self.most), counts
        sent = counts.clone()
        sent[:, self._hot] = 0
        chunk.values["host_counts"] = HostValue(lambda: sent)
        tensors = chunk.tensors
        routing_map = tensors["routing_map"]
        tensors["hot_map"] = routing_map[:, self._hot]
        tensors["routing_map"] = routing_map.clone()
        tensors["routing_map"][:, self._hot] = False
        for i, hot in enumerate(self._messages()):
            own = [e - self.groups.first for e in hot if self._owner(e) == self.groups.ep.rank()]
            tensors[f"hot_weights{i}"] = self._own_weights(own)

    def weights(self, chunk: Chunk) -> Mapping[str, Collective]:
        """The weights of hot experts from their owners to all."""
        ranks = range(self.groups.ep.size())
        return {
            f"hot_weights{i}": GatherRows(
                self.groups.ep, [sum(self._owner(e) == rank for e in hot) for rank in ranks]
            )
            for i, hot in enumerate(self._messages())
        }

    def hot(self, chunk: Chunk) -> None:
        """This rank's own rows of hot experts to ``hot_output [n, h]``."""
        tensors, hot, counts = chunk.tensors, self._hot, self._counts
        assert counts is not None
        hot_map = tensors.pop("hot_map")
        found = [tensors.pop(f"hot_weights{i}") for i, _ in enumerate(self._messages())]
        if not hot:
            tensors["hot_output"] = torch.zeros_like(tensors["hidden"])
            return
        sizes = counts[self.groups.ep.rank(), hot]
        hidden, probs = tensors["hidden"], tensors["probs"][:, hot]
        rows, row_probs, ids = kernels.moe_permute(hidden, probs, hot_map, int(sizes.sum()))
        module = experts_with_weights(self.experts, self._matrices(torch.cat(found)))
        out, _ = module(rows, sizes, row_probs)
        tensors["hot_output"] = kernels.moe_unpermute(out, ids, None, hidden.shape)

    def _messages(self) -> list[list[int]]:
        """Hot experts by message: consecutive ones, so in the order of their owners."""
        count = min(self.messages, len(self._hot))
        return [part.tolist() for part in torch.tensor(self._hot).tensor_split(count)] * (count > 0)

    def _owner(self, expert: int) -> int:
        return expert // self.groups.local

    def _linears(self) -> dict[str, Any]:
        return {name: getattr(self.experts, name) for name in ("linear_fc1", "linear_fc2")}

    def _own_weights(self, own: Sequence[int]) -> torch.Tensor:
        """Weights of some local experts as ``[experts, elements]``."""
        weights = [x for linear in self._linears().values() for x in expert_weights(linear)]
        fuse = self.experts.linear_fc1.fuse_wgrad_accumulation
        return _OwnWeights.apply(own, fuse, *weights)  # type: ignore[no-any-return]

    def _matrices(self, flat: torch.Tensor) -> dict[str, list[torch.Tensor]]:
        """``flat [experts, elements]`` as the weights of each linear layer."""
        shapes = {name: linear.weight0.shape for name, linear in self._linears().items()}
        parts = flat.split([shape.numel() for shape in shapes.values()], dim=1)
        return {
            name: [one.view(shape) for one in part.unbind(0)]
            for part, (name, shape) in zip(parts, shapes.items(), strict=True)
        }


@typed(Local())
class _OwnWeights(torch.autograd.Function):
    """Copies of some experts' weights; every rank has a gradient to return, also without any."""

    @staticmethod
    def forward(ctx: Any, own: Sequence[int], fuse: bool, *weights: torch.Tensor) -> torch.Tensor:
        ctx.own, ctx.fuse, ctx.weights = own, fuse, weights
        first, second = weights[: len(weights) // 2], weights[len(weights) // 2 :]
        size = first[0].numel() + second[0].numel()
        out = first[0].new_empty(len(own), size)
        for row, i in zip(out, own, strict=True):
            torch.cat([first[i].flatten(), second[i].flatten()], out=row)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        half = len(ctx.weights) // 2
        found: list[torch.Tensor | None] = [None] * len(ctx.weights)
        for row, i in zip(grads[0], ctx.own, strict=True):
            at = 0
            for index in (i, half + i):
                weight = ctx.weights[index]
                grad = row[at : at + weight.numel()].view(weight.shape)
                at += weight.numel()
                main_grad = getattr(weight, "main_grad", None) if ctx.fuse else None
                if not weight.requires_grad:
                    continue
                if main_grad is None:
                    found[index] = grad
                else:  # the experts' own products are there, too
                    main_grad.add_(grad)
        return None, None, *found
