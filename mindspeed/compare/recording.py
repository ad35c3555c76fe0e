"""Reads a recording: the parts of each tensor that ranks have written, added to whole ones.

Pieces of one tensor with different places are parts and add up; pieces with the same place are
copies, which must be equal. Gradients are divided by the scale of the loss, so that they are those
of the mean loss of their micro-batch whatever loss scale, number of micro-batches or ranks a run
has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mindspeed.compare.digest import LARGEST, NOT_FINITE, SKETCHES, SQUARES
from mindspeed.compare.names import NO_MICRO_BATCH, PASSES, Name, depth
from mindspeed.compare.rank_files import damaged, read_tensors
from mindspeed.compare.recorder import FORMAT
from mindspeed.compare.scales import LossTokens
from mindspeed.errors import DataError
from mindspeed.parsing import decode_json

_MASK = (1 << 64) - 1
_PHASE = dict(zip(PASSES, range(len(PASSES)), strict=True))
_LATER = {"learning_rate": 4, "grad_norm": 4, "main_weight": 6}


@dataclass
class Recorded:
    """A whole tensor as a recording has it.

    Attributes:
        name: Its name.
        dtype: Without ``torch.``.
        shape: Rows and columns.
        reduction: How many terms make up one value.
        digest: ``[blocks, numbers]``, fp64.
        exact: Exact digest; None where it was not taken.
        count: Elements that were recorded.
        copies: Ranks whose copy differs from that of the first rank in ``copies[0]``.
        sparse: It has some of its rows only, as the tokens of an expert.
        partial: It was recorded as terms of a sum: its norm is an estimate, as of a difference.
        samples: Elements of the fixed sample ``[samples]`` fp64, nan where none is held; None at
            level ``summary``.
    """

    name: Name
    dtype: str
    shape: tuple[int, int]
    reduction: int
    digest: torch.Tensor
    exact: int | None
    count: int
    copies: tuple[int, ...] = ()
    sparse: bool = False
    partial: bool = False
    samples: torch.Tensor | None = None

    @property
    def sketch(self) -> torch.Tensor:
        """Sketch of each block: ``[blocks, sketches]`` fp64."""
        return self.digest[:, :SKETCHES]

    @property
    def squares(self) -> torch.Tensor:
        """Sum of squares of each block: ``[blocks]`` fp64."""
        return self.digest[:, SQUARES]

    @property
    def norm(self) -> float:
        """Square root of the sum of squares."""
        return float(self.squares.sum().clamp_min(0).sqrt())

    @property
    def largest(self) -> float:
        """Largest magnitude."""
        return float(self.digest[:, LARGEST].max())

    @property
    def not_finite(self) -> int:
        """Number of values that are NaN or infinite."""
        return int(self.digest[:, NOT_FINITE].sum())

    @property
    def whole(self) -> bool:
        """Whether all elements were recorded, as far as one tensor tells."""
        return self.sparse or self.count == self.shape[0] * self.shape[1]


@dataclass
class Recording:
    """A run's recording.

    Attributes:
        directory: Where it is.
        job: Arguments of the job.
        tensors: All of them, by name, in the order of a step.
        scalars: Of each step, from one of its ranks.
        missing: Ranks that have not written a step, by step.
        skipped: What was not recorded, and why.
        sizes: Sizes of the layout, as ``tp_size``, those of the last step.
        recomputed: Tensors that a rank has computed again in the backward, with other bits than
            in the forward, and the rank; in the order of each rank.
        random: Digests of random states at the beginning of a step, by step, rank and name.
    """

    directory: Path
    job: Mapping[str, Any]
    tensors: dict[Name, Recorded]
    scalars: dict[int, Mapping[str, Any]]
    missing: dict[int, list[int]]
    skipped: dict[str, str]
    sizes: Mapping[str, int] = field(default_factory=dict)
    recomputed: list[tuple[Name, int]] = field(default_factory=list)
    random: dict[int, dict[int, Mapping[str, str]]] = field(default_factory=dict)

    @property
    def steps(self) -> list[int]:
        """Recorded steps."""
        return sorted(self.scalars)


@dataclass
class _Rank:
    header: Mapping[str, Any]
    pieces: list[Mapping[str, Any]]
    digests: torch.Tensor
    exact: torch.Tensor
    samples: torch.Tensor | None


def read(directory: Path) -> Recording:
    """Read a recording.

    Raises:
        DataError: the directory has none.
    """
    folders = sorted(directory.glob("step-*"))
    if not folders:
        raise DataError(
            f"{directory}: no recording; a training with --record {directory} writes one"
        )
    tensors: dict[Name, Recorded] = {}
    scalars, missing, skipped, sizes = {}, {}, {}, {}
    recomputed, random = [], {}
    for folder in folders:
        ranks = [_rank(path) for path in sorted(folder.glob("rank-*.jsonl"))]
        if not ranks:
            continue  # all ranks were killed while they wrote
        number = ranks[0].header["step"]
        counts = sorted({one.header["ranks"] for one in ranks})
        if len(counts) > 1:
            raise DataError(
                f"{folder}: of jobs on {' and '.join(map(str, counts))} ranks; give each job a "
                "directory"
            )
        have = {one.header["rank"] for one in ranks}
        if lost := sorted(set(range(ranks[0].header["ranks"])) - have):
            missing[number] = lost
        scalars[number] = ranks[0].header["scalars"]
        sizes = {k: v for k, v in ranks[0].header["place"].items() if k.endswith("_size")}
        random[number] = {rank.header["rank"]: rank.header["random"] for rank in ranks}
        for rank in ranks:
            skipped.update(rank.header["skipped"])
            recomputed += [
                (Name(number, *name), rank.header["rank"]) for name in rank.header["differently"]
            ]
        tensors.update(_step(number, ranks))
    if not scalars:
        raise DataError(f"{directory}: its only step was cut off; record again")
    path = directory / "run.json"
    job = decode_json(path.read_text("utf-8")) if path.is_file() else {}
    return Recording(directory, job, tensors, scalars, missing, skipped, sizes, recomputed, random)


def pieces_of(path: Path) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """The header of a rank's step, and its pieces: the lines of ``rank-*.jsonl``.

    Raises:
        DataError: the file is damaged, or of another version.
    """
    try:
        first, *pieces = path.read_text("utf-8").splitlines()
        return _checked(path, first), [decode_json(piece) for piece in pieces]
    except (ValueError, OSError) as error:
        raise damaged(path, error) from error


def header_of(path: Path) -> Mapping[str, Any]:
    """The header of a rank's step, without its pieces.

    Raises:
        DataError: the file is damaged, or of another version.
    """
    try:
        with path.open(encoding="utf-8") as file:
            return _checked(path, file.readline())
    except (ValueError, OSError) as error:
        raise damaged(path, error) from error


def _checked(path: Path, line: str) -> Mapping[str, Any]:
    header: Mapping[str, Any] = decode_json(line)
    if header["format"] != FORMAT:
        raise DataError(
            f"{path}: written by another version (format {header['format']}); record again"
        )
    return header


def data_of(directory: Path, step: int) -> dict[int, dict[str, torch.Tensor]]:
    """Tokens and labels of each micro-batch of a step, ``[rows]``, by ``tokens`` and ``labels``."""
    from safetensors import safe_open

    found: defaultdict[int, dict[str, torch.Tensor]] = defaultdict(dict)
    for path in sorted((directory / f"step-{step:06d}").glob("rank-*.jsonl")):
        _, pieces = pieces_of(path)
        with safe_open(path.with_suffix(".safetensors"), "pt") as file:
            for index, piece in enumerate(pieces):
                name = Name(step, *piece["name"])
                if name.module == "data":
                    empty = torch.zeros(piece["shape"][0], dtype=torch.int64)
                    whole = found[name.micro_batch].setdefault(name.what, empty)
                    rows = file.get_tensor(f"rows/{piece['place']}")
                    whole[rows] = file.get_tensor(f"value/{index}").view(-1).long()
    return dict(found)


def _rank(path: Path) -> _Rank:
    header, pieces = pieces_of(path)
    data = read_tensors(path)
    digests = data.get("digests", torch.zeros(0))
    samples = None
    if "samples" in data:
        samples = data["samples"].masked_fill(~data["sampled"], float("nan"))
    return _Rank(header, pieces, digests, data["exact"], samples)


def _step(number: int, ranks: list[_Rank]) -> dict[Name, Recorded]:
    """The tensors of a step, in its order."""
    tokens = LossTokens(rank.header for rank in ranks)
    order: dict[tuple[str, str, str], int] = {}
    parts: defaultdict[Name, dict[str, list[tuple[int, int]]]] = defaultdict(dict)
    for index, rank in enumerate(ranks):
        seen: set[tuple[str, str, str]] = set()
        for at, piece in enumerate(rank.pieces):
            name = Name(number, *piece["name"])
            key = (name.when, name.module, name.what)
            if key not in seen:
                seen.add(key)
                order.setdefault(key, at)
            parts[name].setdefault(piece["place"], []).append((index, at))
    found = {}
    for name in sorted(parts, key=lambda one: _order(one, order)):
        found[name] = _whole(name, parts[name], ranks, tokens)
    return found


def _order(name: Name, order: Mapping[tuple[str, str, str], int]) -> tuple[int, ...]:
    """Order of a name in a step: by pass, depth of the module, order on its rank."""
    at = order[name.when, name.module, name.what]
    backwards = name.when in ("backward", "end")
    level = depth(name.module) * (-1 if backwards else 1)
    phase = _PHASE[name.when]
    if name.when == "end" and not name.what.endswith("main_grad"):
        phase = next((at for what, at in _LATER.items() if name.what.endswith(what)), 5)
    return (phase, level, at, name.micro_batch)


def _whole(
    name: Name, places: Mapping[str, list[tuple[int, int]]], ranks: list[_Rank], tokens: LossTokens
) -> Recorded:
    total, exact, count, samples = None, 0, 0, None
    taken, differing, partial = True, [], False
    for copies in places.values():
        index, at = copies[0]
        piece = ranks[index].pieces[at]
        partial |= piece["partial"]
        for index, at in copies if piece["partial"] else copies[:1]:
            rank = ranks[index]
            scale = _scale_of(name, rank, tokens)
            own = _scaled(rank.digests[at], scale)
            total = own if total is None else _sum(total, own)
            if rank.samples is not None:
                samples = _samples(samples, rank.samples[at] / scale, partial)
            taken &= at in rank.header["exact"]
            exact = (exact + int(rank.exact[at])) & _MASK
        count += piece["count"]
        if not piece["partial"]:
            differing += _other_copies(copies, ranks)
    assert total is not None
    if partial:
        total[:, SQUARES] = total[:, :SKETCHES].square().mean(1)
    shape = (piece["shape"][0], piece["shape"][1])
    return Recorded(
        name,
        piece["dtype"],
        shape,
        piece["reduction"],
        total,
        exact if taken else None,
        count,
        tuple(differing),
        piece["sparse"],
        partial,
        samples,
    )


def _scaled(digest: torch.Tensor, scale: float) -> torch.Tensor:
    """Digest of a tensor divided by a number: ``[blocks, numbers]``."""
    own = digest.clone()
    own[:, : SKETCHES + 1] /= scale
    own[:, SQUARES] /= scale * scale
    own[:, LARGEST] /= scale
    return own


def _samples(found: torch.Tensor | None, own: torch.Tensor, partial: bool) -> torch.Tensor:
    """Samples of two parts ``[samples]``: those that either holds; terms of a sum add."""
    if found is None:
        return own
    if partial:
        return torch.where(found.isnan(), own, found + own.nan_to_num())
    return torch.where(found.isnan(), own, found)


def _sum(total: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Digest of two parts: ``[blocks, numbers]``."""
    found = total + own
    found[:, LARGEST] = torch.maximum(total[:, LARGEST], own[:, LARGEST])
    return found


def _other_copies(copies: list[tuple[int, int]], ranks: list[_Rank]) -> list[int]:
    """The first rank and those whose copy differs from its; empty where all are equal."""
    first, at = copies[0]
    others = [
        ranks[index].header["rank"]
        for index, own in copies[1:]
        if not torch.equal(ranks[index].digests[own], ranks[first].digests[at])
        or int(ranks[index].exact[own]) != int(ranks[first].exact[at])
    ]
    return [ranks[first].header["rank"], *others] if others else []


def _scale_of(name: Name, rank: _Rank, tokens: LossTokens) -> float:
    """What a tensor of a rank is divided by."""
    if name.micro_batch == NO_MICRO_BATCH:
        scale: float = rank.header["scalars"]["loss_scale"]
        return scale if name.what.endswith("main_grad") else 1.0
    return tokens.scale(name.micro_batch, rank.header) if name.when == "backward" else 1.0
