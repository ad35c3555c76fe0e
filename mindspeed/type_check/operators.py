"""Operators as Megatron uses them, beyond the own table of the checker of ``spmd_types``."""

from __future__ import annotations

from typing import Any

import spmd_types
import torch
from spmd_types import SpmdTypeError
from spmd_types import _checker as checker
from spmd_types.types import format_axis

from mindspeed.journal import Journal
from mindspeed.ops.moe_permutation import MOE_PERMUTE, MOE_UNPERMUTE
from mindspeed.spmd import I, P, R, Type, V
from mindspeed.type_check.tensor_types import OWNER, WrongType, give, types_of


def register(journal: Journal) -> None:
    """Tell the checker how Megatron uses operators.

    Casts and ``.data`` keep types; integers without one take no part in gradients; equal integers
    may choose rows of a partial sum; a tensor of zeros may become one; an error knows the
    parameters that the operator read.

    Args:
        journal: keeps what is changed in the checker.
    """
    _register_linearity()
    _ignore_integers(journal)
    check = checker._SpmdTypeMode._typecheck_core

    def checked(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "")
        if name in _ADDING:
            args = _with_equal_places(args)
        _before_adding(name, args, kwargs)
        try:
            _refuse_overwritten(name, args)
            result = check(mode, func, types, args, kwargs)
        except SpmdTypeError as error:
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            names = [vars(one).get("checked_name") for one in tensors]
            known = [name for name in names if name is not None]
            vars(error).setdefault("parameters", known)
            told = None if isinstance(error, WrongType) else _told(func, error, args, kwargs)
            if told is None:
                raise
            vars(told)["parameters"] = known
            raise told from error
        if args and isinstance(args[0], torch.Tensor):
            _split_into_columns(name, args, result)
        if name in _NEW and isinstance(result, torch.Tensor):
            result._only_zeros = True  # type: ignore[attr-defined]
        return result

    journal.set(checker._SpmdTypeMode, "_typecheck_core", checked, owner=OWNER)


def _register_linearity() -> None:
    """Register operators that the checker does not know."""
    linear = checker._OpSpec(checker.OpLinearity.LINEAR)
    base = torch._C.TensorBase
    for operator in (
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.to,
        base.to,
        torch.Tensor.float,
        base.float,
        base.type,
        base.contiguous,
        *(getattr(torch.Tensor, name) for name in _ADDING),
    ):
        checker._OP_REGISTRY[operator] = linear
    for operator in (
        torch.Tensor.__getitem__,
        torch.Tensor.index_select,
        torch.index_select,
        torch.Tensor.gather,
        torch.gather,
        MOE_PERMUTE.overload,
        MOE_UNPERMUTE.overload,
    ):
        checker._OP_REGISTRY[operator] = checker._OpSpec(checker.OpLinearity.MULTILINEAR)


def _ignore_integers(journal: Journal) -> None:
    """Leave integers without a type out of what an operator's arguments are classified by."""
    classify = checker._classify_args

    def classified(args: Any, kwargs: Any) -> Any:
        info = classify(args, kwargs)
        given = [*args, *(value for name, value in kwargs.items() if name != "out")]
        tensors = [one for value in given for one in checker._iter_tensors_in(value)]
        keep = [i for i, one in enumerate(tensors) if one.is_floating_point() or types_of(one)]
        chosen = {
            name: [values[i] for i in keep]
            for name in ("tensor_types", "partition_specs", "tensor_no_grad")
            if isinstance(values := getattr(info, name, None), list) and len(values) == len(tensors)
        }
        return info._replace(**chosen)  # type: ignore[arg-type]

    journal.set(checker, "_classify_args", classified, owner=OWNER)


def _told(func: Any, error: SpmdTypeError, args: Any, kwargs: Any) -> WrongType | None:
    """What an operator was given wrongly; None where only the checker can say it.

    Of operands that do not mix a parameter is at fault, else the one that is the same everywhere.
    """
    mixed, partial = (part in str(error) for part in ("cannot mix", "Partial type on axis"))
    given = [one for value in (*args, *kwargs.values()) for one in checker._iter_tensors_in(value)]
    for axis in spmd_types.current_mesh() or ():
        on_axis = [(one, kind) for one in given if (kind := types_of(one).get(axis)) is not None]
        kinds = {kind for _, kind in on_axis}
        if f"axis {format_axis(axis)} " not in str(error) or len(kinds) < 1 + mixed:
            continue
        needed: tuple[Type, ...] = (I,)
        if partial and P in kinds:
            wrong = P
        elif mixed and I in kinds:
            own = {kind for one, kind in on_axis if "checked_name" in vars(one)}
            summed = own == {R} and kinds == {R, I}
            wrong, needed = (R, needed) if summed else (I, (R, V))
        else:
            return None
        shape = next(tuple(one.shape) for one, kind in on_axis if kind is wrong)
        return WrongType(f"{getattr(func, '__name__', func)}: {shape}", axis, wrong, needed)
    return None


def _refuse_overwritten(name: str, args: Any) -> None:
    """Refuse the term of a sum under its old name, where the sum has overwritten it."""
    for one in args:
        if isinstance(one, torch.Tensor) and vars(one).get("_overwritten", False):
            raise SpmdTypeError(
                f"{name} reads a tensor that an all-reduce has overwritten: each rank had its own "
                "values, now all have the sum"
            )


def _with_equal_places(args: Any) -> Any:
    """Rows of partial sums may be added at places, integers, that are the same on all ranks."""
    partial = {axis for one in args for axis, kind in types_of(one).items() if kind is P}

    def fit(value: Any) -> Any:
        types = types_of(value)
        if not types or value.is_floating_point():
            return value
        equal = [axis for axis in partial if types.get(axis) in (R, I)]
        return give(value.detach(), types | dict.fromkeys(equal, P))

    return tuple(map(fit, args)) if partial else args


_NEW = ("zeros", "new_zeros", "zeros_like")
_ADDING = ("scatter_add_", "index_add_", "scatter_add", "index_add", "add_", "__iadd__")


def _before_adding(name: str, args: Any, kwargs: Any) -> None:
    """Let partial sums be added into a tensor of zeros, which is a partial sum itself."""
    target = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if target is None or not vars(target).get("_only_zeros", False):
        return
    if name in _ADDING:
        added = [types_of(one) for one in (*args[1:], *kwargs.values())]
        partial = {axis for types in added for axis, one in types.items() if one is P}
        give(target, types_of(target) | dict.fromkeys(partial, P))
    if name.endswith("_"):
        target._only_zeros = False  # type: ignore[attr-defined]


def _split_into_columns(name: str, args: Any, result: Any) -> None:
    """The parts of a tensor whose columns have different types."""
    sizes, axes, kinds = vars(args[0]).get("_columns", (None, (), ()))
    if name == "split" and sizes is not None and list(args[1]) == sizes:
        for part, kind in zip(result, kinds, strict=True):
            give(part, types_of(part) | dict.fromkeys(axes, kind))
