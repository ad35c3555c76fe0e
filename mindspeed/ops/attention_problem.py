"""The options of one attention call, and the sequences it consists of.

Every kernel takes ``(q, k, v, *options)``; ``Problem(*options)`` gives them names. The formula:

    score = scale * q k^T [+ position bias]         hidden keys: -inf
    out   = dropout(softmax(score)) v               lse = log(sum(exp(score)))

in which the softmax may have one more column, the sink, that has a score per head and no value. A
query that sees nothing has ``out = 0`` and ``lse = -inf``, and no gradients.

Axis orders are written with a letter per axis: b batch, s sequence, n heads, d head size, and t for
the tokens of all sequences one after the other. ``BNSD`` is what formulas are written in; every
other order reaches it by a view.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from mindspeed.device.host_tensors import numbers
from mindspeed.ops import visibility as seen
from mindspeed.ops.visibility import EVERYTHING, Sight

LAYOUTS = ("SBND", "BSND", "BNSD", "TND")


def bnsd(x: Tensor, layout: str) -> Tensor:
    """View ``x``, any dtype, as ``[b, n, s, d]``; TND becomes one sequence of t tokens."""
    if layout == "TND":
        return x.transpose(0, 1).unsqueeze(0)
    return x.permute([layout.index(axis) for axis in "BNSD"])


def axis(layout: str, name: str) -> int:
    """Position of an axis; asking TND for the sequence gives its tokens."""
    return layout.index("T" if layout == "TND" and name == "S" else name)


SCHEMA = (
    "Tensor? mask, Tensor? pse, Tensor? sink, Tensor? rng, Tensor? cu_q, Tensor? cu_k, "
    "SymInt[]? prefix, str layout, float scale, float dropout, int mode, SymInt pre, SymInt next, "
    "int pse_type, SymInt q_start, SymInt k_start"
)

BIAS_AFTER_SCALE, BIAS_BEFORE_SCALE, ALIBI, ALIBI_SQRT = range(4)


@dataclass(frozen=True)
class AttentionProblem:
    """The options, in the order of :data:`SCHEMA`.

    Attributes:
        mask: bool, broadcastable to ``[b, n, s_q, s_k]``, True is masked; modes 0 and 1.
        pse: position bias. ``pse_type`` 0 (added to the scaled scores) and 1 (added before they are
            scaled): broadcastable to ``[b, n, s_q, s_k]``. 2 and 3: fp32 slopes ``[n]`` or
            ``[b, n]``, the bias is ``-slope * |i + q_start - j - k_start|``, or its square root.
        sink: ``[n]`` score of the column without a value.
        rng: the pair of :func:`mindspeed.ops.philox.reserve` for dropout, on the CPU.
        cu_q: TND only: running sums of the query lengths with a leading 0, on the CPU.
        cu_k: the same for keys.
        prefix: ``[b]``, for modes 5 and 6.
        layout: one of :data:`mindspeed.ops.attention_problem.LAYOUTS`.
        dropout: probability of dropping a probability.
        mode: sparse mode, see :mod:`mindspeed.ops.visibility`.
        pre: reach of the band to the left.
        next: reach of the band to the right.
        pse_type: 0 to 3.
        q_start: position of the first query, for ``pse_type`` 2 and 3.
        k_start: position of the first key.
    """

    mask: Tensor | None = None
    pse: Tensor | None = None
    sink: Tensor | None = None
    rng: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    prefix: Sequence[int] | None = None
    layout: str = "BNSD"
    scale: float = 1.0
    dropout: float = 0.0
    mode: int = seen.MASK_ONLY
    pre: int = EVERYTHING
    next: int = EVERYTHING
    pse_type: int = BIAS_BEFORE_SCALE
    q_start: int = 0
    k_start: int = 0

    def options(self) -> tuple[Any, ...]:
        """The arguments of the operators after q, k and v."""
        return tuple(getattr(self, field.name) for field in fields(self))

    @property
    def has_slopes(self) -> bool:
        """Whether the position bias is computed from slopes."""
        return self.pse is not None and self.pse_type in (ALIBI, ALIBI_SQRT)

    def probabilities(self, q: Tensor, k: Tensor) -> int:
        """Number of probabilities of q ``[b, n, s_q, d]``, k ``[b, g, s_k, d]``, hidden too."""
        if self.layout == "TND":
            sizes = [(a.stop - a.start) * (b.stop - b.start) for a, b in self.sequences()]
            return q.shape[1] * sum(sizes)
        return q.shape[:-1].numel() * k.shape[axis(self.layout, "S")]

    def sequences(self) -> list[tuple[slice, slice]]:
        """The rows of queries and of keys of every sequence of a pack."""
        assert self.cu_q is not None and self.cu_k is not None
        queries, keys = (
            [slice(*ends) for ends in itertools.pairwise(numbers(x))]
            for x in (self.cu_q, self.cu_k)
        )
        return list(zip(queries, keys, strict=True))

    def sight(self, queries: int, keys: int, sequence: int = 0, sequences: int = 1) -> Sight:
        """The keys that the queries of one sequence see."""
        prefix = self.prefix
        if prefix is not None and self.layout == "TND":
            prefix = prefix[sequence : sequence + 1]
        return seen.sight(
            queries, keys, self.mode, self.pre, self.next,
            prefix=prefix, mask=self.mask, sequence=sequence, sequences=sequences,
        )  # fmt: skip

    def pieces(self, q: Tensor, k: Tensor) -> Iterator[SequencePiece]:
        """Yield the sequences to attend in, one by one; those without work are left out.

        q ``[b, n, s_q, d]`` and k ``[b, g, s_k, d]`` are in the problem's layout.
        """
        if not q.numel() or not k.numel():
            return
        if self.layout != "TND":
            queries, keys = bnsd(q, self.layout).shape[2], bnsd(k, self.layout).shape[2]
            yield SequencePiece(0, slice(None), slice(None), self.sight(queries, keys))
            return
        sequences = self.sequences()
        for number, (rows, columns) in enumerate(sequences):
            queries, keys = rows.stop - rows.start, columns.stop - columns.start
            if queries and keys:
                what = self.sight(queries, keys, number, len(sequences))
                yield SequencePiece(number, rows, columns, what)


@dataclass(frozen=True)
class SequencePiece:
    """One sequence of a pack, or all sequences of a dense batch at once.

    Attributes:
        rows: its queries, along the sequence axis of ``bnsd`` views.
    """

    number: int
    rows: slice
    columns: slice
    sight: Sight


def position_bias(
    problem: AttentionProblem, piece: SequencePiece, rows: slice, columns: slice
) -> Tensor | None:
    """The position bias of a tile, added to scaled scores; ``[b or 1, n or 1, r, c]``, floating."""
    pse = problem.pse
    if pse is None:
        return None
    if not problem.has_slopes:
        tile = seen.tile_of(pse, rows, columns)
        return tile * problem.scale if problem.pse_type == BIAS_BEFORE_SCALE else tile
    first = torch.arange(rows.start, rows.stop, device=pse.device) + problem.q_start
    other = torch.arange(columns.start, columns.stop, device=pse.device) + problem.k_start
    distance = (first[:, None] - other).abs().to(pse.dtype)
    if problem.pse_type == ALIBI_SQRT:
        distance = distance.sqrt()
    slopes = pse[piece.number] if pse.dim() == 2 and problem.layout == "TND" else pse
    return distance * -slopes.view(-1, slopes.shape[-1], 1, 1)
