"""The common part of a ``torch_dist`` checkpoint (``common.pt``), read without running code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed.errors import DamagedCheckpoint, SecurityError
from mindspeed.security import safe_torch_load


def common_state(path: Path) -> dict[str, Any]:
    """What a ``torch_dist`` checkpoint holds besides tensors: values of the run, iteration ...

    Raises:
        SecurityError: It holds more than tensors and plain values.
        DamagedCheckpoint: It is damaged.
    """
    try:
        common = safe_torch_load(path / "common.pt")
    except SecurityError:
        raise
    except (RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}/common.pt is damaged: {error}") from error
    if not isinstance(common, dict):
        raise DamagedCheckpoint(f"{path}/common.pt is no common part of a checkpoint")
    return common
