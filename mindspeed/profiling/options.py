"""Which steps and ranks are profiled, in which detail."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Level = Literal["level0", "level1", "level2"]


@dataclass(frozen=True)
class ProfileOptions:
    """Steps, ranks and details to profile.

    Attributes:
        step_start: first profiled step, counted from 1.
        step_end: end of the window, exclusive.
        ranks: global ranks to profile; -1 stands for all.
        level: level0 device work (on the CPU: operators), level1 also the host side with
            collectives and their groups (NPU: pipe utilisation), level2 also FLOPs and modules
            (NPU: everything).
        with_cpu: record operators on the host.
        with_stack: record Python stacks.
        with_memory: record allocations; needs with_cpu.
        record_shapes: record the shapes of operator inputs.
        save_path: directory of the traces.
        export_type: ``text`` or, NPU only, ``db``.
        data_simplification: NPU only: delete raw data after analysis.
    """

    step_start: int = 10
    step_end: int = 12
    ranks: tuple[int, ...] = (0,)
    level: Level = "level0"
    with_cpu: bool = False
    with_stack: bool = False
    with_memory: bool = False
    record_shapes: bool = False
    save_path: str = "./profile_dir"
    export_type: Literal["text", "db"] = "text"
    data_simplification: bool = False

    def problems(self, device_name: str, world_size: int) -> Iterator[tuple[str, str]]:
        """All errors in these options, as (field, message)."""
        if self.step_start < 1:
            yield "step_start", f"is {self.step_start}, but the first step is 1"
        if self.step_end <= self.step_start:
            yield (
                "step_end",
                f"is {self.step_end} and step_start is {self.step_start}: the window is empty; "
                "step_end must be larger",
            )
        if self.with_memory and not self.with_cpu:
            yield (
                "with_memory",
                "needs profile with_cpu: allocations belong to operators of the host",
            )
        for rank in self.ranks:
            if not -1 <= rank < world_size:
                yield "ranks", f"names rank {rank}, there are ranks 0 to {world_size - 1} (-1: all)"
        if self.export_type == "db" and device_name != "npu":
            yield "export_type", f"db exists on npu only, on {device_name} use text"
        problem = _not_writable(Path(self.save_path))
        if problem:
            yield "save_path", problem

    def covers(self, rank: int) -> bool:
        """Whether ``rank`` is to be profiled."""
        return rank in self.ranks or -1 in self.ranks


def options_from(values: Mapping[str, Any]) -> ProfileOptions:
    """Options from flags: ``profile_with_cpu`` sets ``with_cpu``, and so on."""
    names = ProfileOptions.__dataclass_fields__
    return ProfileOptions(**{name: values[f"profile_{name}"] for name in names})


def _not_writable(path: Path) -> str:
    existing = path
    while not existing.exists() and existing.parent != existing:
        existing = existing.parent
    if not existing.is_dir():
        return f"{path} cannot be created: {existing} is not a directory"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{path} cannot be written: no permission in {existing}"
    return ""
