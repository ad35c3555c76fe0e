"""Which programs a training step of one rank executes."""

from __future__ import annotations

from collections.abc import Sequence


def executed(flags: Sequence[str]) -> list[str]:
    """Train one step; the program of every call of a layer of experts."""
    from mindspeed.moe.layer import megatron
    from tests.training.matrix_job import train

    programs, before = [], megatron.execute

    def watched(program, *args):
        programs.append(str(program))
        before(program, *args)

    megatron.execute = watched
    try:
        train([*flags, "--train-iters", "1"])
    finally:
        megatron.execute = before
    return programs
