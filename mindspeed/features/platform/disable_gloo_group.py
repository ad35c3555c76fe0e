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

from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import MAX_COUNT, Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

SLICE = 10 * 1024 * 1024


class DisableGlooGroup(Feature, level=2, seams=("optimizer",)):
    """Checkpoints are written without Gloo groups."""

    disable_gloo_group: bool = flag(
        False, "no Gloo groups; states are gathered through the groups of the accelerator"
    )
    hccl_slice_size: int = flag(
        SLICE, "elements on the device at a time while gathering", range=Range(1, MAX_COUNT)
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self.disable_gloo_group or self.hccl_slice_size != SLICE

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        return {"enable_gloo_process_groups": False}

    def problems(self, megatron: Megatron) -> list[Problem]:
        if self.disable_gloo_group:
            return []
        name = "--hccl-slice-size"
        return [
            Problem(
                name, "has no effect with Gloo groups", "add --disable-gloo-group, or remove it"
            )
        ]

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.adaptor.staged_groups import use_staged_groups

        def use(optimizer: Any) -> Any:
            return use_staged_groups(optimizer, self.hccl_slice_size)

        seams.optimizer.add(use, owner=self.name)
