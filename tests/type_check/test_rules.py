"""Rules are true: the adjoint of each collective is what its types say, on two ranks."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

from tests.type_check import adjoint

# Autograd functions of the library without a rule: the check names them and stops.
WITHOUT_RULE = {
    "models.model_extras._LargestLogit": "--z-loss of Baichuan 2",
    "moe.ampipe.rows._First": "--ampipe-degree",
    "moe.hot_experts._OwnWeights": "--balanced-moe-experts",
    "tensor_parallel.two_dimensional.norm._Norm": "--tp-2d",
    "tensor_parallel.two_dimensional.linear._Linear": "--tp-2d",
    "tensor_parallel.two_dimensional.grid._ToGrid": "--tp-2d",
    "tensor_parallel.two_dimensional.grid._FromGrid": "--tp-2d",
}


def functions_without_rule() -> set[str]:
    """Autograd functions of all modules of the library."""
    import torch

    import mindspeed
    from mindspeed.spmd import rule_of

    for module in pkgutil.walk_packages(mindspeed.__path__, "mindspeed."):
        if any(part in module.name for part in ("__main__", ".triton", "quickstart.__main__")):
            continue
        try:
            importlib.import_module(module.name)
        except ImportError:
            continue
    own = [
        one
        for one in torch.autograd.Function.__subclasses__()
        if one.__module__.startswith("mindspeed.") and "triton" not in one.__module__
    ]
    return {
        f"{one.__module__.removeprefix('mindspeed.')}.{one.__name__}"
        for one in own
        if rule_of(one) is None
    }


def test_every_function_has_a_rule_or_is_listed(ranks):
    options = {"setup": "mindspeed.megatron_adaptor", "backend": None}
    (missing,) = ranks(1, functions_without_rule, **options)
    assert missing == set(WITHOUT_RULE)


NEWER = {"SinkhornKnopp"}  # than the supported Megatron


def functions_of_megatron() -> tuple[set[str], set[str]]:
    """The names that the table of rules has, and those of them that Megatron has."""
    from mindspeed.type_check import megatron

    names = {name for _, names in megatron._RULES for name in names.split()}
    return names, {one.__name__ for one in megatron.rules()}


def test_every_rule_has_a_function_of_megatron(ranks):
    ((names, found),) = ranks(
        1, functions_of_megatron, setup="mindspeed.megatron_adaptor", backend=None
    )
    assert names - found == NEWER


@pytest.mark.parametrize("case", adjoint.CASES)
def test_the_backward_of_a_collective_is_what_its_types_say(rank_pool, case):
    """<f(x), dy> = <x, f'(dy)>, with the pairing that the types define."""
    for left, right, equal in rank_pool.run(2, adjoint.pairings, case):
        assert equal, "the output is not of the type that the rule says"
        assert left == pytest.approx(right, rel=1e-12)
