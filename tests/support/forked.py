"""Commands and tools of ours in forks of a rank that has imported everything: no imports each."""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def run(words: Sequence[str]) -> tuple[int, str]:
    """Run ``mindspeed`` in a fork of this process: its exit status and what it printed."""
    from mindspeed.cli.main import main

    return _in_a_fork(lambda: main(words))


def run_scripts(scripts: Sequence[str], *words: str) -> dict[str, tuple[int, str]]:
    """Run Python files with the same words, each in a fork: :func:`run` by file."""
    return {script: _in_a_fork(lambda script=script: _script(script, words)) for script in scripts}


def _script(path: str, words: Sequence[str]) -> int:
    sys.argv = [path, *words]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
    return 0


def _in_a_fork(job: Callable[[], int]) -> tuple[int, str]:
    output = Path(tempfile.gettempdir(), f"planted-{os.getpid()}.txt")
    child = os.fork()
    if child == 0:
        status = 70
        try:
            with open(output, "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                sys.stdout, sys.stderr = (
                    os.fdopen(1, "w", closefd=False),
                    os.fdopen(2, "w", closefd=False),
                )
                status = job()
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code)
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
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


def demonstration() -> tuple[int, str]:
    """``mindspeed compare --demo``, whose trainings are forks of this process."""
    from mindspeed.cli import compare_demo
    from mindspeed.training import launch
    from tests.training.launch_ranks import Fork

    def trained(
        command: Sequence[str], env: Mapping[str, str], **_: Any
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, *_in_a_fork(lambda: _python(command, env)))

    for name in ("RANK", "WORLD_SIZE"):  # the command is no rank of a job
        del os.environ[name]
    launch.subprocess = SimpleNamespace(Popen=Fork)
    compare_demo.subprocess = SimpleNamespace(
        run=trained, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT
    )
    return run(["compare", "--demo"])


def _python(command: Sequence[str], env: Mapping[str, str]) -> int:
    """What an interpreter does with ``-c TEXT ...`` or ``-m mindspeed ...``."""
    from mindspeed.cli.main import main

    os.environ.update(env)
    _, how, what, *words = command
    if how == "-c":
        sys.argv = [how, *words]
        exec(what, {"__name__": "__main__"})
        return 0
    assert (how, what) == ("-m", "mindspeed")
    return main(words)
