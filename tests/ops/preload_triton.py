"""Imported once by the server of ranks that compile Triton kernels: half a second for each."""

import sys

from tests.ops.triton_jobs import TRITON
from tests.support.wheels import ensure_wheel

sys.path.append(str(ensure_wheel("triton", TRITON)))
import triton.backends.compiler
import triton.compiler
import triton.language  # noqa: F401
