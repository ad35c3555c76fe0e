"""Micro-batches of different sizes (dynamic pipeline parallelism, DPP).

A pipeline idles while it fills and drains. Small micro-batches at both ends fill and drain it
sooner, larger ones in the middle do the rest of the work:

    equal     4 4 4 4 4 4 4 4 4 4 4 4 4 4 4 4     36 idle slots a rank (p = 4)
    dynamic   1 2 3 4 5 5 5 5 5 5 5 5 5 4 3 2     25

Number and sum of the sizes stay what ``--micro-batch-size`` and ``--global-batch-size`` say, so a
step trains the same samples. The mean over a step weights every micro-batch by its size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Example:
    """Sizes that are known by name, and what they were chosen for.

    Attributes:
        sizes: samples of each micro-batch.
        micro_batch_size: their mean.
        ranks: pipeline ranks, p.
    """

    sizes: tuple[int, ...]
    micro_batch_size: int
    ranks: int

    @property
    def samples(self) -> int:
        """Samples of a step on one data-parallel rank."""
        return sum(self.sizes)


EXAMPLES = {
    "example-config-1": Example((1, 2, 3, 4, *[5] * 9, 4, 3, 2), micro_batch_size=4, ranks=4),
    "example-config-2": Example(
        (1, 2, 2, 3, 4, *[5] * 13, 4, 4, 3, 3, 3, 2), micro_batch_size=4, ranks=8
    ),
}
"""The sizes that the MindSpeed documentation gives names to."""


@dataclass(frozen=True)
class StepShape:
    """Shape of a training step on one data-parallel rank.

    Attributes:
        ranks: pipeline ranks, p.
        micro_batch_size: mean samples of a micro-batch.
        samples: of a step, ``--global-batch-size`` / data-parallel size.
    """

    ranks: int
    micro_batch_size: int
    samples: int

    @property
    def num_microbatches(self) -> int:
        """m."""
        return self.samples // self.micro_batch_size


def step_shape(arguments: Mapping[str, Any]) -> StepShape | None:
    """What a step looks like on one data-parallel rank; None where sizes are not known yet."""
    names = ("global_batch_size", "data_parallel_size", "micro_batch_size")
    if not all(arguments.get(name) for name in names):
        return None
    samples, ranks, size = (arguments[name] for name in names)
    return StepShape(arguments.get("pipeline_model_parallel_size") or 1, size, samples // ranks)


def parse_sizes(text: str, shape: StepShape) -> tuple[int, ...]:
    """The sizes that ``--manual-mbs`` gives: a list with commas, or the name of an example.

    Raises:
        ValueError: they do not suit the step; says why and what would.
    """
    if (example := EXAMPLES.get(text)) is not None:
        _check_example(text, example, shape)
        return example.sizes
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        names = " or ".join(EXAMPLES)
        raise ValueError(f"{text!r} is neither a list of sizes such as 1,2,2,1 nor {names}")
    sizes = tuple(map(int, words))
    check_sizes(sizes, shape)
    return sizes


def check_sizes(sizes: Sequence[int], shape: StepShape) -> None:
    """Check that ``sizes`` make up one step.

    Raises:
        ValueError: their number or sum is another, or one is 0.
    """
    if 0 in sizes:
        raise ValueError(f"micro-batch {sizes.index(0)} has size 0: every size is at least 1")
    if len(sizes) != shape.num_microbatches:
        raise ValueError(
            f"{len(sizes)} sizes are given and a step has {shape.num_microbatches} micro-batches "
            f"(--global-batch-size / data-parallel size / --micro-batch-size = {shape.samples} / "
            f"{shape.micro_batch_size})"
        )
    if sum(sizes) != shape.samples:
        raise ValueError(
            f"the sizes add up to {sum(sizes)} samples and a step has {shape.samples} "
            "(--global-batch-size / data-parallel size)"
        )


def _check_example(name: str, example: Example, shape: StepShape) -> None:
    needs = [
        ("--micro-batch-size", example.micro_batch_size, shape.micro_batch_size),
        ("--pipeline-model-parallel-size", example.ranks, shape.ranks),
        ("--global-batch-size / data-parallel size", example.samples, shape.samples),
    ]
    wrong = [f"{what} {need}, not {given}" for what, need, given in needs if need != given]
    if wrong:
        raise ValueError(f"{name} needs {' and '.join(wrong)}")


def loss_weight(sizes: Sequence[float], microbatch: int) -> float:
    """Factor of the mean loss of a micro-batch, so that every sample counts the same.

    A schedule divides the mean loss of every micro-batch by m; the samples of a step count the same
    if that of micro-batch i counts for size_i / sum of all sizes: the factor is size_i m / sum.
    """
    return sizes[microbatch] * len(sizes) / sum(sizes)
