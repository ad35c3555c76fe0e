"""The local layer spec lacks what the Transformer Engine spec has.

Without Transformer Engine, ``WrappedTorchNorm`` refuses sequence parallelism, persistent layer norm
and zero-centered gamma, and ``DotProductAttention`` refuses packed documents, attention bias and
heads whose key and value sizes differ. The substitute's norm and attention do all of that, so the
local spec is served by the same modules (:mod:`mindspeed.te.local`).
"""

PATCHES = ()
