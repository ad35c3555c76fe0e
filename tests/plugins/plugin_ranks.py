"""Comparing the plug-ins of ranks."""

from __future__ import annotations

import torch.distributed as dist

from mindspeed import plugins
from mindspeed.errors import ConfigError


def compare(*of_rank: tuple[str, ...]) -> str:
    """The error on a rank whose installed plug-ins are ``of_rank[rank]``; empty without one."""
    plugins.installed = lambda: of_rank[dist.get_rank()]
    try:
        plugins.require_same_on_all_ranks()
    except ConfigError as error:
        return str(error)
    return ""
