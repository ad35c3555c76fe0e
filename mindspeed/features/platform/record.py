"""Record digests of a training's tensors: ``--record DIR``.

Written for ``mindspeed compare A B``, which names the first tensor in which two runs differ: on
other devices, in other layouts, with other versions or flags. Nothing runs between recorded steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mindspeed.compare.names import DEFAULT, WHAT
from mindspeed.errors import ConfigError, DataError
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import NOT_NEGATIVE, Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class Record(
    Feature,
    level=0,
    page="compare.md",
    seams=("schedule", "step", "optimizer"),
    planning=("no part",),
    excludes={
        "overlap_moe_expert_parallel_comm": "modules of two micro-batches run in parts",
    },
):
    """Digests of a training's tensors, for mindspeed compare."""

    record: str = flag("", "directory for digests of the tensors, for mindspeed compare")
    record_steps: tuple[int, ...] = flag(
        (0,), "steps that are recorded, from 0", range=NOT_NEGATIVE
    )
    record_micro_batches: tuple[int, ...] = flag(
        (), "micro-batches of a step that are recorded, from 0; none: all", range=NOT_NEGATIVE
    )
    record_by_sample: bool = flag(
        False, "digests of each sample, to compare runs with other micro-batch sizes"
    )
    record_what: tuple[str, ...] = flag(
        DEFAULT, "kinds of tensors that are recorded; collectives: messages between ranks, too"
    )
    record_level: Literal["summary", "sample", "full"] = flag(
        "summary", "summary: digests; sample: 16 elements of each tensor, too; full: all of it"
    )
    record_forced: str = flag(
        "", "recording of level full whose tensors replace those of this run once recorded"
    )
    record_operators: tuple[str, ...] = flag(
        (), "modules whose operators are recorded one by one, as mindspeed compare names them"
    )
    record_noise: int = flag(
        0,
        "number of a run with errors as large as rounding in every recorded tensor; 0: none",
        range=Range(0, 1000),
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if not self.record:
            yield Problem("--record-steps and its like", "record nothing", "add --record DIR")
        if self.record_by_sample and self.record_forced:
            yield Problem("--record-forced", "takes micro-batches", "leave out --record-by-sample")
        unknown = [one for one in self.record_what if one not in WHAT]
        if unknown:
            yield Problem("--record-what", f"{unknown[0]!r} is none of {', '.join(WHAT)}")
        if self.record_forced:
            from mindspeed.compare.forced import check_recording

            try:
                check_recording(Path(self.record_forced), self.record_steps)
            except (ConfigError, DataError) as error:
                yield Problem("--record-forced", str(error))

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.compare.job import JobRecording, RecordOptions

        options = RecordOptions(
            Path(self.record),
            self.record_steps,
            self.record_micro_batches,
            self.record_what,
            self.record_noise,
            self.record_level,
            Path(self.record_forced) if self.record_forced else None,
            self.record_operators,
            self.record_by_sample,
        )
        recording = JobRecording(options, dict(megatron))
        seams.step.add(recording.around_step, owner=self.name)
        seams.schedule.add(recording.with_schedule, owner=self.name)
        seams.optimizer.add(recording.with_optimizer, owner=self.name)
