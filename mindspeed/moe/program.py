"""Programs: the order in which a mixture-of-experts layer computes and communicates, as data.

    OVERLAP = Program.parse(
        "route count> permute count< dispatch> shared_fc1 anchor dispatch< arrange experts "
        "disarrange combine> shared_fc2 combine< unpermute"
    )

A step names a stage. ``name>`` starts a communication, ``name<`` waits for it, ``name!`` does both;
a name alone computes. What lies between ``name>`` and ``name<`` hides the communication, in
backward too: autograd runs the steps mirrored, so there ``name<`` starts the reverse communication
and ``name>`` waits for it.

A layer may have several chunks. Steps in parentheses then stay together; steps in brackets are
skewed: while a chunk does one run of steps, up to the next start, the chunk after it does the run
before. Skewed are chunks that communicate more than twice.

Programs depend on flags only, so the ranks of a group communicate in one order.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

_STEP = re.compile(r"([(\[]?)([a-z][a-z0-9_]*)([<>!]?)([)\]]?)")
_CLOSING = {"(": ")", "[": "]"}


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
        group: of steps of one number other than 0: above 0 they stay together, below 0 they are
            skewed. Not compared: a step is the same in other company.
    """

    name: str
    phase: Phase = Phase.COMPUTE
    group: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return self.name + self.phase.value


@dataclass(frozen=True)
class Program:
    """Steps in their order; for several chunks see :meth:`for_chunks`.

    Attributes:
        steps: of one chunk.
    """

    steps: tuple[Step, ...]

    @classmethod
    def parse(cls, text: str) -> Program:
        """Read a program from its text.

        Raises:
            ValueError: a word is not a step, or a communication is not started and finished once.
        """
        steps: list[Step] = []
        groups, inside = 0, ""
        for word in text.split():
            found = _STEP.fullmatch(word)
            if found is None:
                raise ValueError(f"{word!r} is not a step: name, name>, name< or name!")
            opened, name, sign, closed = found.groups()
            if opened and inside:
                raise ValueError(f"{word!r} opens a second parenthesis")
            inside = inside or opened
            groups += bool(opened)
            phases = (Phase.START, Phase.FINISH) if sign == "!" else (Phase(sign),)
            group = {"": 0, "(": groups, "[": -groups}[inside]
            steps += [Step(name, phase, group) for phase in phases]
            if closed:
                if _CLOSING.get(inside) != closed:
                    raise ValueError(f"{word!r} closes a parenthesis that is not open")
                inside = ""
        if inside:
            raise ValueError(f"a parenthesis is open at the end of {text!r}")
        program = cls(tuple(steps))
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
        text = ""
        for group, steps in groupby(self.steps, key=lambda step: step.group):
            words = " ".join(map(str, steps))
            text += " " + (f"({words})" if group > 0 else f"[{words}]" if group else words)
        return text.lstrip()

    def __contains__(self, name: str) -> bool:
        return any(step.name == name for step in self.steps)

    def without(self, *names: str) -> Program:
        """The program without the steps of some stages."""
        return Program(tuple(step for step in self.steps if step.name not in names))

    def parts(self, name: str) -> tuple[Program, ...]:
        """Cut where the communications before and after a stage begin and end.

        Returns:
            Five: what comes before; what brings the rows; the stage, with what is computed beside
            it; what brings its results back; the rest.
        """
        runs = [
            (computes, list(steps))
            for computes, steps in groupby(self.steps, lambda step: step.phase is Phase.COMPUTE)
        ]
        (place,) = (
            i for i, (computes, steps) in enumerate(runs) if computes and Step(name) in steps
        )
        pieces = [steps for _, steps in runs]
        cut = (pieces[: place - 1], *([one] for one in pieces[place - 1 : place + 2]))
        return tuple(
            Program(tuple(step for steps in part for step in steps))
            for part in (*cut, pieces[place + 2 :])
        )

    def for_chunks(self, chunks: int) -> Iterator[tuple[int, Step]]:
        """The steps of all chunks in execution order, as (chunk, step).

        Every step is done for all chunks before the next, except that a run ``a< compute ... b>``
        stays together for each chunk: while one chunk computes, the others communicate.
        """
        for skewed, section in groupby(self.steps, key=lambda step: min(step.group, 0)):
            runs = list((_skewed_runs if skewed else _runs)(section))
            if not skewed:
                yield from ((c, step) for run in runs for c in range(chunks) for step in run)
                continue
            for time in range(chunks + len(runs) - 1):
                for i, run in enumerate(runs):
                    if 0 <= time - i < chunks:
                        yield from ((time - i, step) for step in run)


def _runs(steps: Iterable[Step]) -> Iterator[tuple[Step, ...]]:
    """Cut before every finish and after every start, and around parentheses."""
    run: list[Step] = []
    for step in steps:
        if run and _cut(run[-1], step):
            yield tuple(run)
            run = []
        run.append(step)
    yield tuple(run)


def _skewed_runs(steps: Iterable[Step]) -> Iterator[tuple[Step, ...]]:
    """Cut after every start."""
    run: list[Step] = []
    for step in steps:
        if run and run[-1].phase is Phase.START:
            yield tuple(run)
            run = []
        run.append(step)
    yield tuple(run)


def _cut(before: Step, after: Step) -> bool:
    if before.group or after.group:
        return before.group != after.group
    return before.phase is Phase.START or after.phase is Phase.FINISH
