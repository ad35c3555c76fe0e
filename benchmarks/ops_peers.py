"""What ``benchmarks/ops.py`` compares operators with: the formula in eager torch, and liger-kernel.

A peer of an operator takes the same arguments. A backward operator's peer is autograd's backward of
the forward formula, timed without that forward. ``prepare`` does what a user of eager torch would
have done outside the timed call (reading group boundaries).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Arguments = tuple[Any, ...]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Peer:
    """The formula of a forward operator.

    Attributes:
        formula: takes the operator's arguments, or what ``prepare`` made of them.
        prepare: is not timed.
        liger: takes the arguments and returns what to time, or None without such a kernel.
    """

    formula: Callable[..., Any]
    prepare: Callable[..., Arguments] | None = None
    liger: Callable[..., Call] | None = None

    def call(self, arguments: Arguments, wrap: Callable[[Any], Any]) -> Call:
        """What to time; ``wrap`` compiles the formula, or returns it."""
        given = self.prepare(*arguments) if self.prepare else arguments
        formula = wrap(self.formula)
        return lambda: formula(*given)


@dataclass(frozen=True)
class BackwardPeer:
    """Autograd's backward of another peer's formula.

    Attributes:
        of: name of the forward operator.
        split: turns the backward operator's arguments into the forward's and the cotangents.
        liger: as for :class:`Peer`.
        inputs: positions of the forward's arguments that get a gradient; None for all floats.
    """

    of: str
    split: Callable[..., tuple[Arguments, Any]]
    liger: Callable[..., Call] | None = None
    inputs: tuple[int, ...] | None = None

    def call(self, arguments: Arguments, wrap: Callable[[Any], Any]) -> Call:
        """What to time; the graph is built here."""
        forward, cotangents = self.split(*arguments)
        peer = PEERS[self.of]
        assert isinstance(peer, Peer)
        given = peer.prepare(*forward) if peer.prepare else forward
        return backward_of(wrap(peer.formula), given, cotangents, self.inputs)


def backward_of(
    function: Callable[..., Any],
    given: Sequence[Any],
    cotangents: Any,
    inputs: Sequence[int] | None = None,
) -> Call:
    """A call that runs the backward of ``function``, again and again."""
    if inputs is None:
        inputs = [i for i, x in enumerate(given) if torch.is_tensor(x) and x.is_floating_point()]
    fresh = [x.detach().requires_grad_() if i in inputs else x for i, x in enumerate(given)]
    output, leaves = function(*fresh), [fresh[i] for i in inputs]
    return lambda: torch.autograd.grad(output, leaves, cotangents, retain_graph=True)


# ------------------------------------------------------------------------------------ the formulas


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """As Megatron and Hugging Face write it, rounded once."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (gamma.float() + offset if offset else gamma.float())).to(x.dtype)


def swiglu(x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor | None) -> torch.Tensor:
    """As Megatron writes it, in the dtype of x."""
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    y = F.silu(gate) * up
    return y if weight is None else (y * weight).to(x.dtype)


def dropout_add_norm(
    x0: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    p: float,
    eps: float,
    rms: bool,
) -> torch.Tensor:
    """As Megatron writes it: dropout, addition, and torch's norm."""
    total = F.dropout(x0, p) + residual
    if not rms:
        return F.layer_norm(total, weight.shape, weight, bias, eps)
    normed = F.rms_norm(total, weight.shape, weight, eps)
    return normed if bias is None else normed + bias


def _without_scales(
    x0: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rowscale: Any,
    layerscale: Any,
    rng: Any,
    p: float,
    eps: float,
    rms: bool,
    *_: Any,
) -> Arguments:
    return x0, residual, weight, bias, p, eps, rms


def _norm_backward(
    dout: torch.Tensor,
    dpre: Any,
    pre: torch.Tensor,
    mean: Any,
    rstd: Any,
    weight: torch.Tensor,
    rng: Any,
    x0: Any,
    rowscale: Any,
    layerscale: Any,
    p: float,
    rms: bool,
    separate: bool,
) -> tuple[Arguments, torch.Tensor]:
    bias = None if rms else weight
    return (torch.zeros_like(pre), pre, weight, bias, None, None, rng, p, 1e-5, rms), dout


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int) -> torch.Tensor:
    """As Megatron writes it, with cos and sin rounded to the dtype of x."""
    if mode == 0:
        first, second = x.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    else:
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos.to(x.dtype) + rotated * sin.to(x.dtype)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> torch.Tensor:
    """torch's own causal attention, ``[s, b, n, d]``: whichever fused kernel it has."""
    heads_first = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, is_causal=True).permute(2, 0, 1, 3)


def masked_softmax(
    x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool
) -> torch.Tensor:
    """As Megatron writes it, in fp32."""
    if causal:
        raise NotImplementedError("the formula is for a given mask")
    scores = x.float() * scale
    scores = scores if mask is None else scores.masked_fill(mask, -10000.0)
    return F.softmax(scores, -1).to(x.dtype)


def ffn(
    x: torch.Tensor, weight1: torch.Tensor, weight2: torch.Tensor, activation: str, *_: Any
) -> torch.Tensor:
    """Two products and the activation between them, without biases and experts."""
    return getattr(F, activation)(x @ weight1) @ weight2


def ring_attention_update(
    prev: torch.Tensor,
    prev_max: torch.Tensor,
    prev_sum: torch.Tensor,
    cur: torch.Tensor,
    cur_max: torch.Tensor,
    cur_sum: torch.Tensor,
    ends: None,
    layout: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As ring attention is written without it, in layout SBH."""
    if layout != "SBH":
        raise NotImplementedError(f"the formula is for SBH, not {layout}")
    most = torch.maximum(prev_max, cur_max)
    before = prev_sum * torch.exp(prev_max - most)
    now = cur_sum * torch.exp(cur_max - most)
    total = before + now
    heads = (
        prev.view(*prev.shape[:2], total.size(1), -1),
        cur.view(*cur.shape[:2], total.size(1), -1),
    )
    old, new = ((part / total)[..., :1].permute(2, 0, 1, 3) for part in (before, now))
    out = heads[0] * old + heads[1] * new
    return out.view(prev.shape).to(prev.dtype), most, total


def permute(tokens: torch.Tensor, rows: torch.Tensor, *_: Any) -> torch.Tensor:
    """Sort the places of all copies, then gather: the formula in torch_npu's documentation."""
    return tokens.index_select(0, rows.flatten().argsort() // rows.size(1))


def unpermute(
    permuted: torch.Tensor, rows: torch.Tensor, probs: torch.Tensor | None, padded: bool
) -> torch.Tensor:
    """Gather the rows of every token, weigh and add them."""
    gathered = permuted.index_select(0, rows.flatten()).view(*rows.shape, -1)
    return (gathered if probs is None else gathered * probs[..., None]).sum(1).to(permuted.dtype)


def slices(ends: torch.Tensor) -> list[slice]:
    """The rows of every group."""
    values = ends.tolist()
    return [slice(a, b) for a, b in zip([0, *values], values, strict=False)]


def grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: list[slice]
) -> torch.Tensor:
    """A product for every group."""
    parts = [x[g] @ w for g, w in zip(groups, weight, strict=True)]
    if bias is not None:
        parts = [part + b for part, b in zip(parts, bias, strict=True)]
    return torch.cat(parts)


def grouped_outer(x: torch.Tensor, dy: torch.Tensor, groups: list[slice]) -> torch.Tensor:
    """A weight gradient for every group."""
    return torch.stack([x[g].t() @ dy[g] for g in groups])


def quant_grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    per_token_scale: torch.Tensor,
    groups: list[slice],
    dtype: torch.dtype,
) -> torch.Tensor:
    """torch's int8 product for every group, then the scales."""
    parts = [torch._int_mm(x[g], w) * s for g, w, s in zip(groups, weight, scale, strict=True)]
    return (torch.cat(parts) * per_token_scale[:, None]).to(dtype)


def weight_quant_grouped_matmul(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, groups: list[slice]
) -> torch.Tensor:
    """A product with the matrix of every group, in fp32 on the CPU, as the operator defines it."""
    wide = torch.float32 if x.device.type == "cpu" else x.dtype
    matrices = (w.to(wide) * s.to(wide) for w, s in zip(weight, scale, strict=True))
    parts = [x[g].to(wide) @ w for g, w in zip(groups, matrices, strict=True)]
    return torch.cat(parts).to(x.dtype)


def groupmatmul_add(
    x: torch.Tensor, dy: torch.Tensor, groups: list[slice], grad: torch.Tensor
) -> None:
    """A weight gradient for every group, then added."""
    grad = grad.view(len(groups), x.size(1), dy.size(1))
    for g, rows in enumerate(groups):
        grad[g] += _gradient(x[rows], dy[rows])


def matmul_add(total_input: torch.Tensor, grad_output: torch.Tensor, grad: torch.Tensor) -> None:
    """The weight gradient, then added."""
    grad += _gradient(grad_output, total_input)


def _gradient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """In fp32 on the CPU, as the operators define it; elsewhere rounded, as training has it."""
    return a.t().float() @ b.float() if a.device.type == "cpu" else a.t() @ b


# ------------------------------------------------------------------------------------- liger-kernel


def has_liger() -> bool:
    """Whether liger-kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def liger_rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float, offset: float) -> Call:
    """Its RMSNorm with the Llama way of casting."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Function

    return lambda: Function.apply(x, gamma, eps, offset, "llama")


def liger_rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor, offset: float
) -> Call:
    """Its backward, told not to write into its cotangent."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Function

    given = (x, gamma, 1e-6, offset, "llama", False)
    return backward_of(Function.apply, given, dy)


def liger_swiglu(x: torch.Tensor, bias: Any, weight: Any) -> Call:
    """Its SwiGLU of two tensors, which are made outside the timed call."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Function

    gate, up = (half.contiguous() for half in x.chunk(2, -1))
    return lambda: Function.apply(gate, up)


def liger_swiglu_backward(dy: torch.Tensor, x: torch.Tensor, bias: Any, weight: Any) -> Call:
    """Its backward; it writes into what it saved, so the numbers drift and the time does not."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Function

    gate, up = (half.contiguous() for half in x.chunk(2, -1))
    return backward_of(Function.apply, (gate, up), dy)


def liger_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int) -> Call:
    """Its RoPE of queries and keys: x is the queries, the keys have one head."""
    from liger_kernel.ops.rope import LigerRopeFunction as Function

    if mode != 0:
        raise NotImplementedError("liger-kernel pairs the halves only")
    q = x.permute(1, 2, 0, 3).contiguous()  # [s, b, n, d] -> [b, n, s, d]
    angles = (cos.permute(1, 2, 0, 3)[:1, 0], sin.permute(1, 2, 0, 3)[:1, 0])
    return lambda: Function.apply(q, q[:, :1], *angles)


PEERS: dict[str, Peer | BackwardPeer] = {
    "rms_norm": Peer(rms_norm, liger=liger_rms_norm),
    "rms_norm_backward": BackwardPeer(
        "rms_norm",
        lambda dy, x, gamma, rstd, offset: ((x, gamma, 1e-6, offset), dy),
        liger_rms_norm_backward,
    ),
    "swiglu": Peer(swiglu, liger=liger_swiglu),
    "swiglu_backward": BackwardPeer(
        "swiglu", lambda dy, x, bias, weight: ((x, bias, weight), dy), liger_swiglu_backward
    ),
    "dropout_add_norm": Peer(dropout_add_norm, _without_scales),
    "dropout_add_norm_backward": BackwardPeer("dropout_add_norm", _norm_backward),
    "rotary_position_embedding": Peer(rotary, liger=liger_rotary),
    "rotary_position_embedding_backward": BackwardPeer(
        "rotary_position_embedding",
        lambda dy, cos, sin, mode: ((dy, cos, sin, mode), dy),
        inputs=(0,),
    ),
    "attention": Peer(attention),
    "attention_backward": BackwardPeer(
        "attention", lambda dout, q, k, v, *rest: ((q, k, v), dout), inputs=(0, 1, 2)
    ),
    "scaled_masked_softmax": Peer(masked_softmax),
    "scaled_masked_softmax_backward": BackwardPeer(
        "scaled_masked_softmax",
        lambda dy, y, mask, scale, causal: ((y.log() / scale, mask, scale, causal), dy),
        inputs=(0,),
    ),
    "ring_attention_update": Peer(ring_attention_update),
    "moe_permute": Peer(permute),
    "moe_unpermute": Peer(unpermute),
    "moe_unpermute_backward": BackwardPeer(
        "moe_unpermute", lambda dy, permuted, rows, probs, p: ((permuted, rows, probs, p), dy)
    ),
    "grouped_matmul": Peer(grouped_matmul, lambda x, w, b, ends: (x, w, b, slices(ends))),
    "grouped_outer": Peer(grouped_outer, lambda x, dy, ends: (x, dy, slices(ends))),
    "groupmatmul_add": Peer(groupmatmul_add, lambda x, dy, ends, grad: (x, dy, slices(ends), grad)),
    "matmul_add": Peer(matmul_add),
    "ffn": Peer(ffn),
    "quant_grouped_matmul": Peer(
        quant_grouped_matmul,
        lambda x, w, scale, b, token, ends, act, dtype: (x, w, scale, token, slices(ends), dtype),
    ),
    "weight_quant_grouped_matmul": Peer(
        weight_quant_grouped_matmul,
        lambda x, w, scale, offset, b, ends, act: (x, w, scale, slices(ends)),
    ),
}
