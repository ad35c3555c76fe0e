"""Gated delta rule (linear attention of Qwen3-Next and Qwen3.5), chunk by chunk, in plain torch.

A head keeps a matrix S ``[d, d_v]``. Each token lets it decay, corrects what it returns for the key
towards the value, and reads it with the query:

    S <- exp(g) S;    S <- S + k (beta (v - k^T S))^T;    o = scale q^T S

Within a chunk the corrections solve one triangular system (the WY representation), so the loop runs
over chunks only. Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024). Computed in
fp32; it has no kernel of its own, so the ``fla`` package is faster where it runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mindspeed.errors import ConfigError


def causal_convolution(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Convolve each channel with the tokens before it, within its document.

    Args:
        x: ``[b, t, c]``, any floating dtype.
        weight: ``[c, taps]``; the last tap meets the token itself.
        cu_seqlens: Ends of documents from 0, integers ``[documents + 1]``, with b = 1.

    Returns:
        ``[b, t, c]`` in the dtype of x.
    """
    taps = weight.shape[1]
    if cu_seqlens is None:
        padded = functional.pad(x.transpose(1, 2), (taps - 1, 0))
        return functional.conv1d(padded, weight[:, None], groups=len(weight)).transpose(1, 2)
    lengths = cu_seqlens.diff()
    starts = cu_seqlens[:-1].repeat_interleave(lengths)
    since = torch.arange(x.shape[1], device=x.device) - starts.to(x.device)
    out = x * weight[:, -1]
    for back in range(1, min(taps, x.shape[1])):
        earlier = functional.pad(x[:, :-back], (0, 0, back, 0))
        inside = (since >= back)[None, :, None]
        out = out + torch.where(inside, earlier, 0) * weight[:, -1 - back]
    return out


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
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    head_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend with a decaying memory, causally.

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
            document begins with its initial state.
        chunk_size: Tokens of a chunk; the result does not depend on it but for rounding.
        head_first: Tensors are ``[b, n, t, d]`` and ``[b, n_v, t]``.

    Returns:
        ``[b, t, n_v, d_v]`` in the dtype of v (``[b, n_v, t, d_v]`` with ``head_first``), and the
        memory ``[b, n_v, d, d_v]`` in fp32, or None.

    Raises:
        ConfigError: Heads that do not divide; documents that do not end at t, or with b > 1.
    """
    heads: Any = [x if head_first else x.transpose(1, 2) for x in (q, k, v, g, beta)]
    dtype, length = v.dtype, heads[0].shape[2]
    q, k, v, g, beta = (x.float() for x in heads)
    if v.shape[1] % q.shape[1]:
        raise ConfigError(f"gated delta rule: {q.shape[1]} key heads, {v.shape[1]} value heads")
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    ends = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    if cu_seqlens is not None and (len(q) > 1 or ends[0] != 0 or ends[-1] != length):
        raise ConfigError(
            f"gated delta rule: cu_seqlens {ends} with {len(q)} samples of {length} tokens; "
            "documents are concatenated in one sample, from 0 to its end"
        )
    outputs, states = [], []
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        state = None
        if initial_state is not None:
            state = initial_state if cu_seqlens is None else initial_state[i : i + 1]
        document = [x[:, :, start:end] for x in (q, k, v, g, beta)]
        out, state = _scan(document, state, chunk_size)
        outputs.append(out)
        states.append(state)
    out = torch.cat(outputs, 2).to(dtype)
    final = torch.cat(states) if output_final_state else None
    return out if head_first else out.transpose(1, 2), final


def _scan(
    document: Sequence[Tensor], state: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """Output and last memory; fp32 q, k, v ``[b, n, t, d]``, g and beta ``[b, n, t]``."""
    q, k, v, g, beta = document
    length = q.shape[2]
    pad = -length % chunk_size
    q, k, v = (functional.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, chunk_size)) for x in (q, k, v))
    g, beta = (functional.pad(x, (0, pad)).unflatten(2, (-1, chunk_size)) for x in (g, beta))
    decay = g.cumsum(-1)  # since the beginning of the chunk
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).triu(1)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(future, -torch.inf).exp()
    corrected = k * beta[..., None]
    # (1 + L) u = beta v and (1 + L) w = beta k decay: a token sees the corrections before it
    earlier = (corrected @ k.mT * between).tril(-1)
    right = torch.cat([v * beta[..., None], corrected * decay.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(earlier, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores = q @ k.mT * between
    reads = q * decay.exp()[..., None]
    writes = k * (decay[..., -1:] - decay).exp()[..., None]
    kept = decay[..., -1].exp()[..., None, None]
    memory = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state.float()
    outputs = []
    for i in range(q.shape[2]):
        new = u[:, :, i] - w[:, :, i] @ memory
        outputs.append(reads[:, :, i] @ memory + scores[:, :, i] @ new)
        memory = memory * kept[:, :, i] + writes[:, :, i].mT @ new
    return torch.cat(outputs, 2)[:, :, :length], memory
