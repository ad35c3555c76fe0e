"""Tensor parallelism for sizes that the number of ranks does not divide.

Query groups, width of the MLP and sequence length are shared as evenly as whole units allow
(:mod:`.sizes`); uneven rows are gathered and reduced by :mod:`.rows`; :mod:`.megatron` builds
Megatron's layers from the sizes of a rank.
"""
