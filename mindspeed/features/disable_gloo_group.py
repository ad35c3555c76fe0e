"""``--disable-gloo-group``: checkpoints are written without any Gloo group.

Megatron creates Gloo groups next to those of the accelerator, to gather the states of the
distributed optimizer in host memory for checkpoints. Gloo connects every rank to every other, which
fails at thousands of ranks (``Gloo connectFullMesh failed``). With this flag there are none; the
states go through the accelerator's own groups, slice by slice
(:mod:`mindspeed.device.staged_group`), and the files are the same to the byte.

Needed for ``--ckpt-format torch`` and ``--distrib-optim-fully-reshardable-mem-efficient``. The
other layouts of ``torch_dist`` gather nothing in host memory: there the flag only saves the groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import MAX_COUNT, Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

SLICE = 10 * 1024 * 1024


@dataclass(frozen=True)
class DisableGlooGroupOptions:
    """Whether Gloo groups exist, and what replaces them."""

    disable_gloo_group: bool = flag(
        False, "no Gloo groups; states are gathered through the groups of the accelerator"
    )
    hccl_slice_size: int = flag(
        SLICE, "elements on the device at a time while gathering", range=Range(1, MAX_COUNT)
    )


def _enabled(options: DisableGlooGroupOptions, megatron: Megatron) -> bool:
    return options.disable_gloo_group or options.hccl_slice_size != SLICE


def _validate(options: DisableGlooGroupOptions, megatron: Megatron) -> list[Problem]:
    if options.disable_gloo_group:
        return []
    name = "--hccl-slice-size"
    return [
        Problem(name, "has no effect with Gloo groups", "add --disable-gloo-group, or remove it")
    ]


def _attach(seams: Seams, options: DisableGlooGroupOptions, megatron: Megatron) -> None:
    from mindspeed.adaptor.staged_groups import use_staged_groups

    def use(optimizer: Any) -> Any:
        return use_staged_groups(optimizer, options.hccl_slice_size)

    seams.optimizer.add(use, owner=FEATURE.name)


FEATURE = Feature(
    name="disable-gloo-group",
    summary="checkpoints are written without Gloo groups",
    level=2,
    options=DisableGlooGroupOptions,
    enabled=_enabled,
    validate=_validate,
    corrects=lambda options, megatron: {"enable_gloo_process_groups": False},
    attach=_attach,
    seams=("optimizer",),
)
