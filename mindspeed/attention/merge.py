"""Merging partial outputs by their log-sum-exp, and accumulating gradients of q, k and v.

    lse = logaddexp(lse_1, lse_2),    out = exp(lse_1 - lse) out_1 + exp(lse_2 - lse) out_2

Everything is accumulated in place in fp32 (fp64 for fp64 inputs), called the wide dtype below.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mindspeed.attention import kernels
from mindspeed.attention.communication import PackedKVShape, unpack
from mindspeed.attention.compiled_plan import ZEROS, RankExchange, RankStage, RowIndex
from mindspeed.attention.plan import OWN
from mindspeed.ops.npu_ring_attention_update import LANES, RING_ATTENTION_UPDATE

OutputAndLse = tuple[torch.Tensor, torch.Tensor]


@dataclass
class PartialOutputs:
    """Queries and the attention over the keys seen so far.

    Attributes:
        q: Queries ``[t, n, d]``.
        out: ``[t, n, d_v]``, wide.
        lse: ``[t, n]``, wide; -inf where no key has been seen.
        fused: Merge with one fused operator.
    """

    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    fused: bool = False

    @classmethod
    def empty(cls, q: torch.Tensor, value_size: int, fused: bool = False) -> PartialOutputs:
        """No key seen yet; ``q`` is ``[t, n, d]``, any floating dtype."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = q.new_zeros(*q.shape[:2], value_size, dtype=wide)
        lse = q.new_full(q.shape[:2], float("-inf"), dtype=wide)
        return cls(q, out, lse, fused and wide == torch.float32)

    def merge(
        self, rows: RowIndex, part: torch.Tensor, part_lse: torch.Tensor, *, first: bool = False
    ) -> None:
        """Merge attention over more keys.

        Args:
            rows: The queries, r of them.
            part: Partial output ``[r, n, d_v]``, any floating dtype.
            part_lse: Its log-sum-exp ``[r, n]``, wide dtype.
            first: These rows have seen no key before.
        """
        if first:
            rows.copy_to(self.out, part.to(self.out.dtype))
            rows.copy_to(self.lse, part_lse)
            return
        out, lse = rows.select(self.out), rows.select(self.lse)
        if self.fused:
            out, both = _fused_merge(out, lse, part, part_lse)
            if rows.as_slice == slice(0, len(self.out)):
                self.out, self.lse = out, both
            else:
                rows.copy_to(self.out, out)
                rows.copy_to(self.lse, both)
            return
        both = torch.logaddexp(lse, part_lse)
        # Where neither has seen a key, both weights are exp(-inf) = 0.
        finite = both.masked_fill(both == float("-inf"), 0.0)
        out = out.mul_((lse - finite).exp_().unsqueeze(-1))
        out.addcmul_(part.to(out.dtype), (part_lse - finite).exp_().unsqueeze(-1))
        if rows.as_slice is None:
            rows.copy_to(self.out, out)
        rows.copy_to(self.lse, both)

    def merge_received(self, exchange: RankExchange, received: torch.Tensor) -> None:
        """Merge partial outputs that other ranks computed for own queries.

        Args:
            exchange: By which the queries were sent.
            received: Packed outputs and log-sum-exp ``[rows, columns]`` in the dtype of q, peer by
                peer.
        """
        shapes = (self.out.shape[1:], self.q.dtype), (self.lse.shape[1:], self.lse.dtype)
        part, lse = unpack(received, *shapes)
        peers = exchange.send_rows_by_peer
        sizes = [index.rows for index in peers]
        for index, *parts in zip(peers, part.split(sizes), lse.split(sizes), strict=True):
            self.merge(index, *parts)

    def with_sink(self, sink: torch.Tensor | None) -> OutputAndLse:
        """:func:`with_sink` of the merged output ``[t, n, d_v]``, wide dtype; sink ``[n]``."""
        return with_sink(self.out, self.lse, sink)


def _fused_merge(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> OutputAndLse:
    """The same with the ring-attention update operator, in one pass over the outputs.

    The operator takes softmax maxima and sums; a log-sum-exp is a maximum whose sum is 1.
    """
    cu_seqlens = torch.tensor([0, len(out)], device=out.device)
    maxima = (x.float().unsqueeze(-1).expand(*x.shape, LANES).contiguous() for x in (lse, part_lse))
    maximum, part_maximum = maxima
    ones = torch.ones_like(maximum)
    out, maximum, total = RING_ATTENTION_UPDATE(
        out, maximum, ones, part, part_maximum, ones, cu_seqlens, "TND"
    )
    return out, maximum[..., 0] + total[..., 0].log()


def with_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> OutputAndLse:
    """Add a key with a score and no value: only the denominator of the softmax grows.

    Args:
        out: ``[t, n, d_v]``, wide dtype.
        lse: ``[t, n]``, wide dtype.
        sink: Scores ``[n]``, any floating dtype; None for no such key.
    """
    if sink is None:
        return out, lse
    with_sink = torch.logaddexp(lse, sink.to(lse.dtype))
    return (out * (lse - with_sink).exp_().unsqueeze(-1)).to(out.dtype), with_sink


@dataclass
class QueryGradients:
    """Queries with their final output, and the accumulated gradient of the queries.

    Attributes:
        dout: Gradient of the output ``[t, n, d_v]``.
        q: Queries ``[t, n, d]``.
        out: Final output ``[t, n, d_v]``, or one with the same ``sum(dout * out)``.
        lse: Final log-sum-exp ``[t, n]``, wide.
        dq: Accumulated ``[t, n, d]``, wide.
    """

    dout: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def __post_init__(self) -> None:
        self.dq = torch.zeros_like(self.q, dtype=self.lse.dtype)

    @classmethod
    def of_received(cls, rows: torch.Tensor, own: QueryGradients) -> QueryGradients:
        """Unpack q, dout, lse and delta that another rank sent.

        Args:
            rows: Packed rows ``[t, columns]`` in the dtype of q, see :func:`pack`.
            own: Gradients of this rank, for shapes and dtypes.
        """
        narrow, wide = own.q.dtype, own.lse.dtype
        heads = own.lse.shape[1:]
        q, dout, lse, delta = unpack(
            rows, (own.q.shape[1:], narrow), (own.dout.shape[1:], narrow), (heads, wide),
            (heads, wide),
        )  # fmt: skip
        return cls(dout, q, kernels.surrogate_output(dout, delta), lse)

    def add_received(self, exchange: RankExchange, received: torch.Tensor) -> None:
        """Add gradients that other ranks computed for own queries.

        Args:
            exchange: By which the queries were sent.
            received: ``[rows, n * d]``, any floating dtype, peer by peer.
        """
        peers = exchange.send_rows_by_peer
        parts = received.unflatten(1, self.q.shape[1:]).split([index.rows for index in peers])
        for index, part in zip(peers, parts, strict=True):
            index.add_to(self.dq, part)


class KVGradients:
    """Accumulated gradients of keys and values: of own rows, and of others' until they are sent.

    Each buffer is ``[rows, width]`` of packed gradients, wide.
    """

    def __init__(
        self, own: torch.Tensor, shape: PackedKVShape, rows: dict[int, int], dtype: torch.dtype
    ) -> None:
        """Start with zeros.

        Args:
            own: Zeros ``[t, width]`` for own rows.
            shape: Of a packed row.
            rows: Number of rows of every buffer.
            dtype: In which gradients are sent.
        """
        self.shape, self._rows, self._dtype = shape, rows, dtype
        self._sums = {OWN: own}

    def of(self, buffer: int) -> torch.Tensor:
        """The accumulated gradients of a buffer ``[rows, width]``, wide dtype."""
        if buffer not in self._sums:
            rows = self._rows[buffer]
            self._sums[buffer] = self._sums[OWN].new_zeros(rows, self.shape.width)
        return self._sums[buffer]

    def add(self, buffer: int, rows: RowIndex, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add ``dk`` ``[r, g, d]`` and ``dv`` ``[r, g, d_v]``, any dtype, to rows of a buffer."""
        if rows.as_slice is None:
            rows.add_to(self.of(buffer), torch.cat((dk.flatten(1), dv.flatten(1)), 1))
            return
        sums = self.shape.unpack(rows.select(self.of(buffer)))
        for total, part in zip(sums, (dk, dv), strict=True):
            total += part

    def to_send(self, exchange: RankExchange) -> torch.Tensor:
        """The rows of an exchange ``[rows, width]`` in the dtype of the keys; frees the buffer."""
        if exchange.buffer == ZEROS or not exchange.sends:
            rows = exchange.send_rows.rows
            return self._sums[OWN].new_zeros(rows, self.shape.width, dtype=self._dtype)
        return exchange.send_rows.select(self._sums.pop(exchange.buffer)).to(self._dtype)

    def add_received(self, stage: RankStage, received: torch.Tensor) -> None:
        """Add gradients that other ranks sent after a stage, ``[rows, width]``, any dtype."""
        parts = received.split([index.rows for _, index in stage.dkv_targets])
        for (buffer, index), part in zip(stage.dkv_targets, parts, strict=True):
            index.add_to(self.of(buffer), part)
