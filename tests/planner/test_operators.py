"""Every operator can be counted without values: a fake kernel, and FLOPs where it multiplies.

The oracle of a formula is the operator's definition in plain torch, whose matrix products are
counted one by one.
"""

from __future__ import annotations

import ast
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import mindspeed
from mindspeed.instruments.flops import FlopCounter, formula_of
from mindspeed.ops import registry
from mindspeed.ops.attention import ATTENTION, ATTENTION_BACKWARD
from mindspeed.ops.attention_problem import AttentionProblem
from mindspeed.ops.catalog import operators

ALONE = [one for one in operators() if not one.communicates]
COMMUNICATE = [one for one in operators() if one.communicates]
PACKAGE = Path(mindspeed.__file__).parent
MAKERS = {"Library", "Operator", "custom_op", "triton_op", "load_library", "load_inline"}
PAIRS = ("attention", "attention_backward")
"""Formulas that count what the mask shows, which the definition computes in whole tiles."""


def named(found):
    return pytest.mark.parametrize("operator", found, ids=[one.name for one in found])


def flops_of(call):
    with FlopCounter() as counter:
        result = call()
    return counter.count.total, result


def samples(operator, count=6):
    return itertools.islice(operator.samples(operator.dtypes[0]), count)


def fakes(mode, sample):
    """The sample with FakeTensors in place of all tensors on the device of the operands."""
    return tree_map_only(torch.Tensor, mode.from_tensor, sample)


def shapes(results):
    return [
        (x.shape, x.dtype, x.stride()) for x in tree_leaves(results) if isinstance(x, torch.Tensor)
    ]


@named(ALONE)
def test_a_fake_kernel_says_what_the_kernel_returns(operator):
    for sample in samples(operator):
        expected = shapes(operator(*tree_map_only(torch.Tensor, torch.clone, sample)))
        with FakeTensorMode() as mode:
            assert shapes(operator(*fakes(mode, sample))) == expected


@named(ALONE)
def test_flops_are_the_products_of_the_definition(operator):
    formula = formula_of(operator.overload._overloadpacket)
    if operator.name in PAIRS:
        assert formula is not None
        return
    for sample in samples(operator):
        copies = tree_map_only(torch.Tensor, torch.clone, sample)
        # The first call may try out what the processor can do, with products of its own.
        operator.reference(*tree_map_only(torch.Tensor, torch.clone, sample))
        products, _ = flops_of(lambda copies=copies: operator.reference(*copies))
        counted, _ = flops_of(lambda sample=sample: operator(*sample))
        assert counted == products
        assert (formula is not None) or products == 0


@named(COMMUNICATE)
def test_what_communicates_has_a_fake_kernel_and_a_formula(operator):
    """They multiply, all of them; tests/ops/test_group.py compares their formulas on ranks."""
    assert has_fake_kernel(f"mindspeed::{operator.name}")
    assert formula_of(operator.overload._overloadpacket) is not None


def has_fake_kernel(name):
    return torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None


def test_every_operator_has_a_fake_kernel():
    names = {one.name for one in operators()}
    defined = {
        name.removeprefix("mindspeed::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("mindspeed::")
    }
    assert defined == names
    assert all(has_fake_kernel(f"mindspeed::{name}") for name in defined)


@pytest.mark.slow
def test_operators_are_defined_in_the_files_of_the_catalogue_and_nowhere_else():
    """So the tests above see every operator of the package, whatever its namespace."""
    list(operators())  # imports the catalogue
    definition = Path(registry.__file__)
    for path in sorted(PACKAGE.rglob("*.py")):
        made = made_in(ast.parse(path.read_text()))
        if path != definition:
            assert not made - {"Operator"}, f"{path} registers an operator by itself: {made}"
            module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            assert not made or module in sys.modules, f"{path} is not in the catalogue"
    assert {"Library", "register_fake", "register_autograd"} <= made_in(
        ast.parse(definition.read_text())
    )


def made_in(tree):
    """Names in a file that make operators or change torch's registrations of them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found |= {name} & MAKERS
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.library":
            found.add(node.attr)
        if isinstance(node, ast.ImportFrom) and node.module == "torch.library":
            found |= {name.name for name in node.names}
    return found


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_attention_counts_the_same_with_and_without_values(backward):
    """For every mask, packed sequences and dropout included, whatever has no values.

    Lengths of packed sequences are values on the host, which a plan makes and keeps real.
    """
    operator = ATTENTION_BACKWARD if backward else ATTENTION
    at = 6 if backward else 3  # options begin behind the tensors
    for sample in operator.samples(torch.float32):
        problem = AttentionProblem(*(sample[at:-1] if backward else sample[at:]))
        expected, result = flops_of(lambda sample=sample: operator(*sample))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            given = list(fakes(mode, sample))
            for number, name in ((4, "cu_q"), (5, "cu_k")):
                given[at + number] = getattr(problem, name)
            counted, faked = flops_of(lambda given=given: operator(*given))
        assert counted == expected
        assert shapes(faked) == shapes(result)
        assert (expected > 0) == all(x.numel() for x in sample[:at])


def test_lengths_without_values_are_refused_by_torch():
    """Fake lengths of packed sequences have no FLOPs: nobody guesses them."""
    packed = next(s for s in ATTENTION.samples(torch.float32) if s[3 + 4] is not None)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError):
        flops_of(lambda: ATTENTION(*fakes(mode, packed)))


def test_an_operator_cannot_be_defined_without_a_fake_kernel():
    with pytest.raises(TypeError, match="fake"):
        registry.Operator("no_fake(Tensor x) -> Tensor", reference=torch.clone, samples=samples)
