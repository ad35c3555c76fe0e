"""``--optimization-level``: how much of the library may act.

0: Megatron runs on this device, nothing else changes. 1: also fused operators. 2 (default): also
every feature whose own flag is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed.flags import flag


@dataclass(frozen=True)
class LevelOptions:
    """The one option that concerns all features."""

    optimization_level: Literal[0, 1, 2] = flag(
        2, "0: compatibility only, 1: + fused operators, 2: + all features whose flag is set"
    )
