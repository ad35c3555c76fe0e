"""Code of a script, in a process that has imported torch and nothing of Megatron or the adaptor."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from typing import Any


def run(code: str) -> tuple[str, str]:
    """Execute ``code`` as the rank of a pool.

    Returns:
        Standard output and the traceback of an exception, or "".
    """
    import torch

    output, error = io.StringIO(), ""
    with contextlib.redirect_stdout(output):
        try:
            exec(code, {"__name__": "__main__", "torch": torch, "os": os, "sys": sys, "json": json})
        except Exception:
            error = traceback.format_exc()
    return output.getvalue(), error


def loaded() -> list[Any]:
    """Modules of ours and Megatron's that a rank has before its code runs."""
    return sorted(name for name in sys.modules if name.startswith(("mindspeed", "megatron")))
