"""npu:: operators on CPU tensors, restated from the documentation of torch_npu 2.13.

A restatement is written from the package's own documentation, schemas and meta kernels, and never
looks at `mindspeed.ops`: it is the second witness of what our calls mean. It computes in fp32 and
rounds once, checks the limits that the documentation states, and refuses arguments that it does not
restate. Names of arguments are those of the schemas.
"""

from __future__ import annotations

from tests.npu_emulator.reference_ops import (
    attention,
    collective,
    experts,
    grouped,
    memory,
    norms,
    pointwise,
    ring,
)

_MODULES = (attention, collective, experts, grouped, memory, norms, pointwise, ring)

REFERENCE = {
    f"npu::{name}": kernel for module in _MODULES for name, kernel in module.REFERENCE.items()
}
