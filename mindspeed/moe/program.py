"""Programs: the order in which a mixture-of-experts layer computes and communicates, as data.

    OVERLAP = Program.parse(
        "route count> permute count< dispatch> shared_fc1 anchor dispatch< arrange experts "
        "disarrange combine> shared_fc2 combine< unpermute"
    )

A step names a stage. ``name>`` starts a communication, ``name<`` waits for it, ``name!`` does both;
a name alone computes. What lies between ``name>`` and ``name<`` hides the communication, in
backward too: autograd runs the steps mirrored, so there ``name<`` starts the reverse communication
and ``name>`` waits for it.

Programs depend on flags only, so the ranks of a group communicate in one order.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

_STEP = re.compile(r"([a-z][a-z0-9_]*)([<>!]?)")


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
    """

    name: str
    phase: Phase = Phase.COMPUTE

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
        for word in text.split():
            found = _STEP.fullmatch(word)
            if found is None:
                raise ValueError(f"{word!r} is not a step: name, name>, name< or name!")
            name, sign = found.groups()
            phases = (Phase.START, Phase.FINISH) if sign == "!" else (Phase(sign),)
            steps += [Step(name, phase) for phase in phases]
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
        return " ".join(map(str, self.steps))

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
        """Cut before every finish and after every start."""
        run: list[Step] = []
        for step in self.steps:
            if step.phase is Phase.FINISH and run:
                yield tuple(run)
                run = []
            run.append(step)
            if step.phase is Phase.START:
                yield tuple(run)
                run = []
        if run:
            yield tuple(run)
