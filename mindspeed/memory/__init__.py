"""Activation memory: which saved tensors stay, are computed again, or wait in host memory.

:mod:`~mindspeed.memory.plan` says what happens at each site of each layer,
:mod:`~mindspeed.memory.runtime` executes it on top of autograd's saved-tensor hooks,
:mod:`~mindspeed.memory.figures` counts it. :mod:`~mindspeed.memory.solver` chooses the fastest plan
within a budget, for layers that :mod:`~mindspeed.memory.in_flight` micro-batches hold at once.

:mod:`~mindspeed.memory.fragmentation` is about the allocator that all tensors come from.
"""
