"""Attention on CUDA: cuDNN's or torch's flash kernels for rules in 16 bit, the rest in tiles.

:mod:`._attention_cudnn` has the plain squares. ``aten._flash_attention_forward`` aligns causal
masks and windows at the bottom right and takes a window of -1 for no bound; ``[b, s, n, d]`` or,
for packed sequences, ``[t, n, d]``. It knows neither masks nor biases; those, fp32, and windows
whose edge lies beyond the diagonal (there -1 would mean something else) go through
``aten._efficient_attention_forward`` with the bias of one tile at a time, or through the formula
where something is dropped.

Consecutive sequences of a pack that have the same window run as one call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed.ops import _attention_cudnn as cudnn
from mindspeed.ops import _attention_tiles as tiles
from mindspeed.ops._attention_tiles import Fused, Tensors
from mindspeed.ops.attention_problem import AttentionProblem, SequencePiece, bnsd
from mindspeed.ops.philox import default_generator_at
from mindspeed.ops.visibility import EVERYTHING, Sight

_LARGEST_HEAD = 256
_HEAD_MULTIPLE = 8
_BIAS_ALIGNMENT = 16
_LSE_ALIGNMENT = 32
_OFFSETS_PER_HEAD = 32  # what a flash kernel takes of the generator for a sequence and head

Window = tuple[int, int]


def forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """Return ``(out, lse)`` without the sink; q, k, v ``[b, n, s, d]`` in the problem's layout.

    ``out`` has layout and dtype of q and the head size of v; ``lse`` is fp32 ``[b, n, s]`` (TND:
    ``[t, n]``). See :func:`mindspeed.ops.attention.attention`.
    """
    problem = AttentionProblem(*options)
    if cudnn.takes(problem, q, k, v):
        return cudnn.forward(q, k, v, problem)
    out, lse = tiles.empty_outputs(problem, q, v)
    out.zero_()
    lse.fill_(float("-inf"))
    views = [*(bnsd(x, problem.layout) for x in (q, k, v, out)), tiles.lse_view(problem, lse)]
    for run in _runs(problem, q, k, v):
        if run.window is None:
            for piece in run.pieces:
                tiles.forward_piece(problem, EFFICIENT, piece, views)
            continue
        call = _Flash(problem, run, views[0])
        rows, columns = run.rows, run.columns
        qt, kt, vt = call.arrange(views[0][:, :, rows], *(x[:, :, columns] for x in views[1:3]))
        with default_generator_at(q, call.rng):
            got, log_sum, *_ = torch.ops.aten._flash_attention_forward(
                qt, kt, vt, *call.positions, False, **call.keywords
            )
        views[3][:, :, rows] = call.back(got, v.shape[-1])
        views[4][:, :, rows] = log_sum.unsqueeze(0) if problem.layout == "TND" else log_sum
        tiles.settle_blind_rows(run.pieces, (views[3], 0.0), (views[4], float("-inf")))
    return out, lse


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
    out: Tensor, lse: Tensor, *options: Any
) -> Tensors:  # fmt: skip
    """Return ``(dq, dk, dv, dpse)`` with shapes and dtypes of q, k, v ``[b, n, s, d]`` and pse.

    ``dout`` is like ``out``; ``out`` and ``lse [b, n, s]`` may be those of a larger softmax.
    The last option says whether dpse is required; if not, it is empty, ``[0]``.
    """
    *fields, pse_grad = options
    problem = AttentionProblem(*fields)
    if cudnn.takes(problem, q, k, v):
        return (*cudnn.backward(dout, q, k, v, out, lse, problem), q.new_empty(0))
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dpse = tiles.empty_bias_gradient(problem, q, pse_grad)
    views = [bnsd(x, problem.layout) for x in (dout, q, k, v, out, dq, dk, dv)]
    views.append(tiles.lse_view(problem, lse))
    for run in _runs(problem, q, k, v):
        if run.window is None:
            for piece in run.pieces:
                tiles.backward_piece(problem, EFFICIENT, piece, views, dpse if pse_grad else None)
            continue
        call = _Flash(problem, run, views[1])
        rows, columns = run.rows, run.columns
        dout_t, q_t, out_t = call.arrange(*(views[i][:, :, rows] for i in (0, 1, 4)))
        k_t, v_t = call.arrange(*(views[i][:, :, columns] for i in (2, 3)))
        log_sum = views[8][:, :, rows]
        log_sum = log_sum.masked_fill(log_sum == float("-inf"), float("inf")).contiguous()
        grads = torch.ops.aten._flash_attention_backward(
            dout_t, q_t, k_t, v_t, out_t, log_sum[0] if problem.layout == "TND" else log_sum,
            *call.positions, *_random_state(call.rng, q.device), **call.keywords,
        )  # fmt: skip
        for at, where, got in zip((5, 6, 7), (rows, columns, columns), grads, strict=True):
            views[at][:, :, where] = call.back(got, views[at].shape[-1])
        tiles.settle_blind_rows(run.pieces, (views[5], 0.0))
    return dq, dk, dv, dpse if problem.pse is None else dpse.to(problem.pse.dtype)


@dataclass(frozen=True)
class _Run:
    """Neighbouring sequences that one call attends in, or one by one without a window."""

    pieces: tuple[SequencePiece, ...]
    window: Window | None

    @property
    def rows(self) -> slice:
        return slice(self.pieces[0].rows.start, self.pieces[-1].rows.stop)

    @property
    def columns(self) -> slice:
        return slice(self.pieces[0].columns.start, self.pieces[-1].columns.stop)


def _runs(problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor) -> Iterator[_Run]:
    pieces = list(problem.pieces(q, k))
    fits = _flash_takes(problem, q, v)
    windows = [_window(piece.sight) if fits else None for piece in pieces]
    for window, group in itertools.groupby(zip(pieces, windows, strict=True), lambda one: one[1]):
        members = tuple(piece for piece, _ in group)
        # Rows of sequences without a key lie between these, so they cannot be one call.
        gaps = any(
            a.rows.stop != b.rows.start or a.columns.stop != b.columns.start
            for a, b in itertools.pairwise(members)
        )
        if window is None or not gaps:
            yield _Run(members, window)
        else:
            yield from (_Run((piece,), window) for piece in members)


def _flash_takes(problem: AttentionProblem, q: Tensor, v: Tensor) -> bool:
    size = q.shape[-1]
    plain = problem.pse is None and problem.mask is None and problem.prefix is None
    sixteen = q.dtype in (torch.float16, torch.bfloat16)
    return plain and sixteen and v.shape[-1] <= size <= _LARGEST_HEAD


def _window(sight: Sight) -> Window | None:
    """``(left, right)`` from the bottom right, -1 unbounded; None where it has no such form."""
    d = sight.keys - sight.queries
    left, right = d - sight.low, sight.high - d
    if left < 0 or right < 0:
        return None
    # The length of the sequence moves the bounds a little, so "everything" is not exact any more.
    return tuple(-1 if side >= EVERYTHING // 2 else side for side in (left, right))  # type: ignore


class _Flash:
    """The arguments of aten's flash operators for one run, and its order of axes."""

    def __init__(self, problem: AttentionProblem, run: _Run, q: Tensor) -> None:
        assert run.window is not None
        self.rng = problem.rng
        if problem.rng is not None:  # no two runs draw the same numbers
            sequences_before = run.pieces[0].number
            step = sequences_before * q.shape[1] * _OFFSETS_PER_HEAD
            self.rng = problem.rng + torch.tensor([0, step])
        self.packed = problem.layout == "TND"
        queries = [piece.sight.queries for piece in run.pieces]
        keys = [piece.sight.keys for piece in run.pieces]
        ends: list[Tensor | None] = [None, None]
        if self.packed:
            ends = [_running_sums(lengths, q.device) for lengths in (queries, keys)]
        left, right = run.window
        causal = (left, right) == (-1, 0)
        self.positions = (*ends, max(queries), max(keys), problem.dropout, causal)
        self.keywords: dict[str, Any] = {"scale": problem.scale}
        if not causal:
            self.keywords |= {"window_size_left": left, "window_size_right": right}

    def arrange(self, *views: Tensor) -> list[Tensor]:
        """``[b, s, n, d]`` or ``[t, n, d]``, the head size of all that of the widest, padded."""
        widest = max(x.shape[-1] for x in views)
        widest = -(-widest // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
        padded = [F.pad(x, (0, widest - x.shape[-1])) if x.shape[-1] < widest else x for x in views]
        ordered = [tiles.aligned_vectors(x.transpose(1, 2)) for x in padded]
        return [x[0] for x in ordered] if self.packed else ordered

    def back(self, x: Tensor, size: int) -> Tensor:
        """The bnsd view of a result without the padding."""
        x = x[..., :size]
        return (x.unsqueeze(0) if self.packed else x).transpose(1, 2)


def _running_sums(lengths: list[int], device: torch.device) -> Tensor:
    sums = [0, *itertools.accumulate(lengths)]
    return torch.tensor(sums, dtype=torch.int32).to(device, non_blocking=True)


def _random_state(rng: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor]:
    """Seed and offset as the forward leaves them, and an argument that is not read."""
    pair = torch.zeros(2, dtype=torch.int64) if rng is None else rng
    return pair.to(device).view(torch.uint64), torch.empty(0, dtype=torch.uint64, device=device)


def _efficient_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    causal: bool, scale: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    groups = q.shape[1] // k.shape[1]
    out, lse, *_ = torch.ops.aten._efficient_attention_forward(
        q.transpose(1, 2), _repeated(k, groups), _repeated(v, groups), _aligned(bias, q, k),
        None, None, None, None, 0.0, int(causal), True, scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2), lse[..., : q.shape[2]]


def _efficient_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> Tensors:  # fmt: skip
    groups = q.shape[1] // k.shape[1]
    unused = torch.zeros((), dtype=torch.int64, device="cpu" if q.is_cpu else q.device)
    dq, dk, dv, _ = torch.ops.aten._efficient_attention_backward(
        dout.transpose(1, 2), q.transpose(1, 2), _repeated(k, groups), _repeated(v, groups),
        # Of ``out`` the kernel takes the step between rows from its shape, not from its strides.
        _aligned(bias, q, k), out.transpose(1, 2).contiguous(), None, None,
        q.shape[2], k.shape[2], _padded(lse), 0.0, unused, unused,
        int(causal), False, scale=scale,
    )  # fmt: skip
    dk, dv = (x.unflatten(2, (-1, groups)).sum(3).transpose(1, 2) for x in (dk, dv))
    return dq.transpose(1, 2), dk, dv


def _padded(lse: Tensor) -> Tensor:
    """Dense, its rows a multiple of 32 numbers long."""
    missing = -lse.shape[-1] % _LSE_ALIGNMENT
    return F.pad(lse, (0, missing), value=float("inf")).contiguous()


def _repeated(x: Tensor, groups: int) -> Tensor:
    """``[b, s, n, d]`` with a head for each query head: this kernel has no groups."""
    return (x if groups == 1 else x.repeat_interleave(groups, 1)).transpose(1, 2)


def _aligned(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Expand to every head, in memory whose rows start at multiples of 16 elements."""
    if bias is None:
        return None
    columns = k.shape[2]
    if bias.dim() == 2:
        bias = bias[None, None]
    bias = F.pad(bias, (0, -columns % _BIAS_ALIGNMENT)).contiguous()
    return bias.expand(q.shape[0], q.shape[1], *bias.shape[-2:])[..., :columns]


EFFICIENT = Fused(
    forward=_efficient_forward,
    backward=_efficient_backward,
    takes=lambda q, v: q.shape[-1] % _HEAD_MULTIPLE == 0 and v.shape[-1] % _HEAD_MULTIPLE == 0,
    bias_dtype=lambda q: q.dtype,
    readable=tiles.aligned_vectors,
)
