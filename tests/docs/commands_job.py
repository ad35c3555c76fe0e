"""One command of a page, on the ranks of a :class:`mindspeed.testing.RankPool`."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence

SETUP = "commands_warm"


def run(command: Sequence[str], directory: str) -> tuple[int, str]:
    """Run ``mindspeed COMMAND`` as this rank of its job.

    Returns:
        Status and what was printed.
    """
    from mindspeed.cli.main import main

    os.chdir(directory)
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            status = main(list(command))
        except SystemExit as stop:
            status = int(stop.code or 0)
    return status, text.getvalue()
