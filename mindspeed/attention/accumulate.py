"""What is added up on the way: partial outputs, and gradients.

In fp32 (fp64 for fp64), in place, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mindspeed.attention import kernels
from mindspeed.attention.plan import OWN
from mindspeed.attention.program import ZEROS, Step, Transfer
from mindspeed.attention.rows import Index
from mindspeed.attention.wire import KeyValueShape, unpack
from mindspeed.ops.npu_ring_attention_update import LANES, RING_ATTENTION_UPDATE

Results = tuple[torch.Tensor, torch.Tensor]


@dataclass
class PartialOutputs:
    """Queries in a buffer, and what has been computed of them so far.

    Attributes:
        q: ``[t, n, d]``.
        out: ``[t, n, d_v]``, wide.
        lse: ``[t, n]``, wide; -inf where no key was seen.
        fused: Merge by one operator instead of a few of torch's.
    """

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    fused: bool = False

    @classmethod
    def start(cls, q: torch.Tensor, value_size: int, fused: bool = False) -> PartialOutputs:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros(*q.shape[:2], value_size, dtype=wide)
        lse = q.new_full(q.shape[:2], float("-inf"), dtype=wide)
        return cls(q, out, lse, fused and wide == torch.float32)

    def merge(
        self, rows: Index, part: torch.Tensor, part_lse: torch.Tensor, *, first: bool = False
    ) -> None:
        """Add a partial softmax to some rows; ``first`` if nothing was added to them before."""
        if first:
            rows.put(self.out, part.to(self.out.dtype))
            rows.put(self.lse, part_lse)
            return
        out, lse = rows.take(self.out), rows.take(self.lse)
        if self.fused:
            out, both = _merged(out, lse, part, part_lse)
            if rows.together == slice(0, len(self.out)):
                self.out, self.lse = out, both
            else:
                rows.put(self.out, out)
                rows.put(self.lse, both)
            return
        both = torch.logaddexp(lse, part_lse)
        # Where neither has seen a key, both weights are exp(-inf) = 0.
        least = both.masked_fill(both == float("-inf"), 0.0)
        out = out.mul_((lse - least).exp_().unsqueeze(-1))
        out.addcmul_(part.to(out.dtype), (part_lse - least).exp_().unsqueeze(-1))
        if rows.together is None:
            rows.put(self.out, out)
        rows.put(self.lse, both)

    def take(self, step: Step, received: torch.Tensor) -> None:
        """Merge what others computed of these queries."""
        assert step.ask is not None
        shapes = (self.out.shape[1:], self.q.dtype), (self.lse.shape[1:], self.lse.dtype)
        part, lse = unpack(received, *shapes)
        sizes = [index.rows for index in step.ask.parts]
        for index, *parts in zip(step.ask.parts, part.split(sizes), lse.split(sizes), strict=True):
            self.merge(index, *parts)

    def with_sink(self, sink: torch.Tensor | None) -> Results:
        """Output and log-sum-exp with one more key that has a score and no value."""
        return with_sink(self.out, self.lse, sink)


def _merged(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> Results:
    """The same in one pass over the outputs: a log-sum-exp is a maximum whose sum is 1."""
    ends = torch.tensor([0, len(out)], device=out.device)
    tops = (x.float().unsqueeze(-1).expand(*x.shape, LANES).contiguous() for x in (lse, part_lse))
    top, part_top = tops
    ones = torch.ones_like(top)
    out, top, total = RING_ATTENTION_UPDATE(out, top, ones, part, part_top, ones, ends, "TND")
    return out, top[..., 0] + total[..., 0].log()


def with_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> Results:
    """Count a key with a score and without a value: only the denominator grows."""
    if sink is None:
        return out, lse
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype))
    return (out * (lse - with_sink).exp_().unsqueeze(-1)).to(out.dtype), with_sink


@dataclass
class QueryGradients:
    """Queries with their final output, and ``dq``, the sum of their gradients."""

    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def __post_init__(self) -> None:
        self.dq = torch.zeros_like(self.q, dtype=self.lse.dtype)

    @classmethod
    def arrived(cls, rows: torch.Tensor, own: QueryGradients) -> QueryGradients:
        narrow, wide = own.q.dtype, own.lse.dtype
        heads = own.lse.shape[1:]
        q, dout, lse, delta = unpack(
            rows, (own.q.shape[1:], narrow), (own.dout.shape[1:], narrow), (heads, wide),
            (heads, wide),
        )  # fmt: skip
        return cls(dout, q, kernels.stand_in(dout, delta), lse)

    def take(self, step: Step, received: torch.Tensor) -> None:
        """Add the gradients that others computed."""
        assert step.ask is not None
        sizes = [index.rows for index in step.ask.parts]
        parts = received.unflatten(1, self.q.shape[1:]).split(sizes)
        for index, part in zip(step.ask.parts, parts, strict=True):
            index.add(self.dq, part)


class KeyGradients:
    """Sums of gradients of keys and values: of a rank's own rows, and of others' on their way."""

    def __init__(
        self, own: torch.Tensor, shape: KeyValueShape, rows: dict[int, int], dtype: torch.dtype
    ) -> None:
        """Nothing added yet.

        Args:
            own: Zeros for a rank's own rows, packed and wide.
            shape: Of a packed row.
            rows: Of every buffer.
            dtype: In which gradients travel.
        """
        self.shape, self._rows, self._dtype = shape, rows, dtype
        self._sums = {OWN: own}

    def of(self, buffer: int) -> torch.Tensor:
        """The sums of the rows in a buffer."""
        if buffer not in self._sums:
            rows = self._rows[buffer]
            self._sums[buffer] = self._sums[OWN].new_zeros(rows, self.shape.width)
        return self._sums[buffer]

    def add(self, buffer: int, rows: Index, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add gradients of some rows."""
        if rows.together is None:
            rows.add(self.of(buffer), torch.cat((dk.flatten(1), dv.flatten(1)), 1))
            return
        for total, part in zip(
            self.shape.unpack(rows.take(self.of(buffer))), (dk, dv), strict=True
        ):
            total += part

    def give(self, transfer: Transfer) -> torch.Tensor:
        """Rows to send further, in the dtype of the keys."""
        if transfer.buffer == ZEROS or not transfer.sends:
            rows = transfer.take.rows
            return self._sums[OWN].new_zeros(rows, self.shape.width, dtype=self._dtype)
        return transfer.take.take(self._sums.pop(transfer.buffer)).to(self._dtype)

    def take(self, step: Step, received: torch.Tensor) -> None:
        """Add what others sent after a step."""
        parts = received.split([index.rows for _, index in step.taken])
        for (buffer, index), part in zip(step.taken, parts, strict=True):
            index.add(self.of(buffer), part)
