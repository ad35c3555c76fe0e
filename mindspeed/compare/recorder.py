"""Collects the digests of one rank during a step and writes them when the step ends.

    DIR/run.json                       the job: arguments, versions (rank 0)
    DIR/step-000000/rank-00003.safetensors     digests, [tensors, blocks, numbers]
                                       level sample: some elements of each
                                       level full: the tensors, rows and columns of places
    DIR/step-000000/rank-00003.jsonl           a line for each: name, dtype, shape, place

Digests stay on their device until the step ends: a hook neither waits nor copies. The lines are
written last and atomically, so a rank that was killed has either the whole step or none of it. No
rank communicates: parts of a tensor are added when recordings are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mindspeed.compare import rank_files
from mindspeed.compare.digest import (
    BLOCKS,
    NOT_FINITE,
    SAMPLES,
    WIDTH,
    Elements,
    digest,
    digest_and_exact,
)
from mindspeed.compare.names import Name
from mindspeed.files import atomic_write_text, make_dirs

FORMAT = 4
BYTES_OF_PIECE = BLOCKS * WIDTH * 8 + 180
"""Digest, and its line."""
BYTES_OF_SAMPLE = SAMPLES * 9


@dataclass(frozen=True)
class Piece:
    """What a rank has recorded of a tensor.

    Attributes:
        name: The tensor's.
        dtype: As in ``torch.float32``, without ``torch.``.
        shape: Rows and columns of the whole tensor.
        place: Equal for copies.
        count: Number of elements.
        reduction: How many products or terms make up one value.
        sparse: The whole tensor has some of its rows only.
        partial: Pieces at one place are terms of a sum.
    """

    name: Name
    dtype: str
    shape: tuple[int, int]
    place: str
    count: int
    reduction: int
    sparse: bool = False
    partial: bool = False


@dataclass
class RecordedStep:
    """What a rank records in one step."""

    number: int
    pieces: list[Piece] = field(default_factory=list)
    digests: list[torch.Tensor] = field(default_factory=list)
    exact: dict[int, torch.Tensor] = field(default_factory=dict)
    samples: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    recomputed: list[tuple[Name, torch.Tensor]] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    place: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    random: dict[str, str] = field(default_factory=dict)


class RunRecorder:
    """Records steps of a rank.

    Args:
        directory: Of the recording.
        rank: Global rank.
        ranks: Of the job.
        level: ``summary``, ``sample`` (elements of each tensor, too) or ``full`` (all of them).
    """

    def __init__(self, directory: Path, rank: int, ranks: int, level: str = "summary") -> None:
        self._directory, self._rank, self._ranks = directory, rank, ranks
        self._values, self._samples = level == "full", level != "summary"
        self.step: RecordedStep | None = None

    def begin(self, number: int) -> RecordedStep:
        """Begin a step."""
        self.step = RecordedStep(number)
        return self.step

    def add(
        self,
        micro_batch: int,
        when: str,
        module: str,
        what: str,
        x: torch.Tensor,
        place: Elements,
        reduction: int = 1,
        *,
        exactly: bool = False,
    ) -> None:
        """Record a piece of a tensor.

        Args:
            micro_batch: As in :class:`Name`, like the three that follow.
            when: Pass.
            module: Path.
            what: Of the module.
            x: ``[rows, columns]`` of the piece, any dtype.
            place: Its place in the whole tensor.
            reduction: How many products or terms make up one value.
            exactly: Take the exact digest, too.
        """
        step = self.step
        assert step is not None
        name = Name(step.number, micro_batch, when, module, what)
        dtype = str(x.dtype).removeprefix("torch.")
        kind = place.sparse, place.partial
        piece = Piece(name, dtype, place.shape, place.identity, place.count, reduction, *kind)
        if exactly:
            digests, step.exact[len(step.pieces)] = digest_and_exact(x, place)
        else:
            digests = digest(x, place)
        step.digests.append(digests)
        if self._values or module == "data":  # tokens, for another model to run on
            step.values[f"value/{len(step.pieces)}"] = x.detach().cpu().clone().contiguous()
            step.values[f"rows/{piece.place}"] = place.rows.clone()  # two names, one storage
            step.values[f"columns/{piece.place}"] = place.columns.clone()
        if self._samples:
            which, rows, columns = place.sampled
            step.samples.append((which, x.detach()[rows.to(x.device), columns.to(x.device)]))
        step.pieces.append(piece)

    def add_counts(
        self, micro_batch: int, module: str, what: str, counts: torch.Tensor, place: Elements
    ) -> None:
        """Record numbers that add over shards, in the form of a digest.

        Args:
            micro_batch: As in :class:`Name`, like the two that follow.
            module: Path.
            what: Of the module.
            counts: ``[BLOCKS, WIDTH]``, fp64 or fp32.
            place: Of what was counted.
        """
        step = self.step
        assert step is not None
        name = Name(step.number, micro_batch, "forward", module, what)
        step.pieces.append(
            Piece(name, "float64", place.shape, place.identity, place.count, 1, place.sparse)
        )
        step.digests.append(counts)
        if self._samples:
            none = torch.zeros(0, dtype=torch.int64)
            step.samples.append((none, none))

    def add_recomputed(
        self, micro_batch: int, module: str, what: str, different: torch.Tensor
    ) -> None:
        """Note whether a tensor that was computed again differs from what the forward has made.

        Args:
            micro_batch: As in :class:`Name`, like the two that follow.
            module: Path.
            what: Of the module.
            different: A boolean scalar ``[]``.
        """
        assert self.step is not None
        name = Name(self.step.number, micro_batch, "recompute", module, what)
        self.step.recomputed.append((name, different))

    def write_if_not_finite(self) -> None:
        """Write a step with NaN or infinity at once: the training may end before its optimizer."""
        step = self.step
        if step is not None and step.digests:
            counts = torch.stack([one[:, NOT_FINITE].sum() for one in step.digests])
            if bool(counts.any()):  # one wait for the device
                self._write(step)

    def end(self) -> None:
        """Write the step."""
        step, self.step = self.step, None
        if step is not None:
            self._write(step)

    def _write(self, step: RecordedStep) -> None:
        tensors = {"exact": torch.zeros(len(step.pieces), dtype=torch.int64)}
        if step.digests:
            tensors["digests"] = torch.stack(step.digests).double().cpu()
        tensors |= step.values
        if self._samples:
            tensors |= _stacked(step.samples)
        for index, value in step.exact.items():
            tensors["exact"][index] = value.cpu()
        scalars = {
            **step.scalars,
            "tokens": {k: float(v) for k, v in step.scalars["tokens"].items()},
        }
        header = {
            "format": FORMAT,
            "step": step.number,
            "rank": self._rank,
            "ranks": self._ranks,
            "place": step.place,
            "scalars": scalars,
            "skipped": step.skipped,
            "exact": sorted(step.exact),
            "values": self._values,
            "random": step.random,
            "recomputed": len(step.recomputed),
            "differently": [name[1:] for name, different in step.recomputed if bool(different)],
            "pieces": len(step.pieces),
        }
        lines = [header, *(_line(piece) for piece in step.pieces)]
        rank_files.write(self._directory, step.number, "rank", self._rank, lines, tensors)


def _stacked(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Samples of all pieces, ``[pieces, SAMPLES]``: values, and which of them a piece holds."""
    values = torch.zeros(len(samples), SAMPLES, dtype=torch.float64)
    held = torch.zeros(len(samples), SAMPLES, dtype=torch.bool)
    for index, (which, own) in enumerate(samples):
        values[index, which] = own.double().cpu()
        held[index, which] = True
    return {"samples": values, "sampled": held}


def _line(piece: Piece) -> dict[str, Any]:
    return {**vars(piece), "name": piece.name[1:]}


def write_job(directory: Path, job: Mapping[str, Any]) -> None:
    """Write what the job is, for messages of a comparison."""
    make_dirs(directory)
    text = json.dumps({"format": FORMAT, **job}, indent=1, sort_keys=True, default=str)
    atomic_write_text(directory / "run.json", text + "\n")
