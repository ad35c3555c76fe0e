"""Tensor parallelism: linear layers that hide, skip or shrink their communication.

All linear layers communicate through the products of :mod:`mindspeed.te.kernels`: gather and
multiply, multiply and scatter, multiply and reduce. The strategies here are other ways to compute
them, over tensors and a process group.
"""
