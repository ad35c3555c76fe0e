"""What test_dispatch.py runs: torch_npu's own entry points, gradients by torch_npu's autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _npu() -> Any:
    import torch_npu

    return torch_npu


TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
ROUTING = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
INDICES = torch.tensor([[0, 2], [1, 2], [0, 1], [1, 2]])

# name -> (inputs that need a gradient, the call into torch_npu, the same in torch)
CASES: dict[str, tuple[tuple[torch.Tensor, ...], Callable[..., Any], Callable[..., Any]]] = {
    "linear layer of one output": (
        (randn(5, 2, 8), randn(1, 8, seed=1)),
        lambda x, w: F.linear(x, w),
        lambda x, w: F.linear(x, w),
    ),
    "gather": (
        (randn(4, 3),),
        lambda x: x.gather(1, INDICES.npu()),
        lambda x: x.gather(1, INDICES),
    ),
    "product with a vector": (
        (randn(8), randn(3, 8, 2, seed=1)),
        lambda x, y: x @ y,
        lambda x, y: x @ y,
    ),
    "rms_norm": (
        (randn(5, 8), randn(8, seed=1)),
        lambda x, g: _npu().npu_rms_norm(x, g, 1e-5)[0],
        lambda x, g: F.rms_norm(x, (8,), g, 1e-5),
    ),
    "swiglu": (
        (randn(5, 8),),
        lambda x: _npu().npu_swiglu(x),
        lambda x: F.silu(x[:, :4]) * x[:, 4:],
    ),
    "rotary_mul": (
        (randn(5, 2, 3, 8), randn(5, 1, 1, 8, seed=1), randn(5, 1, 1, 8, seed=2)),
        lambda x, c, s: _npu().npu_rotary_mul(x, c, s),
        lambda x, c, s: x * c + torch.cat((-x[..., 4:], x[..., :4]), -1) * s,
    ),
    "scaled_masked_softmax": (
        (randn(1, 2, 32, 32),),
        lambda x: _npu().npu_scaled_masked_softmax(x, x > 1, 0.5),
        lambda x: (0.5 * x).masked_fill(x > 1, -1e4).softmax(-1),
    ),
    "fusion_attention": (
        tuple(randn(2, 4, 6, 8, seed=i) for i in range(3)),
        lambda q, k, v: _npu().npu_fusion_attention(
            q, k, v, 4, "BNSD", scale=0.3, sparse_mode=2, atten_mask=TRIANGLE.npu()
        )[0],
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
    ),
    "fusion_attention with position bias": (
        (*(randn(2, 4, 6, 8, seed=i) for i in range(3)), randn(1, 4, 6, 6, seed=3)),
        lambda q, k, v, bias: _npu().npu_fusion_attention(q, k, v, 4, "BNSD", pse=bias, scale=0.5)[
            0
        ],
        lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias / 2, scale=0.5),
    ),
    "fusion_attention_v2": (
        tuple(randn(6, 2, 32, seed=i) for i in range(3)),
        lambda q, k, v: _npu().npu_fusion_attention_v2(q, k, v, 4, "SBH", scale=0.3)[0],
        lambda q, k, v: (
            F.scaled_dot_product_attention(
                *(t.unflatten(-1, (4, 8)).permute(1, 2, 0, 3) for t in (q, k, v)), scale=0.3
            )
            .permute(2, 0, 1, 3)
            .flatten(2)
        ),
    ),
    "fusion_attention_v3": (
        tuple(randn(2, 4, 6, 8, seed=i) for i in range(3)),
        lambda q, k, v: _npu().npu_fusion_attention_v3(q, k, v, 4, "BNSD", scale=0.3)[0],
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
    ),
    "scaled_dot_product_attention": (
        tuple(randn(2, 4, 6, 8, seed=i) for i in range(3)),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ),
    "moe_token_permute": (
        (randn(4, 3),),
        lambda x: _npu().npu_moe_token_permute(x, INDICES.npu())[0],
        lambda x: x[INDICES.flatten().argsort(stable=True) // 2],
    ),
    "moe_token_unpermute": (
        (randn(8, 3), randn(4, 2, seed=1)),
        lambda x, p: _npu().npu_moe_token_unpermute(x, torch.arange(8).flip(0).int().npu(), p),
        lambda x, p: (x.flip(0).view(4, 2, 3) * p[..., None]).sum(1),
    ),
    "permute and unpermute by routing map": (
        (randn(4, 3), randn(4, 3, seed=1)),
        lambda x, p: _round_trip(x, p),
        lambda x, p: x.tanh() * (p * ROUTING).sum(1, keepdim=True),
    ),
}


def _round_trip(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    routing_map = ROUTING.npu()
    permuted, _, rows = _npu().npu_moe_token_permute_with_routing_map(
        x, routing_map, num_out_tokens=8
    )
    return _npu().npu_moe_token_unpermute_with_routing_map(
        permuted.tanh(), rows, [4, 3], probs=probs, routing_map=routing_map
    )


def differentiate(name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what torch_npu gives and what torch gives: output, then each gradient."""
    inputs, on_npu, on_cpu = CASES[name]
    results = []
    for device, function in (("npu", on_npu), ("cpu", on_cpu)):
        leaves = [t.detach().to(device).requires_grad_() for t in inputs]
        out = function(*leaves)
        grads = torch.autograd.grad(out, leaves, randn(*out.shape, seed=9).to(device))
        results.append([t.detach().cpu() for t in (out, *grads)])
    return list(zip(*results, strict=True))


def shapes_against_meta(name: str) -> tuple[list[Any], list[Any]]:
    """Shapes and dtypes of the emulated call and of torch_npu's meta kernels."""
    inputs, function, _ = CASES[name]
    moved = [t.npu() for t in inputs]
    real = function(*moved)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = function(*(mode.from_tensor(t) for t in moved))
    return _described(real), _described(fake)


def _described(result: Any) -> list[Any]:
    return [(tuple(t.shape), str(t.dtype)) for t in tree_leaves(result)]


def dropout() -> tuple[float, bool, bool]:
    """Share kept by ``F.dropout``, whether the backward's mask is the forward's, repeatability."""
    x = torch.ones(64, 64, device="npu", requires_grad=True)
    torch.manual_seed(3)
    y = F.dropout(x, 0.25)
    (dx,) = torch.autograd.grad(y.sum(), x)
    torch.manual_seed(3)
    again = F.dropout(x, 0.25)
    return y.ne(0).float().mean().item(), dx.equal(y), again.equal(y)


def accumulate_in_float32() -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.ones(3, 4)
    x, dy = randn(5, 3).bfloat16(), randn(5, 4, seed=1).bfloat16()
    got = total.npu()
    _npu()._npu_matmul_add_fp32(x.npu(), dy.npu(), got)
    return got.cpu(), total + x.float().t() @ dy.float()


def wrong_argument() -> None:
    _npu().npu_rms_norm(torch.ones(2, 2).npu(), torch.ones(2).npu(), eps=1e-6)
