"""What the time of a job depends on besides its operators: precision, and how experts exchange.

    program = program_of(args)
    DeviceRates(cluster, program)

A job in fp8 or fp4 is executed in bf16 or emulated, and priced in its precision. Products of linear
layers run in it, those of the router and of the output layer stay bf16, as in Megatron-Core, and so
does attention. To quantise an operand, its bf16 values are read twice: for the maximum of the whole
tensor and for the values, or in blocks for values by rows and by columns; both are written. Weights
are quantised once a step, which is left out.

Experts exchange every copy of a token, or with the flexible dispatcher (DeepEP, HybridEP) a token
once for each rank and node that has one of its experts: with E experts on R ranks, k of which a
token takes at random, a rank is taken with probability ``1 - C(E - E/R, k) / C(E, k)``; a node
likewise.

Ranks wait for the one that gets most tokens: an exchange takes as long as its busiest rank sends or
receives, which is the counted one (:mod:`mindspeed.planner.expert_loads`).

Sources: Transformer Engine's documentation of fp8 current scaling, MXFP8 and NVFP4; DeepEP's and
HybridEP's description of their all-to-all.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import comb

from mindspeed.job import Parallel, Precision
from mindspeed.planner.expert_loads import loads_of
from mindspeed.planner.interval import job_kind


@dataclass(frozen=True)
class Multiplication:
    """How linear layers multiply.

    Attributes:
        width: bytes of an entry.
        passes: times that an operand is read to be quantised.
    """

    dtype: str
    width: float
    passes: int


PRECISIONS = {
    "fp8": Multiplication("fp8", 1, 2),
    "mxfp8": Multiplication("fp8", 1, 2),
    "nvfp4": Multiplication("fp4", 0.5, 2),
}
"""Those that are priced otherwise than they are executed."""


@dataclass(frozen=True)
class Experts:
    """Experts of a model: number, and how many a token takes."""

    number: int
    taken: int

    def reached(self, domains: int) -> float:
        """Domains that a token goes to on average, of so many equal ones."""
        if domains <= 1:
            return 1.0
        elsewhere = self.number - self.number // domains
        return domains * (1 - comb(elsewhere, self.taken) / comb(self.number, self.taken))


@dataclass(frozen=True)
class Program:
    """A job, for its rates.

    Attributes:
        dtype: of parameters.
        precision: of :data:`PRECISIONS`, if linear layers multiply in less than ``dtype``.
        kept: sizes of products that stay in ``dtype``: of the vocabulary on a rank, of the router.
        once: experts, if a token is sent once to each rank that has one of its own.
        waits: whether the host waits for the sizes of an exchange, before it starts more kernels.
        imbalance: tokens of the busiest expert-parallel rank over the mean.
    """

    dtype: str = "bf16"
    precision: str = ""
    kept: frozenset[int] = frozenset()
    once: Experts | None = None
    waits: bool = True
    imbalance: float = 1.0

    @property
    def low(self) -> Multiplication | None:
        """The precision of products of linear layers, if it is not that of the job."""
        return PRECISIONS.get(self.precision)


def program_of(args: argparse.Namespace) -> Program:
    """The program of a job, from its final values."""
    number = args.num_experts or 0
    parallel = Parallel.of(args)
    sizes = {args.padded_vocab_size // parallel.tensor, number} - {0}
    flexible = number and args.moe_token_dispatcher_type == "flex"
    return Program(
        Precision.of(args).name,
        job_kind(args).precision,
        frozenset(sizes),
        Experts(number, args.moe_router_topk) if flexible else None,
        waits=not flexible,
        imbalance=loads_of(args).imbalance(parallel.expert),
    )
