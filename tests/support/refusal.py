"""Whether features refuse arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def refusal(values: Mapping[str, Any]) -> str:
    """Why a job with these arguments is refused on a CPU; empty where it is not."""
    from mindspeed.errors import ConfigError
    from mindspeed.features.registry import resolve

    try:
        resolve(values, "cpu")
    except ConfigError as error:
        return str(error)
    return ""
