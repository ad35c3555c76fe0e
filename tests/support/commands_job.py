"""One command of a documentation page, on the ranks of a :class:`mindspeed.testing.RankPool`."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence

SETUP = "tests.support.warm"


def run(command: Sequence[str], directory: str = ".") -> tuple[int, str, str]:
    """Run ``mindspeed COMMAND`` in a directory, as this rank of its job.

    Returns:
        Status, standard output and standard error.
    """
    from mindspeed.cli.main import main

    os.chdir(directory)
    text, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(errors):
        try:
            status = main(list(command))
        except SystemExit as stop:
            status = int(stop.code or 0)
    return status, text.getvalue(), errors.getvalue()
