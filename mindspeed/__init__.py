"""mindspeed: train large models with Megatron on Ascend NPU, NVIDIA GPU and plain CPU.

import mindspeed.megatron_adaptor          # one line in a Megatron script, or
mindspeed.configure(noop_layers=(0,))      # from Python, then
mindspeed.undo()                           # everything is as before
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed.features.registry import Configuration

__version__ = "0.1.0"
__all__ = ["__version__", "configure", "undo"]


def configure(**options: Any) -> Configuration:
    """Install the adaptor if need be and attach the features that these options enable.

    May be called again with other options until Megatron's parallel groups exist; after that call
    :func:`undo` first.

    Args:
        options: flags of our features by name (``mindspeed features`` lists them).

    Raises:
        mindspeed.errors.ConfigError: unknown option, wrong value, conflict.
    """
    from mindspeed import session

    return session.install().configure(options, strict=True)


def undo() -> None:
    """Take back every change to torch and Megatron."""
    from mindspeed import session

    session.undo()
