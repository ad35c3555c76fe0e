"""What a feature declares.

A feature is one short module in this package with a ``FEATURE`` constant: its flags, its level,
when it is on, what it needs and what it attaches to which seam. The algorithm lives elsewhere.

    FEATURE = Feature(
        name="profiling",
        level=0,
        options=ProfilingOptions,
        enabled=lambda options, megatron: megatron.get("profile"),
        attach=attach,
        seams=("step",),
    )
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

Level = Literal[0, 1, 2]
Megatron = Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the flags, and how to put it right."""

    flag: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.flag}: {self.message}" + (f"; {self.fix}" if self.fix else "")


def _no_problems(options: Any, megatron: Megatron) -> list[Problem]:
    return []


def _by_itself(options: Any, megatron: Megatron) -> str | None:
    return None


def _as_given(options: Any, megatron: Megatron) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Feature:
    """One feature of the library.

    Attributes:
        name: short name with dashes, unique.
        summary: one line for ``mindspeed features``.
        level: 0 compatibility and tools, 1 fused operators, 2 everything else.
        options: frozen dataclass of flags (:mod:`mindspeed.flags`).
        enabled: ``(options, megatron) -> bool``; ``megatron`` is a read-only mapping of Megatron's
            arguments.
        attach: ``(seams, options, megatron) -> None`` attaches functions to seams; it imports the
            algorithm.
        validate: ``(options, megatron) -> list[Problem]``, asked only when enabled.
        derives: ``(options, megatron) -> {name: value}``: arguments of Megatron's that follow from
            the flags, set before Megatron checks its arguments, so those that Megatron derives are
            missing. Asked again later: what it returned may be there already. Raises ConfigError.
        corrects: ``(options, megatron) -> {name: value}``: arguments of Megatron's that must have
            another value when the feature is on; changed in Megatron's own namespace.
        asked_by: ``(options, megatron) -> flag | None``: the flag of another feature that switches
            this one on, for messages about their combinations.
        seams: the seams it uses; ``attach`` is refused all others.
        conflicts: names of features that cannot be on at the same time (either side declares it).
        requires: names of features that must be on too.
        after: names of features that attach before this one when both are on.
        stage: ``stable`` or ``prototype``.
        devices: the only kinds of device it runs on; empty: all.
    """

    name: str
    summary: str
    level: Level
    options: type
    enabled: Callable[[Any, Megatron], bool]
    attach: Callable[[Seams, Any, Megatron], None]
    validate: Callable[[Any, Megatron], list[Problem]] = _no_problems
    derives: Callable[[Any, Megatron], dict[str, Any]] = _as_given
    corrects: Callable[[Any, Megatron], dict[str, Any]] = _as_given
    asked_by: Callable[[Any, Megatron], str | None] = _by_itself
    seams: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    stage: Literal["stable", "prototype"] = "stable"
    devices: tuple[str, ...] = ()
