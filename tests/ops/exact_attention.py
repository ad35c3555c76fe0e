"""Attention written out in float64: a score for every pair of a query and a key, nothing fused.

Shares no code with the library. Gradients are torch's, of this formula.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

INFINITE = 2147483647


def hidden(
    mode: int,
    sq: int,
    sk: int,
    pre: int = INFINITE,
    next_: int = INFINITE,
    prefix: int | None = None,
    mask: Any = None,
    first: bool = False,
    last: bool = False,
) -> torch.Tensor:
    """The documented table of sparse modes: True where query i does not see key j."""
    i, j, d = torch.arange(sq)[:, None], torch.arange(sk)[None, :], sk - sq
    nothing = torch.zeros(sq, sk, dtype=torch.bool)
    given = nothing if mask is None else mask.bool()[:sq, :sk]  # shorter ones of a pack
    band = lambda: (j > i + d + next_) | (j < i + d - pre)  # noqa: E731
    table = {
        0: lambda: given | (j > i + next_) | (j < i - pre),
        1: lambda: given | nothing,
        2: lambda: j > i,
        3: lambda: j > i + d,
        4: band,
        5: lambda: (j > i + d) & (j >= (prefix or 0)),
        6: lambda: (j > i + d) & (j >= (prefix or 0)),
        7: lambda: band() if last else j > i + d,
        8: lambda: band() if first else j > i,
    }
    return table[mode]()


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masked: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    kept: Any = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and log-sum-exp of ``[b, n, s, d]``; of rows that see nothing 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores if bias is None else scores + bias
    weights = scores.exp().masked_fill(masked, 0)
    total = weights.sum(-1, keepdim=True)
    total = total if sink is None else total + sink.exp().view(1, -1, 1, 1)
    return weights / total.clamp(min=1e-300) * kept @ v, total.log().squeeze(-1)


AXES = {"SBND": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}
BACK = {"SBND": (2, 0, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    layout: str = "BNSD",
    mode: int = 1,
    pre: int = INFINITE,
    next: int = INFINITE,
    prefix: Any = None,
    mask: torch.Tensor | None = None,
    pse: torch.Tensor | None = None,
    pse_type: int = 1,
    q_start: int = 0,
    k_start: int = 0,
    sink: torch.Tensor | None = None,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out in the layout and log-sum-exp (``[b, n, s]``, TND ``[t, n]``), float64.

    The options are those of the library's ``attention``.
    """
    q, k, v = (x.double() for x in (q, k, v))
    sink = None if sink is None else sink.double()
    if layout == "TND":
        return _packed(q, k, v, cu_q, cu_k, scale, mode, (pre, next), prefix, sink)
    q, k, v = (x.permute(AXES[layout]) for x in (q, k, v))
    (batch, heads, sq, _), sk = q.shape, k.shape[2]
    tables = []
    for b, n in itertools.product(range(batch), range(heads)):
        own = None if mask is None else mask.expand(batch, heads, sq, sk)[b, n]
        tables.append(hidden(mode, sq, sk, pre, next, None if prefix is None else prefix[b], own))
    masked = torch.stack(tables).view(batch, heads, sq, sk)
    bias = None if pse is None else _bias(pse.double(), pse_type, scale, sq, sk, q_start, k_start)
    out, lse = dense(q, k, v, masked, scale, bias, sink)
    return out.permute(BACK[layout]), lse


def _bias(
    pse: torch.Tensor, pse_type: int, scale: float, sq: int, sk: int, q_start: int, k_start: int
) -> torch.Tensor:
    if pse_type < 2:
        return pse * scale if pse_type == 1 else pse
    positions = torch.arange(sq)[:, None] + q_start
    distance = (positions - torch.arange(sk) - k_start).abs().double()
    return -pse.view(1, -1, 1, 1) * (distance.sqrt() if pse_type == 3 else distance)


def _packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: Any, cu_k: Any, scale: float,
    mode: int, band: tuple[int, int], prefix: Any, sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    outs, logs = [], []
    ends = [list(itertools.pairwise(x.tolist())) for x in (cu_q, cu_k)]
    for number, ((a, b), (c, d)) in enumerate(zip(*ends, strict=True)):
        masked = hidden(
            mode, b - a, d - c, *band, prefix=None if prefix is None else prefix[number],
            first=number == 0, last=number == len(ends[0]) - 1,
        )  # fmt: skip
        rows = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        out, lse = dense(*rows, masked, scale, sink=sink)
        outs.append(out[0].transpose(0, 1))
        logs.append(lse[0].t())
    return torch.cat(outs), torch.cat(logs)


def with_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, **options: Any
) -> list[torch.Tensor]:
    """Out, log-sum-exp, and the gradients of q, k, v for an incoming ``dout``; float64, CPU."""
    leaves = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    given = {
        name: x.detach().cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()
    }
    out, lse = attend(*leaves, **given)
    grads = torch.autograd.grad(out, leaves, dout.detach().cpu().double())
    return [out.detach(), lse.detach(), *grads]
