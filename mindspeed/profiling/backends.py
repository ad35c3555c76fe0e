"""torch.profiler and torch_npu.profiler with one interface.

Both follow the same schedule: at most one warm-up step, the window, the result.
"""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any, Protocol

from mindspeed import files
from mindspeed.profiling.options import ProfileOptions

_TABLE_ROWS = 15


class Recorder(Protocol):
    """Records one window on one rank."""

    def start(self, step: int, first: int) -> None:
        """Start at ``step``; record from step ``first``."""

    def step(self) -> None:
        """Begin the next step."""

    def stop(self) -> None:
        """End the window and write the result."""

    def summary(self) -> str:
        """Path of the result, and the table of the most expensive operators."""


def recorder_for(device_name: str, options: ProfileOptions, rank: int) -> Recorder:
    """The recorder of a device."""
    kind = NpuRecorder if device_name == "npu" else TorchRecorder
    return kind(device_name, options, rank)


class TorchRecorder:
    """torch.profiler; the Chrome trace contains one ``ProfilerStep#n`` per step n."""

    def __init__(self, device_name: str, options: ProfileOptions, rank: int) -> None:
        self._options = options
        self._on_cuda = device_name == "cuda"
        name = f"rank{rank}.steps{options.step_start}-{options.step_end - 1}.pt.trace.json"
        self.path = Path(options.save_path) / name
        self._profiler: Any = None
        self._table = ""

    def start(self, step: int, first: int) -> None:
        """Start at ``step``; record from step ``first``."""
        import torch.profiler as torch_profiler

        options = self._options
        self._profiler = torch_profiler.profile(
            activities=self._activities(),
            schedule=torch_profiler.schedule(
                wait=0,
                warmup=first - step,
                active=options.step_end - first,
                repeat=1,
                skip_first=step,
            ),
            on_trace_ready=self._write,
            record_shapes=options.record_shapes,
            profile_memory=options.with_memory,
            with_stack=options.with_stack,
            with_flops=options.level == "level2",
            with_modules=options.level == "level2",
        )
        self._profiler.step_num = step
        self._profiler.current_action = self._profiler.schedule(step)
        self._profiler.start()

    def _activities(self) -> list[Any]:
        from torch.profiler import ProfilerActivity

        options = self._options
        host = options.with_cpu or options.with_stack or options.level != "level0"
        if not self._on_cuda:
            return [ProfilerActivity.CPU]
        return [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if host else [])]

    def step(self) -> None:
        """Begin the next step."""
        self._profiler.step()

    def stop(self) -> None:
        """End the window and write the result."""
        self._profiler.stop()

    def summary(self) -> str:
        """Path of the result, and the table of the most expensive operators."""
        return f"profile written to {self.path}\n{self._table}"

    def _write(self, profiler: Any) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp.json")
        try:
            with files.secure_open(temporary, "x"):
                pass
            profiler.export_chrome_trace(str(temporary))
            files.harden_tree(temporary)
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        order = "self_device_time_total" if self._on_cuda else "self_cpu_time_total"
        self._table = profiler.key_averages().table(sort_by=order, row_limit=_TABLE_ROWS)


class NpuRecorder:
    """torch_npu.profiler, which names its result directory and may analyse it at once."""

    def __init__(self, device_name: str, options: ProfileOptions, rank: int) -> None:
        self._options = options
        self._path = Path(options.save_path)
        self._rank = rank
        self._before: set[Path] = set()
        self._profiler: Any = None

    def start(self, step: int, first: int) -> None:
        """Start at ``step``; record from step ``first``."""
        from torch_npu import profiler as npu_profiler

        options = self._options
        self._before = self._results()
        self._profiler = npu_profiler.profile(
            activities=self._activities(npu_profiler),
            record_shapes=options.record_shapes,
            profile_memory=options.with_memory,
            with_stack=options.with_stack,
            schedule=npu_profiler.schedule(
                wait=0, warmup=first - step, active=options.step_end - first, repeat=1, skip_first=0
            ),
            on_trace_ready=npu_profiler.tensorboard_trace_handler(
                str(self._path), worker_name=f"rank{self._rank}"
            ),
            experimental_config=self._experimental(npu_profiler),
        )
        self._profiler.start()

    def _activities(self, npu_profiler: Any) -> list[Any]:
        kinds = npu_profiler.ProfilerActivity
        return [kinds.NPU, *([kinds.CPU] if self._options.with_cpu else [])]

    def _experimental(self, npu_profiler: Any) -> Any:
        options = self._options
        metrics = npu_profiler.AiCMetrics
        return npu_profiler._ExperimentalConfig(
            profiler_level=getattr(npu_profiler.ProfilerLevel, options.level.capitalize()),
            aic_metrics=metrics.AiCoreNone
            if options.level == "level0"
            else metrics.PipeUtilization,
            l2_cache=False,
            export_type=getattr(npu_profiler.ExportType, options.export_type.capitalize()),
            data_simplification=options.data_simplification,
        )

    def step(self) -> None:
        """Begin the next step."""
        self._profiler.step()

    def stop(self) -> None:
        """End the window and write the result."""
        self._profiler.stop()
        for result in self._results() - self._before:
            files.harden_tree(result)

    def summary(self) -> str:
        """Path of the result, and the table of the most expensive operators."""
        new = sorted(self._results() - self._before)
        tables = [table for result in new for table in result.glob("**/op_statistic.csv")]
        where = ", ".join(map(str, new)) or str(self._path)
        return "\n".join([f"profile written to {where}", *map(_first_rows, tables)])

    def _results(self) -> set[Path]:
        return set(self._path.glob(f"rank{self._rank}_*")) if self._path.is_dir() else set()


def _first_rows(table: Path) -> str:
    """The first lines of a CSV file in columns."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = [row for row, _ in zip(csv.reader(file), range(_TABLE_ROWS + 1), strict=False)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=False)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)
