"""One rank of ``test_core_script.py``: a script run as Python runs it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from tests.support.trainer_job import whole_mock_data


def run(script: str, flags: Sequence[str]) -> None:
    """``python SCRIPT FLAGS`` in this process."""
    whole_mock_data()
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")
