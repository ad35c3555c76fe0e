"""Linear layers over tensor-parallel ranks: of Transformer Engine, of the local spec, with LoRA."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.lazy import needs
from tests.te import linear_ranks
from tests.te.linear_ranks import SCALE, Case

needs("megatron.core")

SETUP = "tests.support.warm"
KERNELS = {
    ("column", True): ("gather_matmul", "matmul_scatter"),
    ("column", False): ("matmul", "matmul_reduce"),
    ("row", True): ("matmul_scatter", "gather_matmul"),
    ("row", False): ("matmul_reduce", "matmul"),
}
"""Parallel mode and sequence parallelism: the products of the forward and the backward pass."""


def truth(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output and gradients of the layer that is not sharded."""
    tensors = linear_ranks.whole(dtype)
    grad = tensors.pop("grad")
    for tensor in tensors.values():
        tensor.requires_grad_()
    out = F.linear(tensors["x"], tensors["weight"], tensors["bias"] if case.bias else None)
    if case.lora:
        out = out + SCALE * F.linear(F.linear(tensors["x"], tensors["A"]), tensors["B"])
    out.backward(grad)
    grads = {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
    if case.frozen:
        del grads["weight"]
        grads.pop("bias", None)
    return {"out": out.detach(), **grads}


def joined(case: Case, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put shards together and sum partial gradients."""
    if case.mode == "column":
        dims = {"out": 2, "weight": 0, "bias": 0, "B": 0} | ({"x": 0} if case.sp else {})
        partial = {"A"}
    else:
        dims = {"x": 2, "weight": 1, "A": 1} | ({"out": 0} if case.sp else {})
        partial = {"B"} | ({"bias"} if case.sp else set())
    found = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if name in dims:
            found[name] = torch.cat(values, dims[name])
        elif name in partial:
            found[name] = torch.stack(values).sum(0)
        else:
            assert all(torch.equal(values[0], value) for value in values)
            found[name] = values[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 4])
def test_sharded_layers_equal_the_whole_layer(size, ranks):
    found = ranks(size, linear_ranks.steps, torch.float64, setup=SETUP)
    for case in (case for case in linear_ranks.cases(size) if case.kind != "local"):
        ours = joined(case, [part[case.name] for part in found])
        expected = truth(case, torch.float64)
        assert ours.keys() == expected.keys(), case
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-12, msg=f"{case} {name}")


def test_layers_communicate_and_save_what_megatrons_own_do(ranks):
    (found, _) = ranks(2, linear_ranks.costs, setup=SETUP)
    for case in linear_ranks.cases(2):
        calls, saved, of_x = found[case.name]
        if case.lora:  # one collective for the layer and its adapter
            megatron = found[case._replace(kind="local", lora=False).name][0]
            assert _calls(calls) == _calls(megatron), case
            continue
        assert calls == found[case._replace(kind="local").name][0], case
        if case.kind != "local":
            assert saved == (0 if case.frozen else of_x), case


def _calls(counted):
    return {(phase, op): count for (phase, op, _), count in counted.items()}


def test_a_gathered_input_may_be_saved_instead_of_gathered_again(ranks):
    found = ranks(2, linear_ranks.kept_gathers, setup=SETUP)[0]
    calls, saved, of_x = found["False"]
    assert (calls, saved) == (2, of_x)
    calls, saved, of_x = found["True"]
    assert (calls, saved) == (1, 2 * of_x)


@pytest.mark.slow
def test_replaced_kernels_serve_all_linear_layers_in_both_directions(ranks):
    found = ranks(2, linear_ranks.with_replaced_kernels, 2, setup=SETUP)[0]
    for case in linear_ranks.cases(2):
        if case.kind == "local":
            continue
        calls, ours, plain = found["steps"][case.name]
        forward, backward = KERNELS[case.mode, case.sp]
        assert calls == [(forward, True), (backward, False)], case
        for name, value in plain.items():
            torch.testing.assert_close(
                ours[name], value, rtol=1e-5, atol=1e-5, msg=f"{case} {name}"
            )
    # Two layers with two column and two row layers each; the output layer is a column layer.
    expected = {("gather_matmul", True): 5, ("matmul_scatter", True): 4}
    expected |= {("gather_matmul", False): 4, ("matmul_scatter", False): 5}
    for spec, (before, replaced, after) in found["losses"].items():
        assert found["calls"][spec] == expected, spec
        assert replaced == pytest.approx(before, rel=1e-6)
        assert after == before
    assert found["left"] == [], "detaching restores the formulas"


def test_fp8_blocks_are_quantised_alike_on_one_and_on_more_ranks(ranks):
    for found in ranks(2, linear_ranks.fp8_steps, setup=SETUP):
        assert len(found) == 16
        assert max(found.values()) < 1e-5, found
