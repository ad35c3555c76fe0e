"""Kernels of npu:: operators on CPU tensors, restated from the documentation of torch_npu."""

REFERENCE = {}
