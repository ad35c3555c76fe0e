"""The arithmetic of optimizers: update rules, and how their states are stored.

``rules`` changes weights and states given as lists of wide tensors; ``codecs`` stores one state of
one parameter in fewer bytes. Neither knows the other, parameter groups, sharding or Megatron:
:class:`mindspeed.te.optimizers.FusedAdam` combines them.
"""
