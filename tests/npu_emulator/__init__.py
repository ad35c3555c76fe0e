"""An Ascend NPU for tests, on a plain CPU: the real torch_npu, with arithmetic from torch's CPU.

    torch_npu (the real wheel)   Python API, schemas, meta kernels, autograd formulas,
                                 caching allocator, generators, streams
    stubs.c                      instead of the CANN libraries: memory is malloc, streams do nothing
    emulation.py                 instead of the device's kernels: aten operators of the CPU
    reference_ops/               npu:: operators, restated from torch_npu's documentation
    collectives.py               instead of HCCL: gloo

Tests reach it through the fixtures `npu` and `npu_ranks` of ``tests/conftest.py``, which run a
function in a fresh process where torch_npu has been imported over the stubs. Nothing of it is ever
imported into the process of pytest. What it shows: that our calls into torch_npu are right, and
that a training step on npu tensors gives the numbers of the CPU. What it cannot show: speed,
asynchrony, HCCL, and the rounding and limits of the device's own kernels.
"""
