"""Fused operators: one file per operator, with one implementation per device.

    from mindspeed.ops.rms_norm import rms_norm
    y = rms_norm(x, gamma)                # CPU, CUDA or NPU tensors, torch.compile, FakeTensor

Each file reads top down: the public function (shapes, dtypes, errors, source), the reference in
plain torch, which is also the CPU kernel, the calls into torch_npu, shapes for FakeTensor, the
backward, samples for the self-test, and the registration. Triton kernels are in ``ops/triton``;
operators that only scripts of the original library call are in ``ops/compat``.
:class:`Operator` defines one, here or in another package. ``mindspeed ops`` shows which
implementation a device runs here and why others were refused;
``python -m mindspeed.ops.verify`` compares every operator with its reference on real hardware.
"""

from __future__ import annotations

import sys

from mindspeed.ops._check import OperatorError
from mindspeed.ops.compat import OriginalPaths
from mindspeed.ops.registry import Implementation, Operator, set_cpu_mode

sys.meta_path.append(OriginalPaths())

__all__ = ["Implementation", "Operator", "OperatorError", "set_cpu_mode"]
