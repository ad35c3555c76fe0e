"""Options that do not train what they say in some releases of Megatron, refused there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

from mindspeed.adaptor.versions import megatron_version
from mindspeed.features.feature import Megatron, Problem


@dataclass(frozen=True)
class Fault:
    """An option that is wrong in some releases.

    Attributes:
        versions: range of megatron-core.
        applies: whether the arguments have it.
        problem: the error.
    """

    versions: str
    applies: Callable[[Megatron], Any]
    problem: Problem


def release_problems(megatron: Megatron) -> Iterator[Problem]:
    """Errors for options that the installed release has wrong."""
    version = megatron_version()
    for fault in FAULTS:
        in_range = SpecifierSet(fault.versions, prereleases=True).contains
        if version is not None and in_range(version) and fault.applies(megatron):
            yield fault.problem


def _uses_muon(megatron: Megatron) -> bool:
    return "muon" in str(megatron.get("optimizer"))


def _fuses_down_projection(megatron: Megatron) -> bool:
    sharded = (megatron.get("tensor_model_parallel_size") or 1) > 1
    wrong = sharded or megatron.get("delay_wgrad_compute")
    return bool(megatron.get("mla_down_proj_fusion") and wrong)


FAULTS = (
    Fault(
        ">=0.17",
        _uses_muon,
        Problem(
            "--optimizer muon (dist_muon)",
            "megatron-core 0.17 and newer build it on emerging_optimizers 0.2, which no training "
            "of this library is tested with",
            "install megatron-core 0.16.1, or choose another --optimizer",
        ),
    ),
    Fault(
        ">=0.17,<0.19",  # Megatron-LM PR 5383, PR 5273
        _fuses_down_projection,
        Problem(
            "--mla-down-proj-fusion",
            "with tensor parallelism megatron-core 0.17 and 0.18 split the fused projection at "
            "wrong sizes, and with --delay-wgrad-compute its weight is not trained",
            "drop it",
        ),
    ),
    Fault(
        ">=0.17,<0.18",  # Megatron-LM PR 3965
        lambda megatron: megatron.get("mtp_use_repeated_layer"),
        Problem(
            "--mtp-use-repeated-layer",
            "megatron-core 0.17 builds several layers for it",
            "install megatron-core 0.18.2, or drop it",
        ),
    ),
)
