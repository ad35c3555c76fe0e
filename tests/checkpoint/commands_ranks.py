"""A command on one rank: ``serve`` stops before it listens, ``chat`` has one question."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from tests.support import commands_job


def run(words: Sequence[str]) -> tuple[int, str, str]:
    """Status, standard output and standard error of ``mindspeed WORDS``."""
    import mindspeed.inference.server.run as server

    server.serve = lambda generator, options: print("served", options.name)
    sys.stdin = io.StringIO("hello\n")
    return commands_job.run(words)


def script(path: str, words: Sequence[str]) -> tuple[int, str, str]:
    """The same for a script of the original suite."""
    import contextlib
    import runpy

    text, errors = io.StringIO(), io.StringIO()
    sys.argv = [path, *words]
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(errors):
        try:
            runpy.run_path(path, run_name="__main__")
            status = 0
        except SystemExit as stop:
            status = int(stop.code or 0)
    return status, text.getvalue(), errors.getvalue()
