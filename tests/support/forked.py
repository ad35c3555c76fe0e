"""Commands of ours in forks of a rank that has imported everything: a second each, not ten."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path


def run(words: Sequence[str]) -> tuple[int, str]:
    """Run ``mindspeed`` in a fork of this process: its exit status and what it printed."""
    output = Path(tempfile.gettempdir(), f"planted-{os.getpid()}.txt")
    child = os.fork()
    if child == 0:
        status = 70
        try:
            with open(output, "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                from mindspeed.cli.main import main

                status = main(words)
        except SystemExit as end:
            status = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = output.read_text()
    output.unlink()
    return status, text


def run_all(commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    """:func:`run` for each command."""
    return [run(words) for words in commands]
