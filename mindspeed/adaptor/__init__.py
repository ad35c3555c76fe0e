"""The bridge to Megatron: the only place that knows Megatron's inner names.

``patch`` changes names under a contract, ``seams`` are the joints
that features use, ``repairs`` fix upstream defects, ``versions`` says which Megatron is here.
"""
