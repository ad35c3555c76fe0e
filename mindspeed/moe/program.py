"""Programs: the order in which a mixture-of-experts layer computes and communicates, as data.

    OVERLAP = Program.parse(
        "route count> permute count< dispatch> shared_fc1 anchor dispatch< arrange experts "
        "disarrange combine> shared_fc2 combine< unpermute"
    )

A step names a stage. ``name>`` starts a communication, ``name<`` waits for it, ``name!`` does both;
a name alone computes. What lies between ``name>`` and ``name<`` hides the communication, in
backward too: autograd runs the steps mirrored, so there ``name<`` starts the reverse communication
and ``name>`` waits for it. Steps in parentheses stay together where a layer has several chunks.

Programs depend on flags only, so the ranks of a group communicate in one order.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

_STEP = re.compile(r"(\(?)([a-z][a-z0-9_]*)([<>!]?)(\)?)")


class Phase(enum.Enum):
    """What a step does."""

    COMPUTE = ""
    START = ">"
    FINISH = "<"


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: of the stage.
        phase: compute, or one half of a communication.
        group: steps of one number other than 0 stay together.
    """

    name: str
    phase: Phase = Phase.COMPUTE
    group: int = 0

    def __str__(self) -> str:
        return self.name + self.phase.value


@dataclass(frozen=True)
class Program:
    """Steps in their order; for several chunks see :meth:`for_chunks`.

    Attributes:
        steps: of one chunk.
        skewed: chunks are one run of steps apart from each other.
    """

    steps: tuple[Step, ...]
    skewed: bool = False

    @classmethod
    def parse(cls, text: str, *, skewed: bool = False) -> Program:
        """Read a program from its text.

        Args:
            text: the steps.
            skewed: see :meth:`for_chunks`.

        Raises:
            ValueError: a word is not a step, or a communication is not started and finished once.
        """
        steps: list[Step] = []
        groups, inside = 0, False
        for word in text.split():
            found = _STEP.fullmatch(word)
            if found is None:
                raise ValueError(f"{word!r} is not a step: name, name>, name< or name!")
            opened, name, sign, closed = found.groups()
            if (opened and inside) or (closed and not (opened or inside)):
                raise ValueError(f"the parenthesis of {word!r} is inside another, or alone")
            inside = inside or bool(opened)
            groups += bool(opened)
            phases = (Phase.START, Phase.FINISH) if sign == "!" else (Phase(sign),)
            steps += [Step(name, phase, groups if inside else 0) for phase in phases]
            inside = inside and not closed
        if inside:
            raise ValueError(f"a parenthesis is open at the end of {text!r}")
        program = cls(tuple(steps), skewed)
        program._check()
        return program

    def _check(self) -> None:
        seen: dict[str, list[Phase]] = {}
        for step in self.steps:
            seen.setdefault(step.name, []).append(step.phase)
        for name, phases in seen.items():
            if phases not in ([Phase.COMPUTE], [Phase.START, Phase.FINISH]):
                raise ValueError(
                    f"{name} must be computed once, or started and then finished, not "
                    f"{' '.join(str(Step(name, phase)) for phase in phases)}"
                )

    def __str__(self) -> str:
        groups = [0, *(step.group for step in self.steps), 0]
        return " ".join(
            f"{'(' if step.group and step.group != groups[i] else ''}{step}"
            f"{')' if step.group and step.group != groups[i + 2] else ''}"
            for i, step in enumerate(self.steps)
        )

    def __contains__(self, name: str) -> bool:
        return any(step.name == name for step in self.steps)

    def without(self, *names: str) -> Program:
        """The program without the steps of some stages."""
        steps = tuple(step for step in self.steps if step.name not in names)
        return Program(steps, self.skewed)

    def for_chunks(self, chunks: int) -> Iterator[tuple[int, Step]]:
        """The steps of all chunks in execution order, as (chunk, step).

        Every step is done for all chunks before the next, except that a run ``a< compute ... b>``
        stays together for each chunk: while one chunk computes, the others communicate.

        A skewed program is for chunks that communicate more than twice: while chunk c does one run
        of steps, up to the next start, chunk c + 1 does the run before it.
        """
        if self.skewed:
            runs = list(self._skewed_runs())
            for time in range(chunks + len(runs) - 1):
                for i, run in enumerate(runs):
                    if 0 <= time - i < chunks:
                        for step in run:
                            yield time - i, step
            return
        for run in self._runs():
            for chunk in range(chunks):
                for step in run:
                    yield chunk, step

    def _skewed_runs(self) -> Iterator[tuple[Step, ...]]:
        """Cut after every start."""
        run: list[Step] = []
        for step in self.steps:
            if run and run[-1].phase is Phase.START:
                yield tuple(run)
                run = []
            run.append(step)
        yield tuple(run)

    def _runs(self) -> Iterator[tuple[Step, ...]]:
        """Cut before every finish and after every start, and around parentheses."""
        run: list[Step] = []
        for step in self.steps:
            if run and _cut(run[-1], step):
                yield tuple(run)
                run = []
            run.append(step)
        if run:
            yield tuple(run)


def _cut(before: Step, after: Step) -> bool:
    if before.group or after.group:
        return before.group != after.group
    return before.phase is Phase.START or after.phase is Phase.FINISH
