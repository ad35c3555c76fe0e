"""The rules of :mod:`mindspeed.spmd` as those of the checker of ``spmd_types``.

An autograd function without a rule is an error of the checker, which names it: nothing is passed
silently.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import spmd_types
import torch
import torch.distributed as dist
from spmd_types import MeshAxis
from spmd_types import _checker as checker
from spmd_types.runtime import (
    register_autograd_function,
    register_local_autograd_function,
)

from mindspeed.journal import Journal
from mindspeed.spmd import (
    Attaches,
    ByArguments,
    Collective,
    Columns,
    Communication,
    I,
    Local,
    P,
    Passes,
    Product,
    R,
    Recomputed,
    Rule,
    Token,
    Type,
    V,
    arguments_of,
    rule_of,
)
from mindspeed.type_check import megatron, operators
from mindspeed.type_check.tensor_types import OWNER, WrongType, give, types_of


def install(journal: Journal) -> None:
    """Tell the checker all rules: Megatron's, and those beside the functions of this library.

    Args:
        journal: keeps what is changed in the checker.
    """
    for function, rule in {**megatron.rules(), **_own()}.items():
        _register(function, rule)
    _know_wrapped_factories()
    operators.register(journal)
    megatron.own_results(journal, _terms)
    # In place of rules by the collectives that the checker met at its import, which are the device
    # layer's if the adaptor came first. The functions that call them have rules of their own.
    raw = {dist.irecv: _received, dist.isend: lambda *_: None}
    journal.set(checker, "RAW_DIST_RULES", raw, owner=OWNER)


def _know_wrapped_factories() -> None:
    """Let the checker know torch's own ``arange`` where it met the adaptor's at its import."""
    for factories in (checker._DETERMINISTIC_FACTORIES, checker._DETERMINISTIC_NEW_FACTORIES):
        factories |= {one.__wrapped__ for one in factories if hasattr(one, "__wrapped__")}


def _own() -> dict[type, Rule]:
    """Autograd functions of imported modules that have a rule."""
    functions = torch.autograd.Function.__subclasses__()
    return {one: rule for one in functions if (rule := rule_of(one)) is not None}


def _register(function: Any, rule: Rule) -> None:
    if isinstance(rule, Local):
        register_local_autograd_function(function)
        return
    kinds: dict[type, Any] = {
        Collective: _collective,
        Product: _product,
        Passes: _passes,
        Attaches: _attaches,
        Recomputed: _recomputed,
        ByArguments: _collective,
        Token: _token,
        Columns: _columns,
    }
    function.typecheck_forward = staticmethod(kinds[type(rule)](function, rule))
    register_autograd_function(function)


def _collective(function: Any, declared: Collective | ByArguments) -> Any:
    def forward(*args: Any) -> Any:
        given = arguments_of(function, args)
        rule = declared if isinstance(declared, Collective) else declared.rule(given)
        own = _axis_of(rule.group_of(given))
        result: dict[MeshAxis, Type] = {}
        for number, tensor in enumerate(rule.inputs(given)):
            for axis, found in types_of(tensor).items():
                inside = own is not None and not own.isorthogonal(axis)
                if inside and found not in rule.allowed and tensor.is_floating_point():
                    raise WrongType(_name(function), axis, found, rule.allowed)
                if own is not None and inside:
                    # Of a part of the axis: the other ranks there have something else.
                    found = rule.result_of(given) if axis <= own else V
                elif number:
                    what = f"{_name(function)}: the input {tuple(tensor.shape)}"
                    found = _joined(what, axis, result.get(axis, R), found)
                result[axis] = found
        for operand in (given[name] for name in rule.operands):
            for axis, found in types_of(operand).items():
                what = f"{_name(function)}: the operand {tuple(operand.shape)}"
                result[axis] = _joined(what, axis, result.get(axis, R), found)
        with _reductions() as reduced:
            out = function.apply(*args)
        if isinstance(out, tuple):
            return tuple(give(one, result) for one in out)
        tensor = rule.inputs(given)[0]
        _check_reduction(function, rule, own, tensor, out, reduced)
        return give(_distinct(out, tensor), result)

    return forward


@contextlib.contextmanager
def _reductions() -> Iterator[list[torch.Tensor]]:
    """The tensors that are all-reduced in place inside the block."""
    found: list[torch.Tensor] = []
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        found.append(tensor)
        return reduce(tensor, *args, **options)

    journal = Journal()
    journal.set(dist, "all_reduce", all_reduce, owner=OWNER)
    try:
        yield found
    finally:
        journal.undo()


@contextlib.contextmanager
def equal_where_reduced() -> Iterator[None]:
    """Values without gradient that are all-reduced inside the block are equal afterwards (R)."""
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        work = reduce(tensor, *args, **options)
        own = _axis_of(options.get("group"))
        if own is not None and not tensor.requires_grad:
            types = types_of(tensor)
            give(tensor, types | {axis: R for axis in types if axis <= own})
        return work

    journal = Journal()
    journal.set(dist, "all_reduce", all_reduce, owner=OWNER)
    try:
        yield
    finally:
        journal.undo()


def check_shared_counts(journal: Journal, per_token: bool) -> None:
    """Refuse a count of one rank's tokens where those of all ranks of a sample are needed.

    Args:
        journal: keeps what is changed in Megatron.
        per_token: see :func:`.megatron.shared_counts`.
    """
    for one in megatron.shared_counts(per_token):
        if (module := one.caller()) is not None:
            checked = _with_shared(one, getattr(module, one.function))
            journal.set(module, one.function, checked, owner=OWNER)


def _terms(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """What varies over the group is a term of a sum."""
    own = _axis_of(group)
    varying = [axis for axis, kind in types_of(tensor).items() if kind is V]
    partial = [axis for axis in varying if own is not None and axis <= own]
    return give(tensor.clone(), types_of(tensor) | dict.fromkeys(partial, P))


def _with_shared(rule: megatron.SharedCount, function: Any) -> Any:
    signature = inspect.signature(function)

    def checked(*args: Any, **kwargs: Any) -> Any:
        with equal_where_reduced():
            result = function(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        groups = megatron.Axes.of_job()
        shared = [_axis_of(group) for group in (groups.tensor, groups.context)]
        for axis, found in types_of(rule.count(given.arguments, result)).items():
            if found is V and any(own is not None and axis <= own for own in shared):
                raise WrongType(rule.what, axis, found, (I, R))
        return result

    return checked


def _received(func: Any, args: Any, kwargs: Any) -> None:
    """What another rank has sent without gradient varies over the axes that both are on."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    own, tensor = dist.get_rank(), given["tensor"]
    types = dict.fromkeys(spmd_types.current_mesh() or (), R) | types_of(tensor)
    give(tensor, types | {axis: V for axis in types if _apart(axis, own, given["src"])})


def _apart(axis: MeshAxis, one: int, other: int) -> bool:
    """Whether two ranks have different places on an axis."""
    return any(
        one // stride % size != other // stride % size
        for size, stride in axis.layout.sizes_and_strides
    )


def _check_reduction(
    function: type,
    rule: Collective,
    own: MeshAxis | None,
    tensor: torch.Tensor,
    out: torch.Tensor,
    reduced: list[torch.Tensor],
) -> None:
    """A sum that is formed in place must be what is returned, and the term is gone with it.

    Raises:
        WrongType: what was summed is a copy, which is dropped.
    """
    if own is None or rule.source is not P or not reduced:
        return
    if not any(_same_memory(one, out) for one in reduced):
        what = f"{_name(function)}: the sum of a strided tensor is dropped, the result"
        raise WrongType(what, own, P, (I,))
    if any(_same_memory(one, tensor) for one in reduced):
        tensor._overwritten = True  # type: ignore[attr-defined]


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _distinct(out: Any, tensor: torch.Tensor) -> Any:
    """The output as a tensor of its own, which has other types than the input."""
    return out.detach().requires_grad_(out.requires_grad) if out is tensor else out


def _product(function: Any, rule: Product) -> Any:
    def forward(*args: Any) -> Any:
        given = arguments_of(function, args)
        x, layer = given[rule.x], rule.layer(given)
        layers = layer if isinstance(layer, tuple) else (layer,)
        types: dict[MeshAxis, Type] = {}
        for weight, bias in rule.operands(given):
            own = tuple(_of_expert(one, weight) for one in layers)
            for axis, found in product_types(_name(function), x, weight, bias, own).items():
                if types.setdefault(axis, found) is not found:
                    types[axis] = _joined(_name(function), axis, types[axis], found)
        if rule.factors is not None:
            a, b = (given[name] for name in rule.factors)
            _check_factors(types_of(x), a, b, layers)
        return give(function.apply(*args), types)

    return forward


def _of_expert(layer: Communication, weight: torch.Tensor) -> Communication:
    """What is sharded in a layer of an expert, which communicates nothing itself."""
    parameter = weight if weight._base is None else weight._base
    if not getattr(parameter, "routed_expert", False):
        return layer
    return replace(layer, group=megatron.slices_of_experts())


def _axis_of(group: Any) -> MeshAxis | None:
    """The axis of a group of several ranks; None for one rank."""
    return MeshAxis.of(group) if group is not None and group.size() > 1 else None


def _on_axis(axis: MeshAxis, layers: tuple[Communication, ...]) -> Communication | None:
    """What a product communicates over an axis, which may be a part of its group; None: nothing."""
    for layer in layers:
        own = _axis_of(layer.group)
        if own is not None and axis <= own:
            return layer
    return None


def product_types(
    name: str, x: Any, weight: Any, bias: Any, layers: tuple[Communication, ...]
) -> dict[MeshAxis, Type]:
    """The types of ``x W^T + b``.

    Args:
        name: of the function.
        x: the input.
        weight: W.
        bias: b, or None.
        layers: what is communicated over each group.

    Raises:
        WrongType: the input or the weight does not fit what the layer communicates.
    """
    of_x, of_weight, of_bias = types_of(x), types_of(weight), types_of(bias)
    found: dict[MeshAxis, Type] = {}
    for axis in {**of_x, **of_weight}:
        a, b = of_x.get(axis, R), of_weight.get(axis, R)
        layer = _on_axis(axis, layers)
        if layer is not None and (layer.gathers or layer.sums_gradient):
            _need(f"{name}: the input", axis, a, V if layer.gathers else I)
            a = R
        result = _joined(f"{name}: the weight {tuple(weight.shape)}", axis, a, b)
        if layer is not None:
            # What is summed over: without a reduction ranks have terms of the product.
            if a is V and b is V and _shards_input(layer, weight):
                result = P
            if layer.reduces:
                _need(f"{name}: the product", axis, result, P)
                result = V if layer.scatters else I
        if bias is not None and result is not P:
            result = _joined(f"{name}: the bias", axis, result, of_bias.get(axis, R))
        found[axis] = result
    return found


def _shards_input(layer: Communication, weight: torch.Tensor) -> bool:
    if layer.shards_input is None:
        return getattr(weight, "partition_dim", -1) == 1
    return layer.shards_input


def _check_factors(
    of_x: dict[MeshAxis, Type],
    a: torch.Tensor,
    b: torch.Tensor,
    layers: tuple[Communication, ...],
) -> None:
    """The factor that every rank has whole gets a part of its gradient there."""
    for axis in {**of_x, **types_of(a), **types_of(b)}:
        layer = _on_axis(axis, layers)
        for name, factor in (("A", a), ("B", b)):
            found = types_of(factor).get(axis, R)
            what = f"adapter: the factor {name} {tuple(factor.shape)}"
            if layer is not None:
                _need(what, axis, found, V if layer.reduces is (name == "A") else R)
            else:
                _joined(what, axis, of_x.get(axis, R), found)


def _need(what: str, axis: MeshAxis, found: Type, needed: Type) -> None:
    if found is not needed:
        raise WrongType(what, axis, found, (needed,))


def _joined(what: str, axis: MeshAxis, a: Type, b: Type) -> Type:
    """The type of a product of two; the second one is at fault where they do not fit."""
    if a is b and a is not P:
        return a
    if {a, b} == {R, V}:
        return V
    raise WrongType(what, axis, b, (I,) if a is I else (R, V))


def _passes(function: Any, rule: Passes) -> Any:
    def forward(*args: Any) -> Any:
        tensor = arguments_of(function, args)[rule.tensor] if rule.tensor else args[0]
        return give(_distinct(function.apply(*args), tensor), types_of(tensor))

    return forward


def _attaches(function: Any, rule: Attaches) -> Any:
    returns = _passes(function, Passes(rule.tensor))

    def forward(*args: Any) -> Any:
        for axis, found in types_of(arguments_of(function, args)[rule.loss]).items():
            if found is R:
                what = f"{_name(function)}: the attached loss"
                raise WrongType(what, axis, found, (I, V, P))
        return returns(*args)

    return forward


def _recomputed(function: Any, rule: Recomputed) -> Any:
    """Types of a forward do not depend on what is kept: the layers run as without it."""

    def forward(run: Any, *args: Any) -> Any:
        with checker._current_mode():
            return run(*args[rule.others :])

    return forward


def _token(function: Any, rule: Token) -> Any:
    def forward(*args: Any) -> Any:
        out = function.apply(*args)
        return give(out, dict.fromkeys(spmd_types.current_mesh() or (), R))

    return forward


def _columns(function: Any, rule: Columns) -> Any:
    def forward(*args: Any) -> Any:
        given = arguments_of(function, args)
        own, types = _axis_of(given[rule.group]), types_of(args[0])
        parts = [axis for axis in types if own is not None and axis <= own]
        for axis in parts:
            _need(_name(function), axis, types[axis], I)
        out = give(_distinct(function.apply(*args), args[0]), types)
        vars(out)["_columns"] = (list(given[rule.sizes]), parts, rule.types)
        return out

    return forward


def _name(function: type) -> str:
    return function.__name__.lstrip("_")
