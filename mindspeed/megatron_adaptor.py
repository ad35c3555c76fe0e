"""The one line: ``import mindspeed.megatron_adaptor`` before anything of Megatron.

Importing this module makes Megatron run on the device of this machine and adds our flags to its
command line. Frameworks without a command line call :func:`repatch` with their arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mindspeed.processes import no_collection

with no_collection():  # a third of the time of this import
    from mindspeed import session
    from mindspeed.features.registry import Configuration, refuse_misspelt

    session.install()


def repatch(args: Mapping[str, Any] | argparse.Namespace) -> Configuration:
    """Attach features for ``args`` (Megatron's and our values), whatever was attached before.

    For frameworks that build Megatron's arguments themselves. Features attach to functions and
    modules that are built later, so call it before the model is built.

    Args:
        args: a mapping or a namespace; names that are no option of ours are Megatron's or the
            framework's. Values that cannot work here are corrected in a namespace; a mapping is
            only read.

    Returns:
        The new configuration; its ``corrections`` are the values that were or are to be corrected.

    Raises:
        ConfigError: wrong options; a name that is almost one of ours.
        PatchTooLate: somebody took a function of Megatron's before the import line.
    """
    refuse_misspelt(args if isinstance(args, Mapping) else vars(args))
    active = session.install()
    active.detach_features()
    configuration = active.configure(args)
    from mindspeed.session.original_features import apply_added_features  # loads all features

    apply_added_features(args)
    return configuration


def get_mindspeed_args(get_defaults: bool = False) -> argparse.Namespace:
    """The flags of our features with their values, in a new namespace.

    Those of the features that are attached, where some are; before, those of the command line.

    Args:
        get_defaults: The defaults, whatever is attached or on the command line.
    """
    from mindspeed.session import original_features

    return original_features.get_mindspeed_args(get_defaults)
