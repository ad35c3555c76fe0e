"""Tensors of a planned step are, the first time and again, what torch makes of real ones."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from mindspeed.ops.npu_matmul_add import npu_matmul_add_fp32
from mindspeed.planner.count import planned_tensors
from mindspeed.planner.count.planned_tensors import PlannedTensors


def inputs() -> tuple[torch.Tensor, ...]:
    """A matrix, a strided one that begins inside its storage, one element, and no element."""
    return torch.ones(4, 6), torch.ones(6, 9)[1:5, ::2], torch.ones(1), torch.ones(0, 6)


def written(call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the inputs, too: an operator may change what they are."""

    def run(*given: torch.Tensor) -> Any:
        return call(*given), given

    return run


CALLS: dict[str, Callable[..., Any]] = {
    "sum of two": lambda x, y, one, none: x[:, :5] + y,
    "in place": lambda x, y, one, none: x.add_(one),
    "into an argument": lambda x, y, one, none: torch.add(x, one, out=x),
    "into another": lambda x, y, one, none: [
        (torch.mul(x, one, out=out), out) for out in (torch.empty(4, 6), torch.empty(4, 6))
    ],
    "into one of other shape": lambda x, y, one, none: torch.mul(x, one, out=torch.empty(0)),
    "a view": lambda x, y, one, none: x.view(6, 4),
    "a view of a view": lambda x, y, one, none: y.t()[2:],
    "several views": lambda x, y, one, none: (x.chunk(3, 1), y.unbind(), x.split([1, 3])),
    "turned in place": written(lambda x, y, one, none: x.t_()),
    "resized": written(lambda x, y, one, none: x.resize_(2, 2)),
    "another storage": written(lambda x, y, one, none: x.set_(y.untyped_storage(), 3, (2,), (4,))),
    "maybe a copy": lambda x, y, one, none: (x.contiguous(), y.contiguous(), y.reshape(20)),
    "several results": lambda x, y, one, none: torch.ops.aten.native_layer_norm(
        x, [6], None, None, 1e-5
    ),
    "values and places": lambda x, y, one, none: x.max(1),
    "a list of tensors": lambda x, y, one, none: torch.cat([x, none, x]),
    "tensors of a list": lambda x, y, one, none: torch._foreach_mul([x, y], 2.0),
    "list in place": written(lambda x, y, one, none: torch._foreach_add_([x, y], 1.0)),
    "numbers of three kinds": lambda x, y, one, none: [
        torch.full((2,), value) for value in (1, 1.0, True)
    ],
    "a new dtype": lambda x, y, one, none: (x.to(torch.bfloat16), x.long() / 2),
    "only zeros": lambda x, y, one, none: (torch.zeros(3), y.new_zeros(2, 2), torch.zeros_like(y)),
    "expanded": lambda x, y, one, none: one.expand(3, 4),
    "nothing": lambda x, y, one, none: (none * 2, none.sum(0)),
    "index": lambda x, y, one, none: x[torch.tensor([0, 2])],
    "conjugated": lambda x, y, one, none: torch.view_as_complex(x.view(4, 3, 2)).conj().imag,
}


def seen(found: Any) -> list[Any]:
    """Metadata of tensors, and which of them share a storage."""
    leaves = tree_leaves(found)
    places: dict[int, int] = {}
    return [
        (
            (x.shape, x.stride(), x.storage_offset(), x.dtype, x.device, x.requires_grad),
            (x.is_conj(), x.is_neg(), x.untyped_storage().nbytes()),
            places.setdefault(x.untyped_storage()._cdata, len(places)),
            next(i for i, other in enumerate(leaves) if other is x),
        )
        for x in leaves
    ]


def kept(call: Callable[..., Any]) -> list[Any]:
    """Also the inputs of a call: what of them is shared with the results."""
    given = inputs()
    return seen((call(*given), given))


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_real_tensors_however_often(name: str) -> None:
    real = kept(CALLS[name])
    with PlannedTensors():
        for _ in range(3):
            assert kept(CALLS[name]) == real


def test_a_view_of_freed_memory_does_not_get_it_back() -> None:
    with PlannedTensors():
        x, again = torch.ones(4, 6), torch.ones(4, 6)
        x.view(24)
        again.untyped_storage().resize_(0)
        assert again.view(24).shape == (24,)
        assert again.untyped_storage().nbytes() == 0
        assert x.untyped_storage().nbytes() == 96


def test_a_result_belongs_to_the_default_dtype_and_to_inference() -> None:
    def dtypes() -> list[torch.dtype]:
        return [torch.full((2,), 1.0).dtype, torch.arange(2).div(2).dtype]

    found: dict[torch.dtype, list[torch.dtype]] = {}
    with PlannedTensors():
        for default in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(default)
            try:
                found[default] = dtypes()
            finally:
                torch.set_default_dtype(torch.float32)
            assert found[default] == [default, default]
        for inference in (False, True, False):
            with torch.inference_mode(inference):
                assert (torch.ones(2) + 1).is_inference() == inference


def test_gradients_pass_results_that_were_made_again() -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.silu(x @ w).chunk(2, -1)
        (y[0] * y[1]).sum().backward()
        return y[0]

    with PlannedTensors():
        for _ in range(3):
            w = torch.nn.Parameter(torch.ones(6, 8))
            y = step(torch.ones(4, 6), w)
            assert y.requires_grad
            assert w.grad is not None
            assert w.grad.shape == (6, 8)


def test_torch_propagates_each_kind_of_call_once(monkeypatch) -> None:
    """What has been learned is pickled for processes that are forked later."""
    propagated: list[Any] = []
    monkeypatch.setattr(planned_tensors, "_results", {})
    monkeypatch.setattr(planned_tensors, "_own", [])

    def counted(mode: PlannedTensors, func: Any, *given: Any) -> Any:
        if func.namespace in ("aten", "mindspeed"):
            propagated.append(func)
        return before(mode, func, *given)

    before = PlannedTensors._propagate
    monkeypatch.setattr(PlannedTensors, "_propagate", counted)

    def calls(times: int) -> list[int]:
        counts = []
        with PlannedTensors():
            x, gradient = torch.ones(4, 6), torch.ones(6, 6)
            for _ in range(times):
                npu_matmul_add_fp32(x, x, gradient)  # in place, returns nothing
                y = torch.ops.aten.add.Tensor(x, x)
                torch.ops.aten.mul_.Tensor(y, 2)
                torch.ops.aten.view.default(y, [24])
                torch.ops.aten.split.Tensor(y, 2)
                torch.ops.aten.max.dim(y, 1)
                counts.append(len(propagated))
        return counts

    counts = calls(3)
    assert counts[0] > 3
    assert counts[1:] == counts[:1] * 2
    found = pickle.loads(pickle.dumps(planned_tensors.learned()))
    monkeypatch.setattr(planned_tensors, "_results", {})
    propagated.clear()
    planned_tensors.learn(found)
    planned_tensors.learn([(("mindspeed::not_registered_here", "default"), (), None)])
    known = calls(1)[0]
    assert counts[0] - known == len(found) > 4
