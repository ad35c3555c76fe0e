"""The arithmetic of optimizers: update rules, how their states are stored, and where.

``rules`` changes weights and states given as lists of wide tensors; ``codecs`` stores one state of
one parameter in fewer bytes; ``placement`` keeps it in host memory. None knows parameter groups,
sharding or Megatron: :class:`mindspeed.te.optimizers.FusedAdam` combines them.
"""
