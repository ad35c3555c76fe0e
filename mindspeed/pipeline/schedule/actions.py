"""One action of a pipeline schedule, and its text form.

    2F0     forward of stage 2 on micro-batch 0; keeps what backward needs
    2Fc0    forward that keeps its input only
    2R0     recomputation of that forward
    2B0     whole backward
    2I0     backward with respect to inputs only
    2W0     the gradients of weights that this I left out
    2O0     move what the pending W needs to the host
    2L0     load it back
    2G      start the data-parallel reduction of the gradients of stage 2

``F``, ``B``, ``I`` and ``W`` are written as torch.distributed.pipelining writes them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

FORWARD, FORWARD_INPUT_ONLY, RECOMPUTE = "F", "Fc", "R"
BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "B", "I", "W"
REDUCE, OFFLOAD, LOAD = "G", "O", "L"

OPS = ("F", "Fc", "R", "B", "I", "W", "G", "O", "L")
FORWARDS = frozenset({FORWARD, FORWARD_INPUT_ONLY})
BACKWARDS = frozenset({BACKWARD, BACKWARD_INPUT})

_CELL = re.compile(r"(\d+)(Fc|[FRBIWGOL])(\d*)")


class Action(NamedTuple):
    """Entry of a rank's row.

    Attributes:
        op: one of :data:`OPS`.
        stage: 0 to S - 1, in the order in which a micro-batch passes the stages.
        microbatch: 0 to m - 1; None for ``G``, which concerns all.
    """

    op: str
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, cell: str) -> Action:
        """The action that ``cell`` names.

        Raises:
            ValueError: it names none; says why.
        """
        match = _CELL.fullmatch(cell)
        if match is None:
            raise ValueError(f"{cell!r} is no action; 2F0, 2Fc0, 0I3, 0W3, 1B2, 1R5, 1G are some")
        stage, op, microbatch = match.groups()
        if (op == REDUCE) != (microbatch == ""):
            fix = "has no micro-batch" if op == REDUCE else "needs a micro-batch"
            raise ValueError(f"{cell!r}: {op} {fix}")
        return cls(op, int(stage), int(microbatch) if microbatch else None)
