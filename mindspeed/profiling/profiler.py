"""Profiles a window of training steps and writes one trace per chosen rank.

    options = ProfileOptions(step_start=10, step_end=12, save_path="traces")
    with profile(options) as p:
        for batch in batches:
            train_step(batch)
            p.step()

Steps count from 1 and the window is ``[step_start, step_end)``. torch.profiler records on CPU and
CUDA and writes a Chrome trace (chrome://tracing, https://ui.perfetto.dev, TensorBoard);
torch_npu.profiler records on NPU and writes traces for MindStudio Insight and Perfetto. After the
window a table of the most expensive operators is printed. There is no overhead outside
the window, and ranks that were not chosen never load a profiler.

Both profilers follow the same schedule: at most one warm-up step, the window, the result.
"""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch.distributed as dist

from mindspeed import device, files

_TABLE_ROWS = 15


class WindowRecorder(Protocol):
    """Records one window on one rank."""

    def start(self, step: int, first: int) -> None:
        """Start at ``step``; record from step ``first``."""

    def step(self) -> None:
        """Begin the next step."""

    def stop(self) -> None:
        """End the window and write the result."""

    def summary(self) -> str:
        """Path of the result, and the table of the most expensive operators."""


def recorder_for(device_name: str, options: ProfileOptions, rank: int) -> WindowRecorder:
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
        with_memory: record allocations; needs with_cpu.
        record_shapes: record the shapes of operator inputs.
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


logger = logging.getLogger("mindspeed")


class StepProfiler:
    """Starts and stops the recorder of this rank at the right steps."""

    def __init__(self, options: ProfileOptions, rank: int | None = None) -> None:
        self._options = options
        self._rank = rank
        self._recorder: WindowRecorder | None = None
        self._running = False

    def begin(self, step: int) -> None:
        """Step ``step`` starts now."""
        if not self._running:
            self._running = True
            self._warn_if_over(step)
        options = self._options
        if self._recorder is not None:
            self._recorder.step()
            return
        # The recorder warms up one step earlier, unless the window starts at the first step.
        due = options.step_start - 1 <= step < options.step_end
        if due and options.covers(self.rank):
            files.make_dirs(options.save_path)
            self._recorder = recorder_for(device.current().name, options, self.rank)
            self._recorder.start(step, max(options.step_start, step))

    def end(self, step: int) -> None:
        """Step ``step`` is complete."""
        if step + 1 >= self._options.step_end:
            self.close()

    def close(self) -> None:
        """Write the trace now if the window is still open."""
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            recorder.stop()
            print(f"[rank {self.rank}] {recorder.summary()}", flush=True)

    def _warn_if_over(self, step: int) -> None:
        options = self._options
        if step >= options.step_end and self.rank == 0:
            logger.warning(
                "nothing is profiled: the run continues at step %d, the window was [%d, %d)",
                step,
                options.step_start,
                options.step_end,
            )

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        if self._rank is None:
            initialized = dist.is_available() and dist.is_initialized()
            self._rank = dist.get_rank() if initialized else int(os.environ.get("RANK", "0"))
        return self._rank

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Context manager form of :meth:`begin` and :meth:`end`."""
        self.begin(step)
        yield
        self.end(step)

    @contextmanager
    def around_training(self) -> Iterator[None]:
        """Stops the recorder however training ends."""
        try:
            yield
        finally:
            self.close()


class Steps:
    """The handle that :func:`profile` yields to the training loop."""

    def __init__(self, profiler: StepProfiler) -> None:
        self._profiler = profiler
        self._step = 1

    def step(self) -> None:
        """End a step and begin the next one."""
        self._profiler.end(self._step)
        self._step += 1
        self._profiler.begin(self._step)


@contextmanager
def profile(options: ProfileOptions) -> Iterator[Steps]:
    """Profile any training loop; call ``step()`` on the result after each step.

    Raises:
        ValueError: invalid options; the message names all of them.
    """
    initialized = dist.is_available() and dist.is_initialized()
    world_size = dist.get_world_size() if initialized else int(os.environ.get("WORLD_SIZE", "1"))
    problems = list(options.problems(device.current().name, world_size))
    if problems:
        raise ValueError("\n".join(f"{field} {message}" for field, message in problems))
    profiler = StepProfiler(options)
    with profiler.around_training():
        profiler.begin(1)
        yield Steps(profiler)
