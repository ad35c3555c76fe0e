"""Like :mod:`tests.ops.preload_triton`, for ranks that interpret kernels."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # Triton's own functions ask when they are defined

import tests.ops.preload_triton  # noqa: F401
