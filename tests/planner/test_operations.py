"""Executed operators as kernels of a device: what is fused, in backward too, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mindspeed.megatron_adaptor  # noqa: F401 - before megatron.core
from mindspeed.instruments.clock import VirtualClock
from mindspeed.instruments.ledger import Communication
from mindspeed.planner.cluster.operations import Kernels, Operation


class _Described:
    """Rates that keep what they are asked."""

    slowdown = 1.0

    def __init__(self) -> None:
        self.kernels, self.found = Kernels(), list[Operation]()

    def operator(self, call: Any) -> float:
        self.found.append(self.kernels.operation(call))
        return 1e-6

    def communication(self, communication: Communication) -> float:
        return 0.0

    def stream(self, communication: Communication) -> str:
        return ""


def described(run: Any) -> list[Operation]:
    """The operations of a function, without those that move next to nothing."""
    rates = _Described()
    with VirtualClock.of(rates), torch.compiler.set_stance("force_eager"):
        run()
    return rates.found


def kernels(found: list[Operation]) -> list[int]:
    """Bytes of each kernel."""
    sums: list[int] = []
    for one in found:
        if one.starts:
            sums.append(0)
        sums[-1] += one.nbytes
    return sums


SIZE = 4 * 64 * 64


def test_a_fusion_of_megatron_is_a_kernel_forward_and_backward() -> None:
    """Bias and GeLU read x and write y; the gradient reads dy and x, and writes dx."""
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

    x, bias = torch.randn(64, 64, requires_grad=True), torch.zeros(64)
    y: list[torch.Tensor] = []

    def forward() -> None:
        y.append(bias_gelu_impl(x, bias))
        torch.stack([x.detach()] * 4)  # what stays inside is known when the kernel has ended

    found = kernels(described(forward))
    assert len(found) == 2
    assert sum(found) == pytest.approx((2 + 8) * SIZE, rel=0.01)
    ones, gradient, *_ = kernels(described(lambda: y[0].backward(torch.ones(64, 64))))
    assert ones == SIZE and 3 * SIZE <= gradient <= 5 * SIZE


def test_native_gradients_belong_to_the_function_of_their_forward() -> None:
    """A function in a file of Megatron's fusions, whose gradient is autograd's own."""
    names: dict[str, Any] = {}
    source = "def fusion(x):\n    return (x.sin() * x.cos()).exp()"
    exec(compile(source, "site-packages/megatron/core/fusions/some.py", "exec"), names)
    x, ones = torch.randn(64, 64, requires_grad=True), torch.ones(64, 64)
    found = described(lambda: torch.autograd.grad(names["fusion"](x), x, ones))
    assert len(found) > 8 and [one.starts for one in found].count(True) == 1
    alone = described(lambda: torch.autograd.grad((x.sin() * x.cos()).exp(), x, ones))
    assert len(alone) == len(found) and all(one.starts for one in alone)


def test_functions_that_a_job_does_not_fuse_run_one_by_one() -> None:
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_unfused

    x, rest = (torch.randn(64, 64) for _ in range(2))
    unfused = bias_dropout_add_unfused(training=True)
    found = kernels(described(lambda: unfused((x, torch.zeros(64)), rest, 0.5)))
    assert len(found) >= 3  # bias, dropout, residual


@pytest.mark.parametrize("fused", [True, False])
def test_softmax_with_scale_and_mask_is_fused_by_its_flag(fused: bool) -> None:
    from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.utils import attention_mask_func

    softmax = FusedScaleMaskSoftmax(
        False, True, AttnMaskType.causal, fused, attention_mask_func, True, 2.0
    )
    scores = torch.randn(1, 4, 64, 64).bfloat16()
    found = kernels(described(lambda: softmax.forward_torch_softmax(scores, None)))
    assert (len(found) == 1) is fused


def test_other_operators_are_kernels_of_their_own() -> None:
    x = torch.randn(64, 64)
    assert kernels(described(lambda: x.exp().neg())) == [2 * SIZE, 2 * SIZE]
    assert len(kernels(described(lambda: torch.nn.functional.dropout(x, 0.5, True)))) == 1


def test_dropout_inside_attention_stands_for_one_kernel() -> None:
    """A CPU computes scores in fp32 then; a device does what it does without dropout."""
    from mindspeed.te.attention import attend
    from mindspeed.te.masks import Visibility

    x = torch.randn(1, 2, 64, 16).bfloat16()
    causal = Visibility(64, 64, right=0)
    found = described(lambda: attend(x, x, x, causal, scale=1.0, dropout=0.5))
    scores = [one for one in found if one.attention]
    assert len(scores) == 2 and {one.stands_for for one in found} == {"attention"}
    assert {(one.keys, one.head) for one in scores} == {(32, 16)}
    assert sum(one.flops for one in scores) == 4 * 2 * 64 * 64 * 16 // 2
    [plain] = [one for one in described(lambda: attend(x, x, x, causal, scale=1.0)) if one.flops]
    assert plain.attention and plain.keys in (32, 33) and plain.head == 16
