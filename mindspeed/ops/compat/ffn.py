"""``npu_ffn``: a feed-forward network, or one per expert, in one call.

    y = act(x @ W1 + b1) @ W2 + b2

Forward only. With int8 operands it is composed of the quantised products:

    int8 x and weights     y = ((act((x @ W1 + b1) * deq1) * scale + offset) @ W2 + b2) * deq2
    int8 weights           W' = (W + antiquant_offset) * antiquant_scale

Source: torch_npu's ``npu_ffn``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mindspeed.ops._check import FLOATS, ArgumentCheck
from mindspeed.ops._numerics import WORKLOAD_ROWS, accumulation_dtype, random
from mindspeed.ops.compat._activations import GATED, PLAIN, apply
from mindspeed.ops.compat.quant_gmm import QUANT_GROUPED_MATMUL
from mindspeed.ops.compat.weight_quant_gmm import dequantised
from mindspeed.ops.grouped_matmul import GROUPED_MATMUL, cumulative, sample_ends
from mindspeed.ops.registry import Operator, plain_torch, torch_npu

__all__ = ["npu_ffn"]

_check = ArgumentCheck("npu_ffn")


def npu_ffn(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    *,
    expert_tokens: Tensor | Sequence[int] | None = None,
    expert_tokens_index: Tensor | Sequence[int] | None = None,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    deq_scale1: Tensor | None = None,
    deq_scale2: Tensor | None = None,
    antiquant_scale1: Tensor | None = None,
    antiquant_scale2: Tensor | None = None,
    antiquant_offset1: Tensor | None = None,
    antiquant_offset2: Tensor | None = None,
    inner_precise: int | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Apply two linear layers with an activation between them.

    Args:
        x: ``[..., K1]``; fp32, fp16, bf16, or int8 with quantised weights. Rows sorted by expert.
        weight1: ``[K1, N1]``, or ``[E, K1, N1]`` with experts.
        weight2: ``[K2, N2]``, or ``[E, K2, N2]``; ``K2`` is ``N1``, half of it with a gate.
        activation: fastgelu, gelu, relu, silu; geglu, swiglu, reglu (without experts).
        expert_tokens: rows of each expert, int64 tensor or list.
        expert_tokens_index: row after the last of each expert, instead of ``expert_tokens``.
        bias1: ``[N1]`` or ``[E, N1]``; int32 with an int8 ``x``.
        bias2: ``[N2]`` or ``[E, N2]``; int32 with an int8 ``x``.
        scale: int8 ``x``: ``[1]`` or ``[E]``, of the second product's input.
        offset: int8 ``x``: added after ``scale``.
        deq_scale1: int8 ``x``: ``[N1]`` or ``[E, N1]``, fp32 or its bits in int64.
        deq_scale2: int8 ``x``: ``[N2]`` or ``[E, N2]``.
        antiquant_scale1: int8 weights: ``[N1]`` or ``[E, N1]``.
        antiquant_scale2: int8 weights: ``[N2]`` or ``[E, N2]``.
        antiquant_offset1: int8 weights: like its scale.
        antiquant_offset2: int8 weights: like its scale.
        inner_precise: accepted and not used: sums are in fp32.
        output_dtype: int8 ``x``: fp16 (default) or bf16; otherwise that of ``x``.

    Returns:
        ``[..., N2]``.

    Raises:
        OperatorError: wrong dtype, shape, activation or number of tokens; both kinds of token
            counts; both kinds of quantisation; an argument that requires a gradient.
    """
    quant = {"scale": scale, "deq_scale1": deq_scale1, "deq_scale2": deq_scale2}
    anti = {"antiquant_scale1": antiquant_scale1, "antiquant_scale2": antiquant_scale2}
    offsets = {"antiquant_offset1": antiquant_offset1, "antiquant_offset2": antiquant_offset2}
    biases = {"bias1": bias1, "bias2": bias2}
    _check_layers(x, weight1, weight2, activation)
    _check.require(
        expert_tokens is None or expert_tokens_index is None,
        "expert_tokens_index", "None beside expert_tokens", expert_tokens_index,
    )  # fmt: skip
    _check_vectors(x, weight1, weight2, {**biases, "offset": offset, **quant, **anti, **offsets})
    quantised = any(value is not None for value in quant.values())
    antiquantised = any(value is not None for value in anti.values())
    _check.require(
        not (quantised and antiquantised), "antiquant_scale1", "None beside deq_scale1",
        antiquant_scale1,
    )  # fmt: skip
    _check.forward_only(x=x, weight1=weight1, weight2=weight2, bias1=bias1, bias2=bias2)

    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    ends = _ends(rows, weight1, expert_tokens, expert_tokens_index)
    if quantised or x.dtype == torch.int8:
        for name, value in quant.items():
            _check.require(value is not None, name, "a tensor for an int8 x", None)
        out = _quantised(
            rows, weight1, weight2, activation, bias1, bias2, scale, offset, deq_scale1,
            deq_scale2, ends, output_dtype or torch.float16,
        )  # fmt: skip
        return out.view(*x.shape[:-1], weight2.shape[-1])
    _check.dtype(FLOATS, x=x)
    wanted = output_dtype or x.dtype
    _check.require(wanted == x.dtype, "output_dtype", f"{x.dtype} like x, or None", output_dtype)
    if antiquantised:
        for name, value in anti.items():
            _check.require(value is not None, name, "a tensor for int8 weights", None)
        wide = accumulation_dtype(x)
        assert antiquant_scale1 is not None and antiquant_scale2 is not None
        weight1 = dequantised(weight1, antiquant_scale1, antiquant_offset1, wide).to(x.dtype)
        weight2 = dequantised(weight2, antiquant_scale2, antiquant_offset2, wide).to(x.dtype)
    _check.same("dtype", x=x, weight1=weight1, weight2=weight2)
    experts = weight1.dim() == 3
    out = FFN(rows, weight1, weight2, activation, bias1, bias2, ends if experts else None)
    return out.view(*x.shape[:-1], weight2.shape[-1])  # type: ignore[no-any-return]


def _check_layers(x: Tensor, weight1: Tensor, weight2: Tensor, activation: str) -> None:
    _check.choice((*PLAIN, *GATED), activation=activation)
    _check.tensor(x=x)
    _check.require(x.dim() > 0, "x", "at least 1 dimension", x)
    _check.rank(2, 3, weight1=weight1)
    _check.rank(weight1.dim(), weight2=weight2)
    _check.require(
        weight1.dim() == 2 or activation in PLAIN, "activation",
        f"one of {', '.join(PLAIN)} with experts", activation,
    )  # fmt: skip
    inner = weight1.shape[-1] // (2 if activation in GATED else 1)
    _check.shape((*weight1.shape[:-2], x.shape[-1], weight1.shape[-1]), weight1=weight1)
    _check.shape((*weight1.shape[:-2], inner, weight2.shape[-1]), weight2=weight2)
    _check.same("device", x=x, weight1=weight1, weight2=weight2)


def _check_vectors(
    x: Tensor, weight1: Tensor, weight2: Tensor, vectors: Mapping[str, Tensor | None]
) -> None:
    """Check biases, scales and offsets, by name."""
    numbers = (*FLOATS, torch.int32, torch.int64)  # some hold the bits of fp32 numbers
    for name, value in vectors.items():
        if value is None:
            continue
        _check.dtype(FLOATS if x.is_floating_point() else numbers, **{name: value})
        _check.same("device", x=x, **{name: value})
        shape = (*weight1.shape[:-2], (weight1 if name.endswith("1") else weight2).shape[-1])
        shapes = [(1,), weight1.shape[:-2]] if name in ("scale", "offset") else [shape]
        allowed = " or ".join(str(tuple(one)) for one in shapes)
        _check.require(value.shape in shapes, name, f"shape {allowed}", tuple(value.shape))


def _ends(
    rows: Tensor,
    weight1: Tensor,
    expert_tokens: Tensor | Sequence[int] | None,
    expert_tokens_index: Tensor | Sequence[int] | None,
) -> Tensor:
    if weight1.dim() == 2:
        return torch.full((1,), rows.shape[0], dtype=torch.int64, device=rows.device)
    given, name = expert_tokens, "expert_tokens"
    if expert_tokens_index is not None:
        given, name = expert_tokens_index, "expert_tokens_index"
    ends = cumulative(_check, name, given, rows, sizes=name == "expert_tokens")
    _check.shape(weight1.shape[:1], **{name: ends})
    return ends


def _quantised(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    bias1: Tensor | None,
    bias2: Tensor | None,
    scale: Any,
    offset: Tensor | None,
    deq_scale1: Any,
    deq_scale2: Any,
    ends: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    _check.dtype((torch.int8,), x=x, weight1=weight1, weight2=weight2)
    _check.choice((torch.float16, torch.bfloat16), output_dtype=dtype)

    def stacked(value: Tensor | None, rank: int) -> Tensor | None:
        return value if value is None or value.dim() == rank else value.unsqueeze(0)

    product = lambda x, w, deq, bias: QUANT_GROUPED_MATMUL(  # noqa: E731
        x, stacked(w, 3), stacked(deq, 2), stacked(bias, 2), None, ends, 0, dtype
    )
    hidden = apply(activation, product(x, weight1, deq_scale1, bias1).float())
    group = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True)
    of_row = lambda value: value.float().expand(ends.shape[0])[group].unsqueeze(1)  # noqa: E731
    hidden = hidden * of_row(scale)
    if offset is not None:
        hidden = hidden + of_row(offset)
    hidden = hidden.round().clamp(-128, 127).to(torch.int8)
    return product(hidden, weight2, deq_scale2, bias2)  # type: ignore[no-any-return]


def _reference(
    x: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    activation: str,
    bias1: Tensor | None,
    bias2: Tensor | None,
    ends: Tensor | None,
) -> Tensor:
    def product(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        if ends is None:
            return x @ w if bias is None else torch.addmm(bias.to(x.dtype), x, w)
        return GROUPED_MATMUL(x, w, bias, ends)  # type: ignore[no-any-return]

    hidden = product(x, weight1, bias1)
    if activation not in _ONE_KERNEL:
        hidden = hidden.to(accumulation_dtype(x))
    return product(apply(activation, hidden).to(x.dtype), weight2, bias2)


_ONE_KERNEL = ("gelu", "relu", "silu")
"""Activations that torch computes in fp32 inside one kernel, whatever the dtype."""


def _npu(*operands: Any) -> Tensor:
    x, weight1, weight2, activation, bias1, bias2, ends = operands
    if not x.shape[0] or x.dtype.itemsize != 2:
        return _reference(*operands)
    tokens = None if ends is None else ends.tolist()  # the op takes numbers of the host
    return torch.ops.npu.npu_ffn(  # type: ignore[no-any-return]
        x, weight1, weight2, activation, expert_tokens_index=tokens, bias1=bias1, bias2=bias2
    )


def _fake(x: Tensor, weight1: Tensor, weight2: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight2.shape[-1])


def _flops(x: Any, w1: Any, w2: Any, *unused: Any, out_shape: Any = None, **more: Any) -> int:
    return 2 * int(x[0]) * (int(w1[-2]) * int(w1[-1]) + int(w2[-2]) * int(w2[-1]))


def _samples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    for activation in (*PLAIN, *GATED):
        x, w1 = random((5, 6), dtype), random((6, 8), dtype, seed=1)
        w2 = random((8 if activation in PLAIN else 4, 3), dtype, seed=2)
        b1, b2 = random((8,), dtype, seed=3), random((3,), dtype, seed=4)
        yield x, w1, w2, activation, b1, b2, None
    w1, w2 = random((3, 6, 8), dtype, seed=1), random((3, 8, 5), dtype, seed=2)
    b1, b2 = random((3, 8), dtype, seed=3), random((3, 5), dtype, seed=4)
    yield random((7, 6), dtype), w1, w2, "gelu", b1, b2, sample_ends((2, 0, 5))
    yield random((7, 6), dtype), w1, w2, "silu", None, None, sample_ends((0, 7, 0))
    yield random((0, 6), dtype), w1, w2, "relu", None, b2, sample_ends((0, 0, 0))


def _workload(hidden: int, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    x = torch.ones(WORKLOAD_ROWS, hidden, dtype=dtype, device=device)
    weight1 = torch.ones(hidden, 1024, dtype=dtype, device=device)
    return x, weight1, weight1.t().contiguous(), "silu", None, None, None


FFN = Operator(
    "ffn(Tensor x, Tensor weight1, Tensor weight2, str activation, Tensor? bias1, Tensor? bias2,"
    " Tensor? ends) -> Tensor",
    reference=_reference,
    fake=_fake,
    cuda=[plain_torch(_reference)],
    npu=[torch_npu(_npu, "npu_ffn", note="the plain formula runs for fp32")],
    flops=_flops,
    samples=_samples,
    workload=_workload,
    public="mindspeed.ops.ffn.npu_ffn",
)
