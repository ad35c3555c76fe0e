"""Names of recorded tensors: step, micro-batch, pass, module, what; the same in every layout.

    0/3/forward/decoder.layers.17.mlp.linear_fc1/output

Layers have their number in the whole model, from 0; experts too. A norm that another module
contains has the name of its own that it has elsewhere. The order of names is that of a step.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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


PASSES = ("begin", "forward", "backward", "end")
NO_MICRO_BATCH = -1
"""Micro-batch of what exists once in a step: weights, their gradients."""

_RENAMES = (
    (r"(self_attention\.(linear_qkv|linear_q_proj|in_proj))\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"self_attention\.linear_q_up_proj\.layer_norm_", "self_attention.q_layernorm."),
    (r"self_attention\.linear_kv_up_proj\.layer_norm_", "self_attention.kv_layernorm."),
)
_LAYER = re.compile(r"(?:^|\.)(decoder|mtp)\.layers\.(\d+)")


class Name(NamedTuple):
    """Name of a tensor.

    Attributes:
        step: Number of the step, from 0.
        micro_batch: Its number in the step over all ranks; :data:`NO_MICRO_BATCH`.
        when: One of :data:`PASSES`.
        module: Path in the whole model.
        what: ``output``, ``grad_output``, ``weight``, ``main_grad`` ...
    """

    step: int
    micro_batch: int
    when: str
    module: str
    what: str

    def __str__(self) -> str:
        batch = "" if self.micro_batch == NO_MICRO_BATCH else f"micro-batch {self.micro_batch}, "
        return f"step {self.step}, {batch}{self.when}, {self.module}, {self.what}"


def parameter_name(name: str) -> str:
    """Path of a parameter, the same in every layer spec."""
    for pattern, replacement in _RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def layer_of(module: str) -> int | None:
    """Number of its decoder layer; None outside of them."""
    found = _LAYER.search(module)
    return int(found[2]) if found and found[1] == "decoder" else None


def depth(module: str) -> int:
    """Place of a module in the forward: embedding, layers, what follows them."""
    found = _LAYER.search(module)
    if found:
        return int(found[2]) + (1 if found[1] == "decoder" else 2_000_000)
    if module.startswith(("data", "embedding", "position")):
        return 0
    return 3_000_000 if module.startswith(("output_layer", "loss")) else 1_000_000
