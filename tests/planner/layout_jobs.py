"""Settings of layouts, in a process where Megatron is behind the adaptor."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from mindspeed.planner.layout import Layout

SETUP = "tests.support.warm"


def settings_of(argv: Sequence[str], layouts: Sequence[Layout]) -> list[Any]:
    """Of each layout: the layout that its final values say, and these; or the error."""
    from mindspeed.errors import MindSpeedError
    from mindspeed.planner.job import Job
    from mindspeed.planner.layout import layout_of

    job = Job(argv)
    found: list[Any] = []
    for layout in layouts:
        try:
            args = job.settings(layout.overrides(), layout.devices).args
        except MindSpeedError as error:
            found.append(str(error))
        else:
            plain = (bool, int, str, list, type(None))
            values = {name: value for name, value in vars(args).items() if isinstance(value, plain)}
            again = Job(shlex.split(job.command(layout.overrides())))
            same = vars(again.settings(devices=layout.devices).args)
            repeated = all(same[name] == value for name, value in values.items() if name != "nproc")
            found.append((layout_of(args), values, repeated))
    return found


def words_of(argv: Sequence[str], overrides: dict[str, Any]) -> list[str]:
    """The command line of a job with some flags changed."""
    from mindspeed.planner.job import Job

    return Job(argv).flags(overrides)
