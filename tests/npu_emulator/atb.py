"""The operator of Ascend Transformer Boost that we call.

torch_npu defines it in a library of its own, linked to NNAL, which cannot be loaded here; its
schema follows from the C++ function in that library, which ``test_schemas.py`` looks up.
"""

from __future__ import annotations

import torch

from tests.npu_emulator import emulation
from tests.npu_emulator.reference_ops.grouped import _npu_matmul_add_fp32

SCHEMA = "_npu_matmul_add_fp32(Tensor x, Tensor weight, Tensor(a!) C) -> ()"

_library = torch.library.Library("atb", "DEF")


def install() -> None:
    """Defines the operator, and puts it where torch_npu shows it when NNAL is there."""
    import torch_npu

    _library.define(SCHEMA)
    op = torch.ops.atb._npu_matmul_add_fp32
    kernel = emulation.OnHost(op.default, _npu_matmul_add_fp32)
    _library.impl("_npu_matmul_add_fp32", kernel, "PrivateUse1")
    torch_npu._npu_matmul_add_fp32 = op
