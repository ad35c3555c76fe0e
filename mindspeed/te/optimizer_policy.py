"""Update rule and state storage of ``FusedAdam``, which features may replace.

    seams.use_kernels(owner=..., update_rule=lambda: RULE, state_codec=codec_of)

``state_codec`` is asked for every state, ``keeps_fp32`` for every parameter whose codec quantises,
``remainder_codec`` for master weights of which the bf16
parameter holds a part (``--reuse-fp32-param``, ``--use-precision-aware-optimizer``).

A :class:`mindspeed.te.optimizers.FusedAdam` asks once, when it is built. Megatron takes this class
for ``--optimizer adam`` unless NVIDIA's Transformer Engine serves the device.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from mindspeed import te
from mindspeed.errors import ConfigError
from mindspeed.optimizer import block_fp8
from mindspeed.optimizer.block_fp8 import BlockFp8, RootBlockFp8
from mindspeed.optimizer.codecs import BFloat16, Full, Scaled, StateCodec
from mindspeed.optimizer.placement import StatePlacement
from mindspeed.optimizer.remainder import Remainder
from mindspeed.optimizer.rules import ADAM, UpdateRule


def update_rule() -> UpdateRule:
    """The rule of ``--optimizer adam``."""
    return ADAM


def state_codec(name: str, dtype: torch.dtype) -> StateCodec:
    """How one state of every parameter is stored.

    Args:
        name: a state of the update rule, or ``master_param``.
        dtype: the dtype of Megatron's flags; ``torch.uint8`` means fp8.
    """
    if dtype == torch.float32:
        return Full()
    if dtype == torch.bfloat16:
        return BFloat16()
    if dtype == torch.float16:
        return Scaled(torch.float16, torch.finfo(torch.float16).max / 2)
    if dtype == torch.uint8:
        return RootBlockFp8() if name == "exp_avg_sq" else BlockFp8()
    raise RuntimeError(
        f"FusedAdam: {name} can be fp32, fp16, bf16 or fp8 (torch.uint8), not {dtype}"
    )


def keeps_fp32(param: Tensor) -> bool:
    """Whether states of this parameter stay in fp32 where others are quantised.

    Args:
        param: a parameter, or its flat shard ``[n]``.
    """
    return block_fp8.keeps_fp32(param)


def remainder_codec() -> StateCodec:
    """How a master weight is stored next to its bf16 parameter, as int16."""
    return Remainder()


def state_placement(name: str) -> StatePlacement | None:
    """Placement of one state of every parameter; None: on the device, as its codec allocates it.

    Args:
        name: a state of the update rule, or ``master_param``; it must be stored in fp32.
    """
    return None


def pipeline_rank() -> int:
    """The pipeline stage of this rank, once the parallel groups exist."""
    from megatron.core import parallel_state

    return parallel_state.get_pipeline_model_parallel_rank()


def check_in_use(owner: str) -> None:
    """Refuse replacements that would change nothing, because Megatron uses another Adam.

    Raises:
        ConfigError: A native Transformer Engine is loaded; names the owner of the replacement.
    """
    if "transformer_engine" in sys.modules and not te.is_substitute():
        raise ConfigError(
            f"{owner} changes the update rule or the states of mindspeed's FusedAdam, but a native "
            "Transformer Engine is in use: set MINDSPEED_TE=substitute"
        )
