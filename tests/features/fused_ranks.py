"""A small GPT model with and without a fused operator, on one rank or tensor-parallel."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import gpt_ranks


@dataclass
class Results:
    """What one model computed.

    Attributes:
        tensors: loss of each token, this rank's gradients.
        saved: bytes kept for the backward.
        ops: how often each operator ran.
    """

    tensors: dict[str, torch.Tensor]
    saved: int
    ops: Counter[str]


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        self.ops[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def results(
    flags: dict[str, Any], name: str, spec: str, overrides: dict[str, Any], dtype: torch.dtype
) -> Results:
    """Run forward and backward with the flags of a feature."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    import mindspeed
    from mindspeed import session
    from mindspeed.instruments.saved import saved_for_backward

    size = dist.get_world_size()
    mindspeed.configure(**flags)
    if not parallel_state.model_parallel_is_initialized():
        gpt_ranks.start(size)
    parallel = {"tensor_model_parallel_size": size, "sequence_parallel": size > 1}
    config = gpt_ranks.config(name, bf16=dtype == torch.bfloat16, **parallel, **overrides)
    model = gpt_ranks.build(config, spec).to(dtype)
    with _Count() as count, saved_for_backward(model) as saved:
        tensors = gpt_ranks.run(model)
    session.current().detach_features()
    return Results(tensors, saved.bytes, count.ops)


def with_and_without(
    flags: dict[str, Any],
    name: str,
    spec: str,
    overrides: dict[str, Any],
    unfused: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Results, Results]:
    """With the feature's flags, and without them (with ``unfused`` in the model's config)."""
    fused = results(flags, name, spec, overrides, dtype)
    return fused, results({}, name, spec, overrides | (unfused or {}), dtype)


def assert_equal(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Compare relative to the largest value of each tensor."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        atol = tolerance * max(value.abs().max().item(), 1.0)
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_as_exact(
    fused: dict[str, torch.Tensor], plain: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> None:
    """In 16 bit: the fused model is about as near to the fp32 model as the unfused one."""
    for name, truth in exact.items():
        allowed = 2 * (plain[name] - truth).norm() + 2**-8 * truth.norm()
        assert (fused[name] - truth).norm() <= allowed, name
