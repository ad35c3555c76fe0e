"""The stage ``experts`` under the save policy of a layer, and what its backward does when.

    saving = Saving(request, stages.repeat, topk, slices)
    out, bias = saving.run(chunk, experts, rows, sizes, probs)    # in place of experts(...)
    saving.schedule(chunk)                                          # when the program has run

Backward; the landmark is the first reverse communication of a chunk, ``combine``:

    level0   combine>  refetch>  shared_fc2  combine<  experts  refetch<  dispatch>  ...
    level1   refetch>  combine>  shared_fc1 again  shared_fc2  refetch<  fc1 again  combine<  ...

The refetch and the recomputation are hidden where the combine is. Where the refetch is launched
depends on flags only, and every rank launches it, also one without tokens, with frozen experts or
with more load than the others: the ranks of a group stay in step. Only ``fc1`` may be dropped by
one rank alone.

Where the parts of a layer run beside those of another micro-batch, the refetch starts with the
backward of the experts: it is hidden by that and by what the other micro-batch computes, until the
weight gradients of the first linear layer, which wait for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mindspeed.moe.events import EventLog
from mindspeed.moe.interpreter import Chunk
from mindspeed.moe.request import LayerRequest
from mindspeed.moe.save.experts import SavedExperts
from mindspeed.moe.save.policy import ALL, X_ONLY, SavePolicy, load
from mindspeed.moe.save.refetch import Refetch, Steps
from mindspeed.moe.split_phase import Ticket

_KEY = "saved_experts"


@dataclass(frozen=True)
class _Saved:
    """The values that the stage leaves in the chunk for :meth:`ExpertSaving.schedule`."""

    experts: SavedExperts
    refetch: Refetch | None
    before: int  # communications started before the experts


@dataclass(frozen=True)
class ExpertSaving:
    """The experts of one call of a layer under its policy.

    Attributes:
        slices: Ranks that hold slices of the same experts.
    """

    request: LayerRequest
    repeat: Callable[[Chunk], Steps] | None
    topk: int
    slices: int
    name: str = "experts"
    log: EventLog | None = None

    def policy(self, rows: int, tokens: int) -> SavePolicy:
        """The policy for ``rows`` that this rank has received and ``tokens`` that it had."""
        bound, policy = self.request.recompute_above, self.request.save
        if bound is not None and load(rows, tokens, self.topk, self.slices) > bound:
            policy |= X_ONLY
        return policy

    def run(
        self,
        chunk: Chunk,
        module: torch.nn.Module,
        rows: torch.Tensor,
        sizes: torch.Tensor,
        probs: torch.Tensor,
    ) -> Any:
        """Compute the experts.

        Args:
            chunk: With ``hidden [n, h]``, and the dispatcher's maps.
            rows: ``[m, h]``.
            sizes: int64 ``[experts]``, rows of each local expert.
            probs: ``[m]``.

        Raises:
            NotImplementedError: The policy drops rows, which the dispatcher cannot repeat.
        """
        hidden = chunk.tensors["hidden"]
        policy = self.policy(rows.shape[0], hidden.shape[0])
        if policy == ALL or not torch.is_grad_enabled():
            return module(rows, sizes, probs)
        refetch = None
        if not policy.rows:
            if self.repeat is None:
                raise NotImplementedError(f"{self.name}: this dispatcher cannot repeat a dispatch")
            refetch = Refetch(self.repeat(chunk), rows, self.log, chunk.index)
        saved = SavedExperts(
            module, policy, refetch, name=self.name, log=self.log, chunk=chunk.index
        )
        out, *rest = saved(rows, sizes, probs)
        if refetch is not None:
            out = refetch.tie(out, hidden)
        chunk.values[_KEY] = _Saved(saved, refetch, len(chunk.tickets))
        return out, *rest

    def schedule(self, chunk: Chunk, shared: Callable[[], None] | None = None) -> None:
        """Hang refetch and recomputation on the communications of backward.

        Args:
            chunk: Of a program that has run; one without communications after the experts gets its
                rows when backward asks for them.
            shared: Computes the shared experts again.
        """
        found: _Saved | None = chunk.values.pop(_KEY, None)
        tickets = list(chunk.tickets.items())
        if found is None or len(tickets) == found.before:
            return
        stage = tickets[-1][0][0]
        group: list[Ticket] = [ticket for (name, _), ticket in tickets if name == stage]
        first, last = group[-1], group[0]  # in backward
        if found.refetch is not None:
            if self.request.in_parts:
                pass  # the experts' backward starts it
            elif self.request.save.fc1:
                last.after_reverse.append(found.refetch.start)
            else:
                first.before_reverse.append(found.refetch.start)
            if found.before:
                arrived = _arrived(found.experts, found.refetch)
                tickets[found.before - 1][1].before_reverse.append(arrived)
        if shared is not None:
            last.after_reverse.append(shared)
        if not found.experts.policy.fc1:
            first.before_wait.append(_weak(found.experts))


def _arrived(experts: SavedExperts, refetch: Refetch) -> Callable[[], None]:
    """Wait for the rows: for delayed weight gradients, which may ask later, or for nobody."""
    reference = weakref.ref(experts)

    def wait() -> None:
        if (alive := reference()) is not None:
            alive.wait_for_rows()
        refetch.drain()

    return wait


def _weak(experts: SavedExperts) -> Callable[[], None]:
    """Recompute as long as autograd needs it: the communication must not keep it alive."""
    reference = weakref.ref(experts)

    def recompute() -> None:
        if (alive := reference()) is not None:
            alive.recompute()

    return recompute
