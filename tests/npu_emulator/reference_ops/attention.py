"""``npu_fusion_attention`` and its versions 2 and 3, forward and gradient, as dense fp32 formulas.

Each call becomes one `_Problem`, cut into pieces [b, n, s, d]: one for the dense layouts, one per
sequence for TND. The gradient starts from the max, sum and output handed in, as the device's does:
a caller that hands in those of a larger softmax (ring attention) gets its part of that gradient.

Not documented, and chosen here: a row without any key has NaN as output, statistics and gradient,
so that nothing can come to rely on it; the softmax statistics of TND lie in memory sequence by
sequence as [n, s, 8] unless ``softmax_layout="TND"``, under the shape [t, n, 8].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.npu_emulator import rng
from tests.npu_emulator.reference_ops._common import refuse, require

EVERYTHING = 2147483647
LANES = 8  # each statistic is stored eight times
COMPRESSED = (2, 3, 4, 6, 7, 8)


@dataclass(frozen=True)
class _Problem:
    op: str
    heads: int
    layout: str
    scale: float = 1.0
    keep_prob: float = 1.0
    pse: torch.Tensor | None = None
    pse_type: int = 1
    mask: torch.Tensor | None = None
    sparse_mode: int = 0
    pre: int = EVERYTHING
    next: int = EVERYTHING
    prefix: Any = None
    q_ends: Any = None
    kv_ends: Any = None
    q_start: int = 0
    kv_start: int = 0
    softmax_layout: str = ""
    sink: torch.Tensor | None = None
    seed: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        check = lambda condition, rule: require(self.op, condition, rule)  # noqa: E731
        check(
            self.layout in ("BSH", "SBH", "BSND", "BNSD", "TND"), f"layout {self.layout} is unknown"
        )
        check(0 < self.keep_prob <= 1, "keep_prob is in (0, 1]")
        if self.layout == "TND":
            check(self.q_ends and self.kv_ends, "TND needs actual_seq_qlen and actual_seq_kvlen")
            check(len(self.q_ends) == len(self.kv_ends), "as many sequences of q as of kv")
            check(self.sparse_mode != 5, "sparse_mode 5 does not go with TND")
        else:
            check(self.sparse_mode not in (7, 8), "sparse_mode 7 and 8 need TND")
        check(self.sparse_mode not in (7, 8) or self.pse is None, "no pse with sparse_mode 7 and 8")
        check(not self.softmax_layout or self.layout == "TND", "softmax_layout is for TND")
        if self.mask is not None:
            check(self.mask.dtype in (torch.bool, torch.uint8), "atten_mask is bool or uint8")
            if self.sparse_mode in COMPRESSED:
                expected = _compressed_mask(self.sparse_mode)
                check(
                    self.mask.shape == expected.shape and self.mask.bool().equal(expected),
                    f"sparse_mode {self.sparse_mode} needs the compressed mask "
                    f"{list(expected.shape)}, 1 where masked",
                )

    # Tensors of the call <-> pieces [b, n, s, d]

    def pieces(self, tensor: torch.Tensor, heads: int, ends: Any) -> list[torch.Tensor]:
        if self.layout == "TND":
            return [part.transpose(0, 1)[None].float() for part in _split(tensor, ends)]
        if self.layout in ("BSH", "SBH"):
            tensor = tensor.unflatten(-1, (heads, -1))
        order = {"SBH": (1, 2, 0, 3), "BNSD": (0, 1, 2, 3)}.get(self.layout, (0, 2, 1, 3))
        return [tensor.permute(order).float()]

    def joined(self, pieces: list[torch.Tensor], rows: int, dtype: torch.dtype) -> torch.Tensor:
        """The inverse; `rows` of TND that belong to no sequence are 0."""
        if self.layout == "TND":
            result = torch.cat([piece[0].transpose(0, 1) for piece in pieces]).to(dtype)
            return torch.nn.functional.pad(result, (0, 0, 0, 0, 0, rows - result.size(0)))
        order = {"SBH": (2, 0, 1, 3), "BNSD": (0, 1, 2, 3)}.get(self.layout, (0, 2, 1, 3))
        result = pieces[0].permute(order)
        return (
            (result.flatten(-2) if self.layout in ("BSH", "SBH") else result).to(dtype).contiguous()
        )

    def statistics(self, pieces: list[torch.Tensor], rows: int) -> torch.Tensor:
        """[b, n, s, 8], or for TND [t, n, 8] in the order of `softmax_layout`."""
        if self.layout != "TND":
            return pieces[0][..., None].repeat(1, 1, 1, LANES)
        if self.softmax_layout == "TND":
            pieces = [piece.transpose(1, 2) for piece in pieces]
        flat = torch.cat([piece.flatten() for piece in pieces])
        flat = torch.nn.functional.pad(flat, (0, rows * self.heads - flat.numel()))
        return flat.view(rows, self.heads, 1).repeat(1, 1, LANES)

    def statistic_pieces(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The inverse of `statistics`, each [b, n, s, 1]."""
        if self.layout != "TND":
            return [tensor[..., :1]]
        lengths = _lengths(self.q_ends)
        flat = (
            tensor[..., 0]
            .flatten()
            .split([n * self.heads for n in lengths] + _rest(tensor, lengths, self.heads))
        )
        shape = (1, -1, self.heads) if self.softmax_layout == "TND" else (1, self.heads, -1)
        pieces = [part.view(shape) for part in flat[: len(lengths)]]
        if self.softmax_layout == "TND":
            pieces = [piece.transpose(1, 2) for piece in pieces]
        return [piece[..., None] for piece in pieces]

    # The formula, on one piece

    def logits(self, q: torch.Tensor, k: torch.Tensor, index: int) -> torch.Tensor:
        """``scale * q k^T`` with position bias, -inf where masked; index: of the sequence."""
        logits = q @ k.transpose(-1, -2)
        rows, columns = logits.shape[-2:]
        if self.pse is not None and self.pse_type in (2, 3):
            i = torch.arange(rows)[:, None] + self.q_start
            distance = (i - torch.arange(columns) - self.kv_start).abs().float()
            distance = distance.sqrt() if self.pse_type == 3 else distance
            slopes = self.pse.view(-1, self.heads, 1, 1)
            logits = logits * self.scale - slopes * distance
        elif self.pse is not None:
            bias = self.pse.float()
            after = self.pse_type == 0
            logits = logits * self.scale + bias if after else (logits + bias) * self.scale
        else:
            logits = logits * self.scale
        masked = self.masked(rows, columns, index)
        return logits if masked is None else logits.masked_fill(masked, -torch.inf)

    def masked(self, rows: int, columns: int, index: int) -> torch.Tensor | None:
        """Which positions of sequence `index` are masked; what the table of sparse modes says."""
        if self.mask is None:
            return None
        i, j = torch.arange(rows)[:, None], torch.arange(columns)
        corner = columns - rows
        band = (j > i + corner + self.next) | (j < i + corner - self.pre)
        mode, last = self.sparse_mode, len(self.q_ends or [0]) - 1
        if mode in (0, 1):
            given = self.mask.bool()[..., :rows, :columns]
            return given | (j > i + self.next) | (j < i - self.pre) if mode == 0 else given
        if mode == 2 or (mode == 8 and index > 0):
            return j > i
        if mode == 3 or (mode == 7 and index < last):
            return j > i + corner
        if mode in (4, 7, 8):
            return band
        prefix = torch.tensor(self.prefix).view(-1, 1, 1, 1)
        masked = (j > i + corner) & (j >= prefix)
        if mode == 5:
            require(self.op, self.mask.bool().eq(masked).all().item(), "atten_mask is the prefix's")
        return masked

    def kept(self, shape: torch.Size, generator: torch.Generator) -> torch.Tensor | float:
        """Dropout's factors."""
        if self.keep_prob == 1:
            return 1.0
        return (torch.rand(shape, generator=generator) < self.keep_prob) / self.keep_prob

    def sink_logit(self) -> torch.Tensor:
        """One more logit per head, without a value; -inf when there is none."""
        if self.sink is None:
            return torch.full((1, self.heads, 1, 1), -torch.inf)
        return self.sink.float().view(1, self.heads, 1, 1)


def _compressed_mask(mode: int) -> torch.Tensor:
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    if mode != 6:
        return triangle
    halves = (torch.arange(2048) >= 1024).expand(1024, 2048)
    return torch.cat((triangle, halves))


def _lengths(ends: Any) -> list[int]:
    """Lengths from cumulative ends; trailing zeros are sequences that are not computed."""
    ends = list(ends)
    while ends and ends[-1] == 0:
        ends.pop()
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def _split(tensor: torch.Tensor, ends: Any) -> list[torch.Tensor]:
    lengths = _lengths(ends)
    return list(tensor[: sum(lengths)].split(lengths))


def _rest(tensor: torch.Tensor, lengths: list[int], heads: int) -> list[int]:
    return [(tensor.size(0) - sum(lengths)) * heads]


def _triples(problem: _Problem, q, k, v) -> Iterator[tuple[torch.Tensor, ...]]:
    """Pieces of q, k, v, the heads of k and v repeated for grouped queries."""
    if problem.layout in ("BSH", "SBH"):
        kv_heads = k.size(-1) // (q.size(-1) // problem.heads)
    else:
        kv_heads = k.size(1 if problem.layout in ("BNSD", "TND") else 2)
    require(problem.op, problem.heads % kv_heads == 0, "q has a multiple of the heads of k")
    groups = problem.heads // kv_heads
    parts = (
        problem.pieces(q, problem.heads, problem.q_ends),
        problem.pieces(k, kv_heads, problem.kv_ends),
        problem.pieces(v, kv_heads, problem.kv_ends),
    )
    for qi, ki, vi in zip(*parts, strict=True):
        yield qi, ki.repeat_interleave(groups, 1), vi.repeat_interleave(groups, 1), groups


def _forward(problem: _Problem, q, k, v):
    generator = rng.cpu_generator(problem.seed, problem.offset)
    outs, maxima, sums, numels = [], [], [], 0
    for index, (qi, ki, vi, _) in enumerate(_triples(problem, q, k, v)):
        logits = problem.logits(qi, ki, index)
        top = torch.cat((logits, problem.sink_logit().expand(*logits.shape[:-1], 1)), -1).amax(-1)
        top = top[..., None]  # -inf for a row without any key, where all that follows is NaN
        p = torch.exp(logits - top)
        total = p.sum(-1, keepdim=True) + torch.exp(problem.sink_logit() - top)
        p = p / total.clamp(min=torch.finfo(torch.float32).tiny)
        outs.append((p * problem.kept(p.shape, generator)) @ vi)
        maxima.append(top[..., 0])
        sums.append(total[..., 0])
        numels += p.numel()
    rows = q.size(0)
    statistics = problem.statistics(maxima, rows), problem.statistics(sums, rows)
    empty = torch.empty(0, dtype=q.dtype)
    return problem.joined(outs, rows, q.dtype), *statistics, empty, numels


def _backward(problem: _Problem, q, k, v, dy, maximum, total, out):
    require(problem.op, maximum is not None and total is not None, "softmax_max and softmax_sum")
    require(problem.op, out is not None, "attention_in is the forward's output")
    generator = rng.cpu_generator(problem.seed, problem.offset)
    outs, dys = (problem.pieces(t, problem.heads, problem.q_ends) for t in (out, dy))
    tops, sums = problem.statistic_pieces(maximum), problem.statistic_pieces(total)
    dqs, dks, dvs, dpses, dsinks = [], [], [], [], []
    for index, (qi, ki, vi, groups) in enumerate(_triples(problem, q, k, v)):
        p = torch.exp(problem.logits(qi, ki, index) - tops[index])
        p = p / sums[index].clamp(min=torch.finfo(torch.float32).tiny)
        kept = problem.kept(p.shape, generator)
        delta = (dys[index] * outs[index]).sum(-1, keepdim=True)
        dlogits = p * (dys[index] @ vi.transpose(-1, -2) * kept - delta)
        add_up = lambda t, g=groups: t.unflatten(1, (-1, g)).sum(2)  # noqa: E731
        blind = problem.logits(qi, ki, index).eq(-torch.inf).all(-1, keepdim=True)
        dqs.append((dlogits @ ki * problem.scale).masked_fill(blind, torch.nan))
        dks.append(add_up(dlogits.transpose(-1, -2) @ qi) * problem.scale)
        dvs.append(add_up((p * kept).transpose(-1, -2) @ dys[index]))
        dpses.append(dlogits if problem.pse_type == 0 else dlogits * problem.scale)
        p_sink = torch.exp(problem.sink_logit() - tops[index]) / sums[index]
        dsinks.append(-(p_sink * delta).sum((0, 2, 3)))
    dpse = dsink = None
    if problem.pse is not None and problem.pse_type in (0, 1):
        dpse = sum(piece.sum_to_size(problem.pse.shape) for piece in dpses).to(problem.pse.dtype)
    if problem.sink is not None:
        dsink = sum(dsinks).to(problem.sink.dtype)
    dq = problem.joined(dqs, q.size(0), q.dtype)
    dk, dv = problem.joined(dks, k.size(0), k.dtype), problem.joined(dvs, v.size(0), v.dtype)
    return dq, dk, dv, dpse, dsink


# The operators: the same arguments under three spellings.

_SAME_NAME = ("keep_prob", "sparse_mode", "pse", "prefix", "softmax_layout", "sink", "pse_type")
_OTHER_NAME = {
    **{"scale": "scale", "scale_value": "scale", "atten_mask": "mask"},
    **{"pre_tockens": "pre", "next_tockens": "next", "pre_tokens": "pre", "next_tokens": "next"},
    **{"actual_seq_qlen": "q_ends", "actual_seq_kvlen": "kv_ends"},
}
_WITHOUT_EFFECT = {"inner_precise", "gen_mask_parallel", "sync", "softmax_in", "numels"}


def _problem(op: str, heads: int, layout: str, options: dict[str, Any]) -> _Problem:
    fields: dict[str, Any] = {}
    for name in [name for name in options if name not in _WITHOUT_EFFECT]:
        if name in _SAME_NAME or name in _OTHER_NAME:
            value = options.pop(name)
            if name.startswith("actual_seq") and isinstance(value, torch.Tensor):
                value = value.tolist()
            fields[_OTHER_NAME.get(name, name)] = value
        elif name in ("q_start_idx", "kv_start_idx"):
            start = options.pop(name)
            fields[name.removesuffix("_idx")] = start[0] if start else 0
    refuse(op, {name: value for name, value in options.items() if name not in _WITHOUT_EFFECT})
    return _Problem(op, heads, layout, **fields)


def _forward_operator(op: str):
    def kernel(query, key, value, head_num, input_layout, *positional, **options):
        options.update(zip(_POSITIONAL, positional, strict=False))
        problem = _problem(op, head_num, input_layout, options)
        seed = offset = 0
        if problem.keep_prob < 1:
            seed, offset = rng.reserve()
        problem = replace(problem, seed=seed, offset=offset)
        *tensors, numels = _forward(problem, query, key, value)
        if op.endswith("v3"):
            return *tensors, torch.tensor([seed]), torch.tensor([offset])
        return *tensors, seed, offset, numels if problem.keep_prob < 1 else 0

    return kernel


def _gradient_operator(op: str):
    def kernel(query, key, value, dy, head_num, input_layout, **options):
        statistics = [options.pop(name, None) for name in ("softmax_max", "softmax_sum")]
        out = options.pop("attention_in", None)
        seed, offset = (int(options.pop(name, None) or 0) for name in ("seed", "offset"))
        problem = _problem(op, head_num, input_layout, options)
        problem = replace(problem, seed=seed, offset=offset)
        dq, dk, dv, dpse, dsink = _backward(problem, query, key, value, dy, *statistics, out)
        if op.endswith("v2"):  # with the gradients of the rotary parts, which are refused
            return dq, dk, dv, dpse, None, None, dsink
        return dq, dk, dv, dpse, dsink

    return kernel


# Arguments of versions 1 and 3 that may be given by position.
_POSITIONAL = (
    *("pse", "padding_mask", "atten_mask", "scale", "keep_prob", "pre_tockens", "next_tockens"),
    *("inner_precise", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode"),
    *("gen_mask_parallel", "sync", "softmax_layout", "sink", "dropout_mask", "seed", "offset"),
)

REFERENCE = {
    **{
        name: _forward_operator(name)
        for name in ("npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3")
    },
    **{
        name: _gradient_operator(name)
        for name in (
            "npu_fusion_attention_grad",
            "npu_fusion_attention_grad_v2",
            "npu_fusion_attention_grad_v3",
        )
    },
}
