"""Types of tensors over process groups, and rules of the functions that change them.

A tensor of a parallel program has one type for each group of ranks that shares the work:

    ======  =====================  ===========================================
    type    ranks hold             gradients that ranks compute
    ======  =====================  ===========================================
    ``R``   the same (replicated)  each a part of a sum
    ``I``   the same (invariant)   the same, each the whole
    ``V``   different parts        each that of its part (varying)
    ``P``   terms of a sum         the same (partial)
    ======  =====================  ===========================================

Most silent faults of distributed training use an ``I`` where an ``R`` is needed, or the other way
round: forward is right, a gradient is a part of a sum that nobody computes. An autograd function
says with a rule what it does to types, beside its own lines:

    @typed(Collective(source=V, result=R))
    class _AllGather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group): ...

``mindspeed check --types`` applies the rules to a whole model (:mod:`mindspeed.type_check`). The
type system is that of the package ``spmd_types``, which this module does not need.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar


class Type(Enum):
    """Type of a tensor on one group of ranks; see the module."""

    R = "replicated"
    I = "invariant"  # noqa: E741  # the name in the literature
    V = "varying"
    P = "partial"


R, I, V, P = Type.R, Type.I, Type.V, Type.P  # noqa: E741

Arguments = Mapping[str, Any]
"""The arguments of ``forward``, by name, without ``ctx``."""


@dataclass(frozen=True)
class Collective:
    """A function that communicates over one group and keeps the types on others.

    Attributes:
        source: type of the input on the group.
        result: type of the output on the group, or a function of the arguments that returns it.
        tensor: name of the input, or names of several that have the same types.
        group: name of the group, or a function of the arguments that returns it; None for one rank.
        sums: the input may be ``V`` for ``P``: what ranks computed from different parts is a term
            of the sum that the function forms.
        operands: names of further inputs of which each rank uses its own values: a weight, a bias.
    """

    source: Type
    result: Type | Callable[[Arguments], Type]
    tensor: str | tuple[str, ...] = ""
    group: str | Callable[[Arguments], Any] = "group"
    sums: bool = False
    operands: tuple[str, ...] = ()

    @property
    def allowed(self) -> tuple[Type, ...]:
        """Types that the input may have."""
        return (self.source, V) if self.sums else (self.source,)

    def inputs(self, given: Arguments) -> list[Any]:
        """The inputs of a call; the first argument where no name is given."""
        names = (self.tensor or next(iter(given)),) if isinstance(self.tensor, str) else self.tensor
        found = [given[name] for name in names]
        return [one for value in found for one in (value if isinstance(value, tuple) else (value,))]

    def group_of(self, given: Arguments) -> Any:
        """The group that a call communicates over."""
        return self.group(given) if callable(self.group) else given[self.group]

    def result_of(self, given: Arguments) -> Type:
        """The type of the output of a call on the group."""
        return self.result if isinstance(self.result, Type) else self.result(given)


@dataclass(frozen=True)
class Product:
    """A product with a weight, and what it communicates.

    Attributes:
        layer: arguments -> :class:`Communication`, or one for each of several groups.
        x: name of the input.
        weight: name of the weight, which may be hidden from autograd.
        bias: name of the bias.
        factors: names of A and B of an adapter, ``x A^T B^T`` beside the product.
        experts: arguments -> weight and bias (or None) of each expert, where rows of the input
            belong to several; instead of ``weight`` and ``bias``.
    """

    layer: Callable[[Arguments], Communication | tuple[Communication, ...]]
    x: str = "x"
    weight: str = "weight"
    bias: str = "bias"
    factors: tuple[str, str] | None = None
    experts: Callable[[Arguments], Sequence[tuple[Any, Any]]] | None = None

    def operands(self, given: Arguments) -> Sequence[tuple[Any, Any]]:
        """Weight and bias of a call, or those of each expert."""
        if self.experts is not None:
            return self.experts(given)
        weight = given[self.weight]
        hidden = isinstance(weight, tuple)
        return [(weight[1][0] if hidden else weight, given.get(self.bias))]


@dataclass(frozen=True)
class Communication:
    """What a linear layer communicates.

    Attributes:
        group: its ranks; None for one rank, or for an expert, whose dispatcher communicates.
        gathers: the input is gathered along the sequence, its gradient reduce-scattered.
        sums_gradient: the gradient of the input is summed over the ranks.
        reduces: the product is summed over the ranks.
        scatters: and scattered along the sequence.
        shards_input: the ranks hold parts of the dimension that the product sums over; None: those
            with a weight whose ``partition_dim`` is 1.
    """

    group: Any = None
    gathers: bool = False
    sums_gradient: bool = False
    reduces: bool = False
    scatters: bool = False
    shards_input: bool | None = None


@dataclass(frozen=True)
class Local:
    """A function that each rank computes by itself: ``R`` and ``V`` mix, ``I`` stays ``I``."""


@dataclass(frozen=True)
class Passes:
    """A function that moves the rows of an argument, adds some, or returns it: types stay.

    Attributes:
        tensor: name of the argument; the first one by default.
    """

    tensor: str = ""


@dataclass(frozen=True)
class Attaches:
    """A function that returns an argument, and whose backward gives a loss its gradient.

    Every rank gives it the same one. So the loss may be one of all ranks whose gradient is the
    whole on each (``I``), or each rank's own (``V``) or term (``P``) of their sum. One that all
    ranks have, and whose gradients are summed (``R``), would count once for each rank.

    Attributes:
        loss: name of the argument that is attached.
        tensor: name of the argument that is returned; the first one by default.
    """

    loss: str
    tensor: str = ""


@dataclass(frozen=True)
class Recomputed:
    """A function that runs its first argument on the last ones, and again in backward.

    Attributes:
        others: arguments between the function and those that it is run on.
    """

    others: int = 0


@dataclass(frozen=True)
class ByArguments:
    """A function that communicates as its arguments say.

    Attributes:
        rule: arguments -> what a call with them does.
    """

    rule: Callable[[Arguments], Collective]


@dataclass(frozen=True)
class Token:
    """A function that returns a value which only orders backward passes, whatever it was given."""


@dataclass(frozen=True)
class Columns:
    """A function that returns its input, whose columns have different types from then on.

    The types hold for the parts that ``torch.split`` makes of it; before, all of it has the first.

    Attributes:
        types: of each part on the group, whose input is ``I``.
        sizes: name of the argument with the columns of each part.
        group: name of the group.
    """

    types: tuple[Type, ...]
    sizes: str = "sizes"
    group: str = "group"


Rule = Collective | Product | Local | Passes | Attaches | Recomputed | ByArguments | Token | Columns

_Function = TypeVar("_Function", bound=type)
_RULE = "gradient_types"


def typed(rule: Rule) -> Callable[[_Function], _Function]:
    """Give an autograd function its rule.

    Args:
        rule: what the function does to types.
    """

    def mark(function: _Function) -> _Function:
        setattr(function, _RULE, rule)
        return function

    return mark


def rule_of(function: type) -> Rule | None:
    """The rule of an autograd function; None without."""
    found: Rule | None = vars(function).get(_RULE)
    return found


def arguments_of(function: type, args: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments of ``apply`` by the names that ``forward`` gives them, defaults included."""
    signature = inspect.signature(function.forward)  # type: ignore[attr-defined]
    bound = signature.bind(None, *args)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])
