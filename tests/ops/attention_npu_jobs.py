"""Jobs of test_attention_npu.py on an emulated NPU."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.ops.attention import attention
from tests.ops import exact_attention


def _qkv(device: str, queries: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((queries, 2, 4, 8), (keys, 2, 2, 8), (keys, 2, 2, 8))
    qkv = [torch.randn(s, generator=generator) for s in shapes]
    return [x.to(device).requires_grad_() for x in qkv]


def gradients(device: str, options: dict[str, Any], queries: int, keys: int) -> list[torch.Tensor]:
    """Output and gradients on a device, in order SBND."""
    qkv = _qkv(device, queries, keys)
    given = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    out, _ = attention(*qkv, layout="SBND", scale=0.3, **given)
    (out * torch.linspace(-1, 2, out.numel()).view(out.shape).to(device)).sum().backward()
    return [out.detach().cpu(), *(x.grad.cpu() for x in qkv)]


def npu_and_cpu(*arguments: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return gradients("npu", *arguments), gradients("cpu", *arguments)


def npu_and_exact(
    options: dict[str, Any], queries: int, keys: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output, log-sum-exp and gradients on the device, and written out in float64."""
    qkv = [x.detach() for x in _qkv("cpu", queries, keys)]
    packed = options.get("layout") == "TND"
    qkv = [x[:, 0] for x in qkv] if packed else qkv
    given = {"layout": "SBND", "scale": 0.3, **options}
    leaves = [x.npu().requires_grad_() for x in qkv]
    moved = {
        name: x.npu() if isinstance(x, torch.Tensor) and not name.startswith("cu_") else x
        for name, x in given.items()
    }
    out, lse = attention(*leaves, **moved)
    dout = torch.linspace(-1, 2, out.numel()).view(out.shape)
    grads = torch.autograd.grad(out, leaves, dout.npu())
    ours = [x.detach().cpu() for x in (out, lse, *grads)]
    return ours, exact_attention.with_gradients(*qkv, dout, **given)


def calls(
    options: dict[str, Any], queries: int, keys: int, lengths: dict[str, torch.Tensor] | None = None
) -> list[tuple[str, int, Any]]:
    """Operators of torch_npu that run, with their sparse mode and the shape of their mask."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from mindspeed.ops import _attention_npu
    from mindspeed.ops.attention_problem import AttentionProblem

    seen: list[tuple[str, int, Any]] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "npu" and "fusion_attention" in func._schema.name:
                names = [argument.name for argument in func._schema.arguments]
                given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
                mask = given.get("atten_mask")
                name = func._schema.name.removeprefix("npu::")
                shape = None if mask is None else tuple(mask.shape)
                seen.append((name, given.get("sparse_mode", 0), shape))
            return func(*args, **(kwargs or {}))

    given = {n: x.to("npu") if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    problem = AttentionProblem(**{"layout": "SBND", "scale": 0.3, **given, **(lengths or {})})
    q, k, v = (x.detach() for x in _qkv("npu", queries, keys))
    if lengths:
        q, k, v = (x[:, 0] for x in (q, k, v))
    with Record():
        out, lse = _attention_npu.forward(q, k, v, *problem.options())
        _attention_npu.backward(out, q, k, v, out, lse, *problem.options(), False)
    return seen


def dropout() -> dict[str, torch.Tensor]:
    """The mask of forward and backward, read off with unit vectors, and the generator's state."""
    q, k, _ = (x.detach() for x in _qkv("npu", 6, 8))
    torch.npu.manual_seed(3)
    generator = torch.npu.default_generators[0]
    v = torch.eye(8).expand(2, 2, 8, 8).permute(2, 0, 1, 3).npu().requires_grad_()
    out, _ = attention(q * 0, k * 0, v, layout="SBND", dropout=0.5)
    moved = generator.get_offset()
    other, _ = attention(q * 0, k * 0, v, layout="SBND", dropout=0.5)
    dout = torch.zeros_like(out)
    dout[..., 0] = torch.arange(1.0, 7.0).view(6, 1, 1).npu()
    (dv,) = torch.autograd.grad(out, v, dout)
    kept, other = ((x.detach() * 8).cpu() for x in (out, other))
    return {"kept": kept, "other": other, "dv": dv.cpu(), "moved": torch.tensor(moved)}
