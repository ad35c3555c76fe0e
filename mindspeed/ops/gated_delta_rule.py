"""Gated delta rule: linear attention with a decaying memory (Qwen3-Next, Qwen3.5), chunk by chunk.

A head keeps a matrix S ``[d, d_v]``. Each token lets it decay, corrects what it returns for the key
towards the value, and reads it with the query:

    S <- exp(g) S;    S <- S + k (beta (v - k^T S))^T;    o = scale q^T S

Within a chunk of C tokens the corrections solve one triangular system (the WY representation), so
only chunks follow each other. With c = cumsum(g) in a chunk and M[t, s] = exp(c[t] - c[s]):

    L = tril(beta k k^T * M, -1)         u = (1 + L)^-1 beta v      w = (1 + L)^-1 beta k exp(c)
    new = u - w S                        the corrections that the chunk writes
    o = scale (q exp(c) S + tril(q k^T * M) new)
    S <- exp(c[C]) S + K^T new           K = k exp(c[C] - c), so that in all
    S <- A S + B                         A = exp(c[C]) - K^T w, B = K^T u

The last line is the operator ``delta_scan``, a Triton kernel on CUDA; all others are products of
all chunks at once. The backward keeps the arguments only, computes the chunks again and scans them
from the last to the first, with A transposed. Everything is computed in fp32. Source: Yang, Kautz
and Hatamizadeh, "Gated Delta Networks" (2024).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import FLOATS, ArgumentCheck
from mindspeed.ops._numerics import WORKLOAD_ROWS, accumulation_dtype, random
from mindspeed.ops.causal_conv1d import document_ends
from mindspeed.ops.registry import Operator, plain_torch, triton

__all__ = ["chunk_gated_delta_rule"]

_EPS = 1e-6
"""Added to the square of a norm of queries and keys."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    chunk_size: int = 64,
    head_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend with a decaying memory, causally; names and order are those of the ``fla`` package.

    Args:
        q: Queries ``[b, t, n, d]``, fp32, bf16 or fp16.
        k: Keys, like the queries.
        v: Values ``[b, t, n_v, d_v]``; n divides n_v, neighbouring value heads share a key head.
        g: Logarithms of the decay ``[b, t, n_v]``, not positive.
        beta: Strength of the correction ``[b, t, n_v]``.
        scale: Factor on the queries; default ``1 / sqrt(d)``.
        initial_state: ``[b, n_v, d, d_v]``, with ``cu_seqlens`` one for each document.
        output_final_state: Return the memory after the last token.
        use_qk_l2norm_in_kernel: Normalise queries and keys first.
        cu_seqlens: Ends of documents from 0, integers ``[documents + 1]``, with b = 1: each
            document begins with its initial state. Read on the host.
        chunk_size: Tokens of a chunk; the result does not depend on it but for rounding.
        head_first: Tensors are ``[b, n, t, d]`` and ``[b, n_v, t]``.

    Returns:
        ``[b, t, n_v, d_v]`` in the dtype of v (``[b, n_v, t, d_v]`` with ``head_first``), and the
        memory ``[b, n_v, d, d_v]`` in fp32, or None.

    Raises:
        OperatorError: Wrong dtypes or shapes, heads that do not divide, documents that do not end
            at t, or with b > 1.
    """
    check = ArgumentCheck("chunk_gated_delta_rule")
    check.dtype(FLOATS, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    check.same("device", q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    check.rank(4, q=q, k=k, v=v)
    check.integer(chunk_size=chunk_size)
    check.require(chunk_size > 0, "chunk_size", "a positive number", chunk_size)
    if head_first:
        q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    samples, length, heads, channels = q.shape
    value_heads = v.shape[2]
    check.shape(q.shape, k=k)
    check.require(v.shape[:2] == q.shape[:2], "v", f"shape {(samples, length)} ...", v.shape)
    check.shape((samples, length, value_heads), g=g, beta=beta)
    check.require(
        heads > 0 and value_heads % heads == 0,
        "v",
        f"a multiple of the {heads} heads of q",
        value_heads,
    )
    if cu_seqlens is None:
        ends = [length * sample for sample in range(samples + 1)]
    else:
        ends = document_ends(check, cu_seqlens, samples, length)
    if initial_state is not None:
        check.shape(
            (len(ends) - 1, value_heads, channels, v.shape[-1]), initial_state=initial_state
        )
    out, final = GATED_DELTA_RULE(
        *(x.flatten(0, 1) for x in (q, k, v, g, beta)),
        initial_state,
        ends,
        channels**-0.5 if scale is None else scale,
        use_qk_l2norm_in_kernel,
        chunk_size,
        output_final_state,
    )
    out = out.view(samples, length, value_heads, v.shape[-1])
    return out.transpose(1, 2) if head_first else out, final if output_final_state else None


@dataclass(frozen=True)
class _Layout:
    """Tokens in chunks: each document is padded to whole ones, with tokens that change nothing.

    Attributes:
        rows: row of each token in the concatenated chunks; None where nothing is padded.
        bounds: first chunk of each document, and the number of chunks.
        size: tokens of a chunk.
    """

    rows: Tensor | None
    bounds: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, ends: Sequence[int], size: int, device: torch.device) -> _Layout:
        lengths = [b - a for a, b in itertools.pairwise(ends)]
        bounds = tuple(itertools.accumulate((-(-n // size) for n in lengths), initial=0))
        if all(n % size == 0 for n in lengths):
            return cls(None, bounds, size)
        parts = [torch.arange(n) + size * first for n, first in zip(lengths, bounds, strict=False)]
        return cls(torch.cat(parts).to(device, non_blocking=True), bounds, size)

    def chunks(self, x: Tensor) -> Tensor:
        """``[t, n, ...]`` as ``[chunks, n, C, ...]``."""
        count = self.bounds[-1]
        if self.rows is not None:
            padded = x.new_zeros(count * self.size, *x.shape[1:])
            x = padded.index_copy_(0, self.rows, x)
        return x.unflatten(0, (count, self.size)).transpose(1, 2)

    def tokens(self, x: Tensor) -> Tensor:
        """The inverse of :meth:`chunks`."""
        flat = x.transpose(1, 2).flatten(0, 1)
        return flat if self.rows is None else flat.index_select(0, self.rows)


@dataclass(frozen=True)
class _Chunks:
    """What the chunks need from each other is not in here; ``[chunks, n_v, C, ...]``, fp32.

    Attributes:
        layout: of the tokens.
        q, k: normalised where that is wanted, q times the scale.
        decay, between: c and M of the module, M with zeros above the diagonal.
        corrected: beta k.
        earlier, u, w: L, u and w of the module.
        scores, reads, writes: tril(q k^T * M), q exp(c), k exp(c[C] - c).
    """

    layout: _Layout
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    between: Tensor
    corrected: Tensor
    earlier: Tensor
    u: Tensor
    w: Tensor
    scores: Tensor
    reads: Tensor
    writes: Tensor

    @property
    def kept(self) -> Tensor:
        """exp(c[C]), ``[chunks, n_v]``."""
        return self.decay[..., -1].exp()

    def carry(self) -> Tensor:
        """A of the module, ``[chunks, n_v, d, d]``."""
        matrix = -(self.writes.mT @ self.w)
        matrix.diagonal(dim1=-2, dim2=-1).add_(self.kept[..., None])
        return matrix

    def corrections(self, states: Tensor) -> Tensor:
        """u - w S, of the memory before each chunk."""
        return self.u - self.w @ states


def _solve(earlier: Tensor, right: Tensor, *, transposed: bool = False) -> Tensor:
    """``(1 + L)^-1 right``, or with the transposed matrix."""
    matrix = earlier.mT if transposed else earlier
    return torch.linalg.solve_triangular(matrix, right, upper=transposed, unitriangular=True)


def _normalised(x: Tensor) -> tuple[Tensor, Tensor]:
    factor = torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
    return x * factor, factor


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    ends: Sequence[int], scale: float, normalised: bool, size: int,
) -> _Chunks:  # fmt: skip
    layout = _Layout.of(ends, size, q.device)
    wide = accumulation_dtype(v)
    q, k, v, g, beta = (layout.chunks(x.to(wide)) for x in (q, k, v, g, beta))
    if normalised:
        q, k = _normalised(q)[0], _normalised(k)[0]
    share = v.shape[1] // q.shape[1]
    q, k = ((x.repeat_interleave(share, 1) if share > 1 else x) for x in (q * scale, k))
    decay = g.cumsum(-1)
    future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill_(future, -math.inf).exp_()
    grown = decay.exp()[..., None]
    corrected = k * beta[..., None]
    earlier = (corrected @ k.mT).mul_(between).tril_(-1)
    solved = _solve(earlier, torch.cat([v * beta[..., None], corrected * grown], -1))
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    return _Chunks(
        layout, q, k, v, beta, decay, between, corrected, earlier, u, w,
        scores=(q @ k.mT).mul_(between),
        reads=q * grown,
        writes=k * (decay[..., -1:] - decay).exp()[..., None],
    )  # fmt: skip


def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None,
    ends: Sequence[int], scale: float, normalised: bool, chunk: int, final: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    x = _chunks(q, k, v, g, beta, ends, scale, normalised, chunk)
    states, last = _states(x, state)
    out = (x.reads @ states).add_(x.scores @ x.corrections(states))
    return x.layout.tokens(out).to(v.dtype), last if final else last.new_empty(0)


def _states(x: _Chunks, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The memory before each chunk, and behind each document."""
    scanned = DELTA_SCAN(x.carry(), x.writes.mT @ x.u, _wide(state, x.u), x.layout.bounds, False)
    return scanned  # type: ignore[no-any-return]


def _wide(state: Tensor | None, like: Tensor) -> Tensor | None:
    return None if state is None else state.to(like.dtype)


def _backward_formula(
    dout: Tensor, dfinal: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None,
    ends: Sequence[int], scale: float, normalised: bool, chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, beta and of the initial state (``[0]`` without one)."""
    x = _chunks(q, k, v, g, beta, ends, scale, normalised, chunk)
    layout = x.layout
    states, _ = _states(x, state)
    new, do = x.corrections(states), layout.chunks(dout.to(x.u.dtype))
    dnew = x.scores.mT @ do
    dstates, dstart = DELTA_SCAN(
        x.carry(), x.reads.mT @ do - x.w.mT @ dnew, _wide(dfinal, x.u), layout.bounds, True
    )
    dnew += x.writes @ dstates
    # What the chunk reads and writes. The corrections are new = u - w S.
    dscores = do @ new.mT
    pairs = dscores * x.scores
    dscores *= x.between
    dreads, dwrites, dw = do @ states.mT, new @ dstates.mT, -(dnew @ states.mT)
    dq = dscores @ x.k + dreads * x.decay.exp()[..., None]
    dk = dscores.mT @ x.q + dwrites * (x.decay[..., -1:] - x.decay).exp()[..., None]
    # Through the triangular system: with r the gradient of its right side, dL = -tril(r [u w]^T).
    du_right, dw_right = _solve(x.earlier, torch.cat([dnew, dw], -1), transposed=True).split(
        [x.u.shape[-1], x.w.shape[-1]], -1
    )
    dearlier = (du_right @ x.u.mT).add_(dw_right @ x.w.mT).neg_().tril_(-1)
    through = dearlier * x.between
    grown = x.corrected * x.decay.exp()[..., None]
    dcorrected = through @ x.k + dw_right * x.decay.exp()[..., None]
    dk += through.mT @ x.corrected + dcorrected * x.beta[..., None]
    dbeta = (dcorrected * x.k).sum(-1) + (du_right * x.v).sum(-1)
    dv = du_right * x.beta[..., None]
    # The decay: M multiplies what is summed here; the last one of a chunk is in writes and in kept.
    pairs += dearlier * x.earlier
    written = (dwrites * x.writes).sum(-1)
    ddecay = pairs.sum(-1) - pairs.sum(-2) - written
    ddecay += (dreads * x.reads).sum(-1) + (dw_right * grown).sum(-1)
    ddecay[..., -1] += written.sum(-1) + x.kept * (states * dstates).sum((-1, -2))
    dg = ddecay.flip(-1).cumsum(-1).flip(-1)
    share = v.shape[1] // q.shape[1]
    if share > 1:
        dq, dk = (grad.unflatten(1, (-1, share)).sum(2) for grad in (dq, dk))
    dq = dq * scale
    dq, dk, dv, dg, dbeta = (layout.tokens(grad) for grad in (dq, dk, dv, dg, dbeta))
    if normalised:
        dq, dk = _through_norm(dq, q), _through_norm(dk, k)
    grads = zip((dq, dk, dv, dg, dbeta), (q, k, v, g, beta), strict=True)
    dstate = dstart.new_empty(0) if state is None else dstart.to(state.dtype)
    return (*(grad.to(of.dtype) for grad, of in grads), dstate)  # type: ignore[return-value]


def _through_norm(grad: Tensor, x: Tensor) -> Tensor:
    unit, factor = _normalised(x.to(grad.dtype))
    return factor * (grad - unit * (unit * grad).sum(-1, keepdim=True))


def _steps(bounds: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The documents that have a chunk left, and these chunks, step by step."""
    counts = [b - a for a, b in itertools.pairwise(bounds)]
    for step in range(max(counts, default=0)):
        going = [document for document, count in enumerate(counts) if count > step]
        yield going, [bounds[document] + step for document in going]


def _scan(
    carry: Tensor, added: Tensor, state: Tensor | None, bounds: Sequence[int], reverse: bool
) -> tuple[Tensor, Tensor]:
    """Memory before each chunk, and behind the last (in reverse: the first) one of a document."""
    shape = len(bounds) - 1, *added.shape[1:]
    memory = added.new_zeros(shape) if state is None else state.clone()
    states = torch.empty_like(added, memory_format=torch.contiguous_format)
    steps = list(_steps(bounds))
    for going, at in reversed(steps) if reverse else steps:
        states[at] = now = memory[going]
        factor = carry[at].mT if reverse else carry[at]
        memory[going] = torch.matmul(factor, now).add_(added[at])
    return states, memory


def _fake_scan(
    carry: Tensor, added: Tensor, state: Tensor | None, bounds: Sequence[int], reverse: bool
) -> tuple[Tensor, Tensor]:
    last = added.new_empty(len(bounds) - 1, *added.shape[1:])
    return added.new_empty(added.shape), last


def _fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None,
    ends: Sequence[int], scale: float, normalised: bool, chunk: int, final: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    shape = len(ends) - 1, v.shape[1], q.shape[-1], v.shape[-1]
    last = v.new_empty(shape if final else 0, dtype=accumulation_dtype(v))
    return v.new_empty(v.shape), last


def _fake_backward(
    dout: Tensor, dfinal: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None,
    ends: Sequence[int], scale: float, normalised: bool, chunk: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    dstate = v.new_empty(0, dtype=accumulation_dtype(v))
    if state is not None:
        dstate = state.new_empty(state.shape)
    return (*(x.new_empty(x.shape) for x in (q, k, v, g, beta)), dstate)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ends, scale, normalised, chunk, final = inputs
    ctx.save_for_backward(*tensors)
    ctx.options, ctx.final = (ends, scale, normalised, chunk), final


def _backward(ctx: Any, dout: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grads = GATED_DELTA_RULE_BACKWARD(dout, dfinal if ctx.final else None, *tensors, *ctx.options)
    dstate = None if tensors[-1] is None else grads[-1]
    return (*grads[:-1], dstate, None, None, None, None, None)


def _flops(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any,
    ends: Any, scale: Any, normalised: Any, chunk: int, *rest: Any, **more: Any,
) -> int:  # fmt: skip
    """The matrix products of all chunks; the triangular systems are not counted."""
    d, d_v = q[-1], v[-1]
    pairs, memory = chunk**2 * (2 * d + d_v), chunk * d * (d + 3 * d_v)
    return 2 * _chunks_of(ends, chunk) * v[-2] * (pairs + memory + d**2 * d_v)


def _flops_backward(
    dout: Any, dfinal: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any,
    ends: Any, scale: Any, normalised: Any, chunk: int, **more: Any,
) -> int:  # fmt: skip
    d, d_v = q[-1], v[-1]
    pairs, memory = chunk**2 * (7 * d + 3 * d_v), chunk * d * (2 * d + 8 * d_v)
    return 2 * _chunks_of(ends, chunk) * v[-2] * (pairs + memory + 2 * d**2 * d_v)


def _chunks_of(ends: Sequence[int], chunk: int) -> int:
    """Number of chunks of all documents."""
    return sum(-(-(b - a) // chunk) for a, b in itertools.pairwise(ends))


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    exact = dtype if dtype == torch.float64 else torch.float32
    for ends, heads, value_heads, d, d_v, chunk, state, normalised in (
        ((0, 5, 10), 1, 2, 4, 6, 4, False, False),
        ((0, 1, 12, 13), 2, 4, 6, 3, 4, True, True),
        ((0, 16), 2, 2, 16, 16, 16, True, True),
        ((0, 3, 3, 20), 1, 1, 5, 5, 8, True, False),
        ((0, 0), 2, 2, 4, 4, 4, True, True),
    ):
        t = ends[-1]
        q, k = (random((t, heads, d), dtype, seed=seed) for seed in (0, 1))
        v = random((t, value_heads, d_v), dtype, seed=2)
        g = -random((t, value_heads), exact, seed=3).abs()
        beta = random((t, value_heads), dtype, seed=4).sigmoid()
        shape = len(ends) - 1, value_heads, d, d_v
        start = random(shape, exact, seed=5) if state else None
        yield q, k / d, v, g, beta, start, ends, d**-0.5, normalised, chunk, state


def _samples_backward(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for *given, final in _samples(dtype):
        state = given[5]
        dfinal = random(state.shape, state.dtype, seed=7) if final else None
        yield random(given[2].shape, dtype, seed=6), dfinal, *given


def _samples_scan(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for reverse, (q, k, v, g, beta, state, ends, scale, _, chunk, _) in itertools.product(
        (False, True), _samples(dtype)
    ):
        x = _chunks(q, k, v, g, beta, ends, scale, True, chunk)
        yield x.carry(), x.writes.mT @ x.u, state, x.layout.bounds, reverse


def _scan_workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    chunks, channels = WORKLOAD_ROWS // 64, 128
    memory = torch.ones(chunks, max(hidden // channels, 1), channels, channels, device=device)
    return memory, memory, None, (0, chunks), False


DELTA_SCAN = Operator(
    "delta_scan(Tensor carry, Tensor added, Tensor? state, SymInt[] bounds, bool reverse) "
    "-> (Tensor, Tensor)",
    reference=_scan,
    fake=_fake_scan,
    cuda=[triton("gated_delta_rule:scan")],
    npu=[plain_torch(_scan)],
    flops=lambda carry, added, *rest, **more: 2 * math.prod(carry) * added[-1],
    samples=_samples_scan,
    workload=_scan_workload,
    dtypes=(torch.float32,),
)

GATED_DELTA_RULE_BACKWARD = Operator(
    "gated_delta_rule_backward(Tensor dout, Tensor? dfinal, Tensor q, Tensor k, Tensor v, "
    "Tensor g, Tensor beta, Tensor? state, SymInt[] ends, float scale, bool normalised, "
    "int chunk) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_backward_formula,
    fake=_fake_backward,
    cuda=[plain_torch(_backward_formula)],
    npu=[plain_torch(_backward_formula)],
    flops=_flops_backward,
    samples=_samples_backward,
)

GATED_DELTA_RULE = Operator(
    "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state, "
    "SymInt[] ends, float scale, bool normalised, int chunk, bool final) -> (Tensor, Tensor)",
    reference=_forward,
    fake=_fake,
    cuda=[plain_torch(_forward)],
    npu=[plain_torch(_forward)],
    autograd=(_save, _backward),
    flops=_flops,
    samples=_samples,
    public="mindspeed.ops.gated_delta_rule.chunk_gated_delta_rule",
)
