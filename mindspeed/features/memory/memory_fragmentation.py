"""Less memory lost between blocks of the caching allocator: ``--memory-fragmentation POLICY``.

    expandable    segments grow instead of being too small (PYTORCH_ALLOC_CONF=expandable_segments)
    pools         model, gradient buffers and optimizer states are allocated apart from activations
    auto          expandable, and a table of what each policy reserves in a simulation of this run

The original replaced the allocator; today's allocators can do this themselves. On the CPU, which
has no caching allocator, only the simulation runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from mindspeed.adaptor.printing import print_rank_0
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

_FLAG = "--memory-fragmentation"


class MemoryFragmentation(Feature, level=2, seams=("model_arguments", "optimizer", "schedule")):
    """Expandable segments, or a pool for long-lived tensors; simulated before it is chosen."""

    memory_fragmentation: Literal["off", "expandable", "pools", "auto", "0", "1"] = flag(
        "off",
        "how the caching allocator is used; auto (or 1): expandable segments and a simulated table",
        env="MEMORY_FRAGMENTATION",
    )

    @property
    def policy(self) -> str:
        """off, expandable, pools or auto."""
        return {"0": "off", "1": "auto"}.get(self.memory_fragmentation, self.memory_fragmentation)

    def enabled(self, megatron: Megatron) -> bool:
        return self.policy != "off"

    def problems(self, megatron: Megatron) -> list[Problem]:
        from mindspeed import device
        from mindspeed.device import allocator

        here, policy = device.current(), self.policy
        flag_and_value = f"{_FLAG} {policy}"
        if not isinstance(here, device.Accelerator):
            if policy == "auto":
                return []
            message = f"the {here.name} has no caching allocator"
            return [Problem(flag_and_value, message, f"{_FLAG} auto prints a simulation")]
        if policy == "pools":
            graphs = megatron.get("cuda_graph_impl") not in (None, "none")
            message = "captured graphs have pools of their own: remove --cuda-graph-impl"
            return [Problem(flag_and_value, message)] if graphs else []
        found = allocator.problem(here)
        return [Problem(flag_and_value, found)] if found else []

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed import device
        from mindspeed.device import allocator
        from mindspeed.memory import fragmentation

        here = device.current()
        if isinstance(here, device.Accelerator):
            if self.policy == "pools":
                pool = fragmentation.LongLivedPool(here.memory_pool())
                seams.model_arguments.add(pool.before_model, owner=self.name)
                seams.optimizer.add(pool.with_optimizer, owner=self.name)
                return
            seams.journal.call_on_undo(allocator.use_expandable_segments(here))
        if self.policy == "auto":
            report = fragmentation.FragmentationReport(_print)
            seams.optimizer.add(report.with_optimizer, owner=self.name)
            seams.schedule.add(report.with_schedule, owner=self.name)


def _print(text: str) -> None:
    print_rank_0(f"memory fragmentation of two steps, simulated\n{text}")
