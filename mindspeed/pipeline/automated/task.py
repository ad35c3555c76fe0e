"""What a running job is measured for, and what becomes of its profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed.errors import MindSpeedError
from mindspeed.pipeline.automated.profile import MODULES, Profile
from mindspeed.pipeline.automated.result import write_result
from mindspeed.pipeline.automated.search import Mode, search


@dataclass(frozen=True)
class ProfiledJob:
    """Job for which the profile is measured.

    Attributes:
        mode: ``memory`` or ``perf``.
        ratio: ``--save-memory-ratio``.
        recompute_type: index in :data:`MODULES`.
        path: of the result; the profile is next to it.
        job: values for which it holds.
        megatron: Megatron's arguments.
        kinds: schedules that can run; None: all that are searched.
    """

    mode: Mode
    ratio: float
    recompute_type: int
    path: Path
    job: Mapping[str, Any]
    megatron: Mapping[str, Any]
    kinds: tuple[str, ...] | None = None

    @property
    def profile_path(self) -> Path:
        """``plan.json`` -> ``plan.profile.json``."""
        return self.path.with_suffix(".profile.json")


def report(task: ProfiledJob, profile: Profile) -> str:
    """Write the profile, search, write the result; what to tell users."""
    profile.write(task.profile_path)
    text = f"automated pipeline: measured, {task.profile_path}"
    try:
        found = search(
            profile,
            task.mode,
            ratio=task.ratio,
            module=MODULES[task.recompute_type],
            kinds=task.kinds,
        )
    except MindSpeedError as error:
        return f"{text}; no result: {error}"
    result = write_result(task.path, found, task.job)
    return (
        f"{text}; {task.path} is for the next start, the same as {' '.join(result.flags())}: "
        f"{1e3 * found.before.makespan:,.1f} -> {1e3 * found.after.makespan:,.1f} ms, "
        f"{found.before.peak / 2**20:,.1f} -> {found.after.peak / 2**20:,.1f} MiB"
    )
