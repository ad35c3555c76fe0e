"""Update rule and state storage of ``FusedAdam``, which features may replace.

    seams.use_kernels(owner=..., update_rule=lambda: RULE, state_codec=codec_of)

A :class:`mindspeed.te.optimizers.FusedAdam` asks once, when it is built. Megatron takes this class
for ``--optimizer adam`` unless NVIDIA's Transformer Engine serves the device.
"""

from __future__ import annotations

import sys

import torch

from mindspeed import te
from mindspeed.errors import ConfigError
from mindspeed.optimizer.codecs import Codec, codec_for
from mindspeed.optimizer.rules import ADAM, UpdateRule


def update_rule() -> UpdateRule:
    """The rule of ``--optimizer adam``."""
    return ADAM


def state_codec(name: str, dtype: torch.dtype) -> Codec:
    """How one state of every parameter is stored.

    Args:
        name: a state of the update rule, or ``master_param``.
        dtype: the dtype of Megatron's flags; ``torch.uint8`` means fp8.
    """
    return codec_for(dtype, name)


def check_in_use(owner: str) -> None:
    """Refuse replacements that would change nothing, because Megatron uses another Adam.

    Raises:
        ConfigError: NVIDIA's Transformer Engine is loaded; names the owner of the replacement.
    """
    if "transformer_engine" in sys.modules and not te.is_substitute():
        raise ConfigError(
            f"{owner} changes the update rule or the states of mindspeed's FusedAdam, but NVIDIA's "
            "Transformer Engine is in use: set MINDSPEED_TE=substitute"
        )
