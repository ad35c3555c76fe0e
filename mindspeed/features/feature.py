"""What a feature is: a class whose fields are its flags, and whose methods say what they do.

    class SquaredRelu(Feature, level=1, seams=("model_arguments",)):
        \"\"\"Squared ReLU as one operator.\"\"\"

        squared_relu: bool = flag(False, "squared ReLU in every MLP, as one operator")

        def problems(self, megatron: Megatron) -> Iterator[Problem]:
            if megatron.get("swiglu"):
                yield Problem("--squared-relu", "is no gated activation", "remove --swiglu")

        def attach(self, seams: Seams, megatron: Megatron) -> None:
            from mindspeed.ops.squared_relu import squared_relu  # only when the feature is on
            ...

Its module holds nothing but that class and what only it needs; the algorithm lives elsewhere and
knows no flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import dataclass_transform  # in typing since Python 3.11

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

Level = Literal[0, 1, 2]
Stage = Literal["stable", "prototype"]
Megatron = Mapping[str, Any]
"""Megatron's arguments and our flags by name, read-only."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the flags, and how to put it right."""

    flag: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.flag}: {self.message}" + (f"; {self.fix}" if self.fix else "")


@dataclass_transform(frozen_default=True)
class Feature:
    """Base class of all features.

    A subclass is a frozen dataclass of its flags (:mod:`mindspeed.flags`), each with a default; an
    instance holds the values of one job. What never depends on values is declared with the class,
    as keyword arguments behind the base class. The first line of its docstring is its summary.

    The methods are asked in the order in which they stand here. Each has a default, so a feature
    writes down only what is special about it.

    Class attributes:
        name: Unique name with dashes; default: that of the module.
        summary: One line for ``mindspeed features``.
        level: 0 compatibility and tools, 1 fused operators, 2 everything else.
        seams: The seams that it uses; :meth:`attach` is refused all others.
        conflicts: Names of features that cannot be on at the same time (either side declares it).
        requires: Names of features that must be on too.
        after: Names of features that attach before this one when both are on.
        stage: ``stable`` or ``prototype``.
        devices: The only kinds of device that it runs on; empty: all.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    level: ClassVar[Level]
    seams: ClassVar[tuple[str, ...]]
    conflicts: ClassVar[tuple[str, ...]]
    requires: ClassVar[tuple[str, ...]]
    after: ClassVar[tuple[str, ...]]
    stage: ClassVar[Stage]
    devices: ClassVar[tuple[str, ...]]

    def __init_subclass__(
        cls,
        *,
        level: Level,
        name: str | None = None,
        seams: tuple[str, ...] = (),
        conflicts: tuple[str, ...] = (),
        requires: tuple[str, ...] = (),
        after: tuple[str, ...] = (),
        stage: Stage = "stable",
        devices: tuple[str, ...] = (),
    ) -> None:
        super().__init_subclass__()
        flags = vars(cls).get("__annotations__", {}).keys()
        taken = (vars(cls).keys() & Feature.__annotations__.keys()) | (flags & vars(Feature).keys())
        if taken:
            raise TypeError(f"{cls.__name__}: {', '.join(sorted(taken))} mean something else here")
        dataclass(frozen=True)(cls)
        cls.name = name or cls.__module__.rpartition(".")[2].replace("_", "-")
        cls.summary = (cls.__doc__ or "").partition("\n")[0].rstrip(".")
        cls.level, cls.stage, cls.devices = level, stage, devices
        cls.seams, cls.conflicts, cls.requires, cls.after = seams, conflicts, requires, after

    def enabled(self, megatron: Megatron) -> bool:
        """Whether it is on; by default when any of its flags is not at its default."""
        return self != type(self)()

    def asked_by(self, megatron: Megatron) -> str | None:
        """The flag of another feature that switches this one on, for messages."""
        return None

    def derives(self, megatron: Megatron) -> dict[str, Any]:
        """Arguments of Megatron's that follow from the flags, by name.

        Set before Megatron checks its arguments, so those that Megatron derives are missing. Asked
        again later: what it returned may be there already.

        Raises:
            ConfigError: flags contradict each other.
        """
        return {}

    def problems(self, megatron: Megatron) -> Iterable[Problem]:
        """What is wrong with the flags; asked only when the feature is on."""
        return ()

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        """Arguments of Megatron's that must have another value; set in its own namespace."""
        return {}

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        """Hand functions of an algorithm to seams."""
