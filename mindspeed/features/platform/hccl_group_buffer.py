"""``--hccl-group-buffer``: the communication buffers of each HCCL group have their own size.

HCCL gives every communicator two buffers of 200 MB, in a dozen groups 4.8 GB of each device. Sizes
are given by hand (``"dp:200;tp:300"``) or follow from what a group sends
(``--hccl-group-buffer-adaptive``, :mod:`mindspeed.device.hccl_buffers`); what is given wins.
``--hccl-op-mode`` chooses where a group's collectives are expanded (3: on the vector cores).

Ascend NPU only: no other device has these buffers, so elsewhere the flags are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mindspeed.device import hccl_buffers
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

OFF = -1.0


class HcclGroupBuffer(Feature, level=2, seams=("parallel_groups",), devices=("npu",)):
    """The communication buffers of each HCCL group have their own size."""

    hccl_group_buffer: str = flag("", 'MB of the buffers of groups, such as "dp:200;tp:300"')
    hccl_group_buffer_adaptive: bool = flag(False, "buffers as large as what groups send")
    hccl_ep_group_buffer_adaptive_factor: float = flag(
        OFF,
        "tokens that a rank of experts may receive, relative to the mean; -1: default buffers",
        range=Range(0, above=True, also=(OFF,)),
    )
    hccl_op_mode: str = flag("", 'expansion of collectives by group, such as "tp:3"')

    def enabled(self, megatron: Megatron) -> bool:
        return bool(self != HcclGroupBuffer())

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        for name in _TEXTS:
            option = "--" + name.replace("_", "-")
            try:
                hccl_buffers.parse(option, getattr(self, name))
            except ValueError as error:
                yield Problem(option, str(error).removeprefix(f"{option}: "))
        factor = "--hccl-ep-group-buffer-adaptive-factor"
        if self.hccl_ep_group_buffer_adaptive_factor != OFF:
            if not self.hccl_group_buffer_adaptive:
                missing = "--hccl-group-buffer-adaptive"
                yield Problem(factor, f"has no effect without {missing}", f"add {missing}")
            elif not _experts(megatron):
                yield Problem(factor, "the model has no experts", "remove it")

    def traffic_of(self, megatron: Megatron) -> hccl_buffers.LargestCalls:
        """Sizes of the largest collectives, from Megatron's arguments."""
        heads, h = megatron["num_attention_heads"], megatron["hidden_size"]
        groups = megatron["num_query_groups"] if megatron.get("group_query_attention") else heads
        cp = megatron.get("context_parallel_size") or 1
        algorithm = str(megatron.get("context_parallel_algo") or "megatron_cp_algo")
        factor = self.hccl_ep_group_buffer_adaptive_factor
        ulysses = "ulysses" in algorithm
        return hccl_buffers.LargestCalls(
            tokens=megatron["seq_length"] // cp,
            samples=megatron["micro_batch_size"],
            hidden_size=h,
            key_size=groups * (megatron.get("kv_channels") or h // heads),
            element=2 if megatron.get("bf16") or megatron.get("fp16") else 4,
            tensor_parallel=megatron.get("tensor_model_parallel_size") or 1,
            sequence_parallel=bool(megatron.get("sequence_parallel")),
            ring=cp > 1 and not ulysses,
            ulysses=cp > 1 and algorithm != "megatron_cp_algo",
            expert_parallel=megatron.get("expert_model_parallel_size") or 1,
            topk=megatron.get("moe_router_topk") or 1,
            expert_factor=None if factor == OFF else factor,
        )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        import torch.distributed as dist

        from mindspeed.device.npu_shim import new_group_with_options

        sizes: dict[str, int] = {}
        if self.hccl_group_buffer_adaptive:
            sizes |= hccl_buffers.adaptive_buffers(self.traffic_of(megatron))
        sizes |= hccl_buffers.parse("--hccl-group-buffer", self.hccl_group_buffer)
        modes = hccl_buffers.parse("--hccl-op-mode", self.hccl_op_mode)
        made: list[str | None] = []
        new_group = new_group_with_options(dist.new_group, sizes, modes, made)
        seams.journal.set(dist, "new_group", new_group, owner=self.name)
        seams.parallel_groups.add(_reporter(sizes, made), owner=self.name)


_TEXTS = ("hccl_group_buffer", "hccl_op_mode")


def _experts(megatron: Megatron) -> int:
    return megatron.get("num_experts") or megatron.get("num_moe_experts") or 0


def _reporter(sizes: dict[str, int], made: list[str | None]) -> Callable[[], None]:
    def report() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 0:
            before, after = (hccl_buffers.device_megabytes(made, by) for by in ({}, sizes))
            print(
                f" HCCL buffers of {len(made)} groups: at most {after:,} MB of this device, "
                f"{before:,} MB by default",
                flush=True,
            )
        made.clear()

    return report
