"""Guards in training: what goes wrong on the way is found while it happens, and named.

    nan       a loss or gradient that is not finite: the operator that makes it (:mod:`.not_finite`)
    spike     a loss or gradient norm far outside its recent range (:mod:`.spikes`)
    desync    copies of weights that ranks should hold alike, in bits (:mod:`.megatron_copies`)
    bitflip   a step computed twice, in bits (:mod:`.bit_flips`)

Steps whose bounds were too small are computed again, too (:mod:`.megatron_bounded_steps`).

A finding names step, micro-batch, pass, module and rank, and the checkpoint before it is kept.
"""
