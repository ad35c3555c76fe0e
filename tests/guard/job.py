"""Guarded trainings with a planted fault, on the ranks of a pool."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
from collections import Counter
from typing import Any

from tests.guard.faults import FAULTS
from tests.support.trainer_job import command, digest


def train(flags: str, fault: str = "", count: bool = False) -> dict[str, Any]:
    """Train on this rank.

    Returns:
        ``error``, ``printed``, ``digest`` of the weights; with ``count`` the bytes of each kind of
        collective over all ranks, as ``collectives``: a list of payloads by name.
    """
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.errors import MindSpeedError
    from mindspeed.instruments import CommLedger
    from mindspeed.training.model import gpt_model
    from mindspeed.training.pretrain import pretrain

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    modules = []

    def provider(*given: Any) -> Any:
        modules.append(gpt_model(*given))
        if fault:
            FAULTS[fault](modules[-1], rank)
        return modules[-1]

    error, printed = None, io.StringIO()
    ledger = CommLedger() if count else contextlib.nullcontext()
    with contextlib.redirect_stdout(printed), ledger as counted:
        try:
            pretrain(_prepare(command(shlex.split(flags)), world), provider)
        except MindSpeedError as caught:
            error = f"{type(caught).__name__}: {caught}"
    events = Counter(
        (one.op, one.payload)
        for one in (counted.events if counted else ())
        if len(one.ranks) == world
    )
    return {
        "error": error,
        "printed": printed.getvalue(),
        "digest": digest(modules),
        "collectives": events,
    }
