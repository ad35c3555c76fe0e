"""Kinds of tensors that a job records: the values of ``--record-what``, and those by default."""

DEFAULT = (
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
COLLECTIVES = "collectives"
WHAT = (*DEFAULT, COLLECTIVES)
