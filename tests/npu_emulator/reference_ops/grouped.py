"""Grouped matrix products, with and without quantisation, and the feed-forward network.

Groups are those of `group_list`: cumulative ends (``group_list_type=0``) or sizes (1). Rows of a
single output that belong to no group are not written by the device; here they are NaN.
"""

from __future__ import annotations

import torch

from tests.npu_emulator.reference_ops._common import ACTIVATIONS, float_scale, refuse, require

OP = "npu_grouped_matmul"
# The codes of output_dtype are those of c10::ScalarType.
DTYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16}


def _bounds(group_list, kind):
    """Start and end of each group."""
    values = torch.as_tensor(group_list, dtype=torch.int64)
    ends = (values.cumsum(0) if kind == 1 else values).tolist()
    require(OP, all(a <= b for a, b in zip([0, *ends], ends, strict=False)), "group_list decreases")
    return list(zip([0, *ends], ends, strict=False))


def _product(x, w, b, quant, dtype, act):
    """One group: ``act(x @ w + b)`` with the quantisation of its operands undone."""
    if quant.get("antiquant_scale") is not None:
        w = w.float() + (
            0 if quant["antiquant_offset"] is None else quant["antiquant_offset"].float()
        )
        w = w * quant["antiquant_scale"].float()
    if x.dtype == torch.int8:
        y = (x.long() @ w.long() + (0 if b is None else b.long())).float()
        if quant.get("scale") is not None:
            y = y * float_scale(quant["scale"])
        if quant.get("per_token_scale") is not None:
            y = y * quant["per_token_scale"].float()[:, None]
    else:
        y = x.float() @ w.float() + (0 if b is None else b.float())
    y = ACTIVATIONS[act](y)
    return y.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else y.to(dtype)


def npu_weight_quant_batchmatmul(
    x,
    weight,
    antiquant_scale,
    antiquant_offset=None,
    quant_scale=None,
    quant_offset=None,
    bias=None,
    antiquant_group_size=0,
    inner_precise=0,
    weight_dtype=None,
):
    """``x`` times an int8 weight ``[k, n]``, ``(weight + offset) * scale`` of each column."""
    op = "npu_weight_quant_batchmatmul"
    others = {"quant_scale": quant_scale, "quant_offset": quant_offset}
    others |= {"antiquant_group_size": antiquant_group_size, "inner_precise": inner_precise}
    refuse(op, others | {"weight_dtype": weight_dtype})
    require(op, x.dtype in (torch.float16, torch.bfloat16), f"x is {x.dtype}")
    require(op, weight.dtype == torch.int8, f"weight is {weight.dtype}")
    require(op, antiquant_scale.dtype == x.dtype, f"antiquant_scale is {antiquant_scale.dtype}")
    wide = weight.float() + (0 if antiquant_offset is None else antiquant_offset.float())
    y = x.float() @ (wide * antiquant_scale.float())
    return (y if bias is None else y + bias.float()).to(x.dtype)


def npu_grouped_matmul(
    x,
    weight,
    *,
    bias=None,
    scale=None,
    antiquant_scale=None,
    antiquant_offset=None,
    per_token_scale=None,
    group_list=None,
    split_item=0,
    group_type=None,
    group_list_type=0,
    act_type=0,
    output_dtype=None,
    tuning_config=None,
    **others,
):
    """Returns one tensor per product, or for ``split_item`` 2 and 3 one tensor in a list."""
    refuse(OP, others)
    require(OP, split_item in (0, 1, 2, 3), "split_item is 0 to 3")
    require(OP, group_type in (None, -1, 0, 2), "group_type is -1, 0 or 2")
    require(OP, act_type in ACTIVATIONS, f"act_type {act_type} is not supported")
    default = torch.float16 if scale is not None else x[0].dtype
    if isinstance(output_dtype, int):
        output_dtype = DTYPES[output_dtype]
    dtype = output_dtype or default
    if group_type == 2:
        return [_products_over_k(x, weight, group_list, group_list_type, dtype)]

    single = len(weight) == 1 and weight[0].dim() == 3
    weights = list(weight[0]) if single else list(weight)
    groups = len(weights)

    def of_group(values, g):
        return None if values is None else (values[0][g] if single else values[g])

    bounds = None
    if len(x) == 1 and group_list is not None:
        bounds = _bounds(group_list, group_list_type)
        require(OP, len(bounds) == groups, "group_list has one number per weight")
        rows = [slice(*bound) for bound in bounds]
        parts = [x[0][r] for r in rows]
        per_token = [None if per_token_scale is None else per_token_scale[0][r] for r in rows]
    else:
        require(OP, len(x) == groups, "as many x as weights, or one x and a group_list")
        parts, per_token = x, per_token_scale or [None] * groups
    results = []
    for g in range(groups):
        quant = {
            "scale": of_group(scale, g),
            "antiquant_scale": of_group(antiquant_scale, g),
            "antiquant_offset": of_group(antiquant_offset, g),
            "per_token_scale": per_token[g],
        }
        results.append(_product(parts[g], weights[g], of_group(bias, g), quant, dtype, act_type))
    if split_item in (0, 1):
        return results
    joined = torch.cat(results)
    if bounds is not None and joined.size(0) < x[0].size(0):
        missing = joined.new_zeros(x[0].size(0) - joined.size(0), joined.size(1))
        joined = torch.cat(
            (joined, missing.fill_(torch.nan) if dtype.is_floating_point else missing)
        )
    return [joined]


def _products_over_k(x, weight, group_list, kind, dtype):
    """``x[:, g] @ weight[g]`` for each group g of the inner dimension: [E, M, N]."""
    require(OP, len(x) == len(weight) == 1, "group_type 2 takes one x and one weight")
    bounds = _bounds(group_list, kind)
    return torch.stack([x[0][:, a:b].float() @ weight[0][a:b].float() for a, b in bounds]).to(dtype)


def npu_grouped_matmul_add_(
    input, x, weight, group_list, *, transpose_x=True, transpose_weight=False, group_type=2,
    group_list_type=0,
):  # fmt: skip
    """``input[g] += x[g]^T @ weight[g]``, accumulated in fp32."""
    op = "npu_grouped_matmul_add_"
    require(
        op, transpose_x and not transpose_weight and group_type == 2, "only x^T @ weight over K"
    )
    require(op, input.dtype == torch.float32 and x.dtype == weight.dtype, "fp32 += one dtype")
    bounds = _bounds(group_list, group_list_type)
    total = input.view(len(bounds), x.size(1), weight.size(1))
    for g, (start, end) in enumerate(bounds):
        total[g] += x[start:end].float().t() @ weight[start:end].float()
    return input


def npu_grouped_matmul_add(input, *args, **kwargs):
    return npu_grouped_matmul_add_(input.clone(), *args, **kwargs)


def _npu_matmul_add_fp32(x, weight, C):
    """``C += x^T @ weight``, accumulated in fp32."""
    require("_npu_matmul_add_fp32", C.dtype == torch.float32, "C is fp32")
    C.add_(x.float().t() @ weight.float())


_FFN = {
    "fastgelu": ACTIVATIONS[4],
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
    "silu": ACTIVATIONS[5],
}
_GATED = {
    "geglu": torch.nn.functional.gelu,
    "swiglu": torch.nn.functional.silu,
    "reglu": torch.relu,
}


def npu_ffn(
    x, weight1, weight2, activation, *, expert_tokens=None, expert_tokens_index=None, bias1=None,
    bias2=None, inner_precise=None, output_dtype=None, **others,
):  # fmt: skip
    """``act(x @ W1 + b1) @ W2 + b2``, by expert when the weights have three dimensions."""
    refuse("npu_ffn", others)
    require("npu_ffn", activation in _FFN or activation in _GATED, f"{activation} is unknown")
    if weight1.dim() == 2:
        return _feed_forward(x, weight1, weight2, activation, bias1, bias2).to(x.dtype)
    require("npu_ffn", activation in _FFN, "gated activations have no experts")
    kind = 0 if expert_tokens is None else 1
    bounds = _bounds(expert_tokens_index if expert_tokens is None else expert_tokens, kind)
    require("npu_ffn", bounds[-1][1] == x.size(0), "the tokens of the experts add up to M")
    parts = []
    for g, (start, end) in enumerate(bounds):
        biases = (None if b is None else b[g] for b in (bias1, bias2))
        parts.append(_feed_forward(x[start:end], weight1[g], weight2[g], activation, *biases))
    return torch.cat(parts).to(x.dtype)


def _feed_forward(x, w1, w2, activation, b1, b2):
    hidden = x.float() @ w1.float() + (0 if b1 is None else b1.float())
    if activation in _GATED:
        gate, up = hidden.chunk(2, -1)
        hidden = _GATED[activation](gate) * up
    else:
        hidden = _FFN[activation](hidden)
    return hidden @ w2.float() + (0 if b2 is None else b2.float())


def npu_trans_quant_param(scale, offset=None, round_mode=0):
    """The bits of fp32 scales in the low half of int64."""
    refuse("npu_trans_quant_param", {"offset": offset, "round_mode": round_mode})
    return scale.float().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


REFERENCE = {
    "npu_grouped_matmul": npu_grouped_matmul,
    "npu_grouped_matmul.List": npu_grouped_matmul,
    "npu_grouped_matmul_add": npu_grouped_matmul_add,
    "npu_grouped_matmul_add_": npu_grouped_matmul_add_,
    "npu_ffn": npu_ffn,
    "npu_weight_quant_batchmatmul": npu_weight_quant_batchmatmul,
    "npu_trans_quant_param": npu_trans_quant_param,
}
