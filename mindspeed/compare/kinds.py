"""Kinds of tensors that a job records: the values of ``--record-what``."""

WHAT = (
    "inputs",
    "activations",
    "output-gradients",
    "weights",
    "weight-gradients",
    "main-weights",
    "optimizer",
    "loss",
    "rng",
)
