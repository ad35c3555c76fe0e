"""mindspeed: train large models with Megatron on Ascend NPU, NVIDIA GPU and plain CPU.

import mindspeed.megatron_adaptor          # one line in a Megatron script, or
mindspeed.configure(noop_layers=(0,))      # from Python, then
mindspeed.undo()                           # everything is as before
mindspeed.check(model_provider, args)      # are gradients summed over the right ranks?
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed import original

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    import torch

    from mindspeed.features.registry import Configuration

__version__ = "0.16.1.0"  # Megatron's, and a number of ours: docs/installation.md
__all__ = ["__version__", "check", "configure", "undo"]

original.install()


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


def check(
    model_provider: Callable[..., torch.nn.Module], args: argparse.Namespace, jobs: int = 1
) -> str:
    """Prove that every gradient is summed over the right ranks: before a run, without devices.

    As ``mindspeed check --types``, for a framework's own model; see
    :func:`mindspeed.type_check.check_model` for arguments, result and errors.
    """
    from mindspeed.type_check import check_model

    return check_model(model_provider, args, jobs)
