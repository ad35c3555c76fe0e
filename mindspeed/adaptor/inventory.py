"""Every patch that this library can make, whatever the device and the flags."""

from __future__ import annotations

import argparse

from mindspeed.adaptor import fused_functions
from mindspeed.adaptor.arguments import argument_patches, config_patches
from mindspeed.adaptor.importing import PostImportHooks
from mindspeed.adaptor.patch import Patch, PatchEngine
from mindspeed.adaptor.repairs import all_repairs
from mindspeed.adaptor.seams import Seams
from mindspeed.adaptor.versions import defined


def all_patches() -> tuple[Patch, ...]:
    """Repairs, argument hooks, the patches of all seams and of all kernels. Installs nothing."""
    seams = Seams(PatchEngine(PostImportHooks(), None))
    of_seams = dict.fromkeys(patch for seam in seams for patch in seam.patches)
    of_kernels = [patch for patches in fused_functions.PATCHES.values() for patch in patches]
    of_arguments = argument_patches(lambda parser: parser, tuple, _nothing, _nothing)
    of_configs = config_patches(list, dict)
    own = (*of_arguments, *of_configs)
    return (*defined.PATCHES, *all_repairs(), *own, *of_seams, *of_kernels)


def _nothing(args: argparse.Namespace) -> None:
    pass
