"""Runs a script of Megatron-LM in a rank that has imported it."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

SETUP = "tests.megatron_lm.preload"


def run_script(script: str, flags: Sequence[str], log: str) -> bool:
    """Whether the script ends with status 0; its output goes to ``log`` and the rank's number."""
    out = os.open(f"{log}{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)  # a GPU's, not demanded from a CPU
    folder = Path(script).parent
    sys.argv = [script, *flags]
    sys.path[:0] = [str(folder), os.environ["MEGATRON_LM_PATH"]]
    os.chdir(folder)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            print(end.code, file=sys.stderr)
            raise RuntimeError(f"{script} ended with {end.code}") from end
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return True
