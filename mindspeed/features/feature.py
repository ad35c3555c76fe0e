"""Base class of features: fields are flags, methods define their behaviour.

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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from packaging.version import Version
from typing_extensions import dataclass_transform  # in typing since Python 3.11

from mindspeed.adaptor.versions import in_range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

Level = Literal[0, 1, 2]
Stage = Literal["stable", "prototype"]
Planning = Literal["changes layers", "needs steps", "lays out", "no part"]
Megatron = Mapping[str, Any]
"""Megatron's arguments and our flags by name, read-only."""
COMMAND_WORDS = "command_words"
"""Name in the arguments: the command line, where it is not that of the process."""


@dataclass(frozen=True)
class Option:
    """A value of a dimension of the planner's search.

    Attributes:
        dimension: A field of :class:`mindspeed.planner.search.space.Space`.
        name: The value.
        flags: Arguments that it sets; None removes a flag.
        what: What it does to a job, for messages.
        faster: It may make a step faster.
        kept: It is never worse, so a job that has it keeps it.
        exact: The numbers of a training stay the same, so a search tries it by itself.
    """

    dimension: str
    name: str
    flags: Mapping[str, Any]
    what: str = ""
    faster: bool = False
    kept: bool = False
    exact: bool = True


@dataclass(frozen=True)
class Problem:
    """An error in the flags, and its fix.

    Attributes:
        flag: The flag, with its value where that matters.
        message: What is wrong.
        fix: What to do.
        other: The flag that cannot be given with it; of two problems with the same pair of flags
            one is reported.
    """

    flag: str
    message: str
    fix: str = ""
    other: str = ""

    def __str__(self) -> str:
        return f"{self.flag}: {self.message}" + (f"; {self.fix}" if self.fix else "")


def conflict(flag: str, other: str, why: str = "", fix: str = "remove one") -> Problem:
    """Two flags that cannot be given together, where a condition decides; else it is a trait."""
    what = f"cannot be combined with {other}" + (f": {why}" if why else "")
    return Problem(flag, what, fix, other)


def exclusions(flag: str, excludes: Mapping[str, str], megatron: Megatron) -> Iterator[Problem]:
    """Conflicts of a flag with arguments that are on.

    Args:
        flag: With its value where that matters.
        excludes: As the trait of that name.
        megatron: Megatron's arguments and our flags.
    """
    for name, why in excludes.items():
        value = megatron.get(name)
        if value not in _OFF:
            given = f" {value}" if isinstance(value, str) else ""
            yield conflict(flag, option_of(name) + given, why)


def option_of(name: str) -> str:
    """The flag that sets an argument."""
    return _OPTIONS.get(name) or "--" + name.replace("_", "-")


_OFF: tuple[Any, ...] = (None, False, 0, -1, "", "none", "disable", "flat", (), [])
_OPTIONS = {
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "heterogeneous_block_specs": "--heterogeneous-layers-config-path",
    "is_hybrid_model": "--hybrid-override-pattern",
}
"""Arguments of Megatron's that are not called like their flag."""


@dataclass_transform(frozen_default=True)
class Feature:
    """Base class of all features.

    A subclass is a frozen dataclass of its flags (:mod:`mindspeed.flags`), each with a default; an
    instance holds the values of one job. What never depends on values is declared with the class,
    as keyword arguments after the base class. The first line of its docstring is its summary.

    The methods are called in the order of their definition. Each has a default, so a feature
    defines only what differs.

    Attributes:
        name: Unique name with dashes; default: that of the module.
        summary: One line for ``mindspeed features``.
        page: File below ``docs/`` that explains it; default: ``features/NAME.md``.
        level: 0 compatibility and tools, 1 fused operators, 2 everything else.
        seams: The seams that it uses; :meth:`attach` is refused all others.
        conflicts: Features that cannot be on at the same time, by name, and why. One of the two
            declares it; names alone will do.
        excludes: Arguments, by name, that cannot be on at the same time, and why ("": obvious).
        requires: Names of features that must be on too.
        after: Names of features that attach before this one when both are on.
        stage: ``stable`` or ``prototype``.
        devices: The only kinds of device that it runs on; empty: all.
        megatron_versions: The only releases of megatron-core that it runs with; empty: all.
        planning: What :mod:`mindspeed.planner` must know of it:

            * ``changes layers``: a layer in a pipeline differs from a single one.
            * ``needs steps``: its schedule needs several micro-batches, or later steps use what the
              first one found out.
            * ``lays out``: its flags stand for sizes that a planned layout says itself.
            * ``no part``: its flags are no part of the job that is planned.
        first_layers: Its flag that limits it to the first layers of a chunk or rank.
        schedule: The ``--pipeline-schedule`` that its first flag stands for.
        options: Values of dimensions of a planner's search that it stands for.
        adds_states: States of the optimizer that only checkpoints of runs with it have.
        omits_states: States of the optimizer that checkpoints of runs with it lack.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    page: ClassVar[str]
    level: ClassVar[Level]
    seams: ClassVar[tuple[str, ...]]
    conflicts: ClassVar[Mapping[str, str]]
    excludes: ClassVar[Mapping[str, str]]
    requires: ClassVar[tuple[str, ...]]
    after: ClassVar[tuple[str, ...]]
    stage: ClassVar[Stage]
    devices: ClassVar[tuple[str, ...]]
    megatron_versions: ClassVar[str]
    planning: ClassVar[tuple[Planning, ...]]
    first_layers: ClassVar[str]
    schedule: ClassVar[str]
    options: ClassVar[tuple[Option, ...]]
    adds_states: ClassVar[str]
    omits_states: ClassVar[str]

    def __init_subclass__(
        cls,
        *,
        level: Level,
        name: str | None = None,
        page: str | None = None,
        seams: tuple[str, ...] = (),
        conflicts: Mapping[str, str] | tuple[str, ...] = (),
        excludes: Mapping[str, str] | None = None,
        requires: tuple[str, ...] = (),
        after: tuple[str, ...] = (),
        stage: Stage = "stable",
        devices: tuple[str, ...] = (),
        megatron_versions: str = "",
        planning: tuple[Planning, ...] = (),
        first_layers: str = "",
        schedule: str = "",
        options: tuple[Option, ...] = (),
        adds_states: str = "",
        omits_states: str = "",
    ) -> None:
        super().__init_subclass__()
        flags = vars(cls).get("__annotations__", {}).keys()
        taken = (vars(cls).keys() & Feature.__annotations__.keys()) | (flags & vars(Feature).keys())
        if taken:
            raise TypeError(f"{cls.__name__}: {', '.join(sorted(taken))} mean something else here")
        dataclass(frozen=True)(cls)
        cls.name = name or cls.__module__.rpartition(".")[2].replace("_", "-")
        cls.page = page or f"features/{cls.name}.md"
        cls.summary = (cls.__doc__ or "").partition("\n")[0].rstrip(".")
        cls.level, cls.stage, cls.devices = level, stage, devices
        cls.megatron_versions = megatron_versions
        cls.planning, cls.first_layers, cls.schedule = planning, first_layers, schedule
        cls.options = options
        cls.adds_states, cls.omits_states = adds_states, omits_states
        cls.seams, cls.requires, cls.after = seams, requires, after
        named = conflicts if isinstance(conflicts, Mapping) else dict.fromkeys(conflicts, "")
        cls.conflicts, cls.excludes = named, excludes or {}

    def enabled(self, megatron: Megatron) -> bool:
        """Whether the feature is on; by default if any of its flags differs from its default."""
        return self != type(self)()

    @classmethod
    def runs_with(cls, version: Version | str) -> bool:
        """Whether it runs with this release of megatron-core."""
        return in_range(version, cls.megatron_versions)

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
        """Find what is wrong with the flags; called only when the feature is on."""
        return ()

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        """Arguments of Megatron's that must have another value; set in its own namespace."""
        return {}

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        """Attach functions of an algorithm to seams."""

    def uneven_layers(self, megatron: Megatron) -> str:
        """The flag by which layers of one kind differ, so that small runs cannot be composed.

        Empty where they are alike; called only when the feature is on. By default the flag of
        ``first_layers``, if not all layers have it.
        """
        count = getattr(self, self.first_layers) if self.first_layers else None
        of_stages = megatron["recompute_method"] == "block"
        if count is None or (count >= megatron["num_layers"] and not of_stages):
            return ""
        return "--" + self.first_layers.replace("_", "-")

    @classmethod
    def recorded(cls, megatron: Megatron) -> dict[str, Any]:
        """Arguments whose values in the model of a checkpoint differ from those in the run.

        Args:
            megatron: Arguments of a run, maybe of another library's, in its spelling.
        """
        return {}

    @classmethod
    def restored(cls, recorded: Megatron, megatron: Megatron) -> dict[str, Any]:
        """The inverse of :meth:`recorded`: arguments with which a run has a recorded model.

        Args:
            recorded: The model that a checkpoint holds.
            megatron: Arguments of the run.
        """
        return {}
