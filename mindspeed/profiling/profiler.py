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
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mindspeed import device, files
from mindspeed.profiling.backends import Recorder, recorder_for
from mindspeed.profiling.options import ProfileOptions

logger = logging.getLogger("mindspeed")


class StepProfiler:
    """Starts and stops the recorder of this rank at the right steps."""

    def __init__(self, options: ProfileOptions, rank: int | None = None) -> None:
        self._options = options
        self._rank = rank
        self._recorder: Recorder | None = None
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
