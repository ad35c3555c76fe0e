"""Defect: flags of rotary embeddings do not reach the model.

Where: Megatron-LM's ``gpt_builders.py`` builds ``GPTModel`` without ``--rope-scaling-factor`` and
``--rotary-seq-len-interpolation-factor`` (Megatron-LM PR 2902).
Symptom: silent; ``--use-rope-scaling`` scales by 8 whatever factor is given (Llama 3.2 has 32), and
positions are not interpolated.
Fix: a model of a script whose caller leaves them out is built with the values of the flags.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from mindspeed.adaptor.arguments import script_arguments
from mindspeed.adaptor.patch import repair

_FLAGS = {
    "rope_scaling_factor": "rope_scaling_factor",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}


def needed(values: Mapping[str, Any]) -> bool:
    """Whether a flag changes what the model would do without it."""
    scaled = values.get("use_rope_scaling") and values.get("rope_scaling_factor") is not None
    return bool(scaled or values.get("rotary_seq_len_interpolation_factor"))


def read_flags(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``GPTModel.__init__``."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        values = vars(script_arguments() or Namespace())
        flags = {name: values[flag] for name, flag in _FLAGS.items() if flag in values}
        original(self, *args, **(flags | kwargs))

    return __init__


PATCHES = (
    repair(
        "megatron.core.models.gpt.gpt_model:GPTModel.__init__",
        read_flags,
        "--rope-scaling-factor and --rotary-seq-len-interpolation-factor have an effect",
        expects="(self, config, transformer_layer_spec, vocab_size, max_sequence_length, ...)",
    ),
)
