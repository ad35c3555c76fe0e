"""Profile a few training steps: ``--profile --profile-step-start 10 --profile-step-end 12``.

Writes a trace per chosen rank into ``--profile-save-path`` and prints a table of the most expensive
operators. On NPU torch_npu.profiler records, elsewhere torch.profiler. Megatron-LM's own profiling
of the same flag is off meanwhile. Under Nsight Systems, which needs it, ours is off instead.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import COUNT, Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class Profiling(Feature, level=0, seams=("train", "step")):
    """Trace and operator table of some training steps."""

    profile: bool = flag(False, "profile some training steps", megatron=True)
    profile_step_start: int = flag(
        10, "first profiled step, counted from 1", megatron=True, range=COUNT
    )
    profile_step_end: int = flag(12, "first step not profiled any more", megatron=True, range=COUNT)
    profile_ranks: tuple[int, ...] = flag(
        (0,), "ranks to profile, -1: all", megatron=True, range=Range(0, 1_000_000, also=(-1,))
    )
    profile_level: Literal["level0", "level1", "level2"] = flag(
        "level0", "level0: device, level1: also collectives, level2: everything"
    )
    profile_with_cpu: bool = flag(False, "record operators on the host")
    profile_with_stack: bool = flag(False, "record Python stacks")
    profile_with_memory: bool = flag(False, "record allocations, needs --profile-with-cpu")
    profile_record_shapes: bool = flag(False, "record input shapes")
    profile_save_path: str = flag("./profile_dir", "directory of the traces")
    profile_export_type: Literal["text", "db"] = flag("text", "format of the result; db: NPU only")
    profile_data_simplification: bool = flag(False, "NPU: delete raw data after the analysis")

    def enabled(self, megatron: Megatron) -> bool:
        return self.profile and "NSYS_PROFILING_SESSION_ID" not in os.environ

    def problems(self, megatron: Megatron) -> list[Problem]:
        from mindspeed import device
        from mindspeed.profiling.profiler import options_from

        world_size = megatron.get("world_size") or int(os.environ.get("WORLD_SIZE", "1"))
        problems = options_from(asdict(self)).problems(device.current().name, world_size)
        return [
            Problem("--profile-" + field.replace("_", "-"), message) for field, message in problems
        ]

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.profiling.profiler import StepProfiler, options_from

        profiler = StepProfiler(options_from(asdict(self)))
        seams.while_training(owner=self.name, profile=False)
        seams.train.add(profiler.around_training, owner=self.name)
        seams.step.add(profiler.around_step, owner=self.name)
