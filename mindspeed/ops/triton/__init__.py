"""Triton kernels for CUDA, one file per operator family; imported only when an operator runs them.

In every kernel: 16-bit values are converted to fp32 when loaded, computed in fp32 and rounded once
when stored; Python floats are cast to fp32 (torch.compile passes them as fp64, which would promote
the whole kernel); there are no atomics, so results repeat bit for bit.
"""
