"""Run a command that sees emulated NPUs: python -m tests.npu_emulator COMMAND ...

In a checkout, or with one on PYTHONPATH; with the Python of the command's environment.
"""

import os
import sys

from tests.npu_emulator.environment import autoloaded
from tests.support.wheels import WheelUnavailable

if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit((__doc__ or "").strip())
    try:
        new = os.environ | autoloaded(os.environ.get("PYTHONPATH", ""))
    except WheelUnavailable as reason:
        sys.exit(f"NPU emulator: {reason}")
    os.execvpe(sys.argv[1], sys.argv[1:], new)
