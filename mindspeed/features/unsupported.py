"""Combinations of Megatron's own flags that cannot train, refused before training begins.

Megatron does not check these: they end in a wrong result, a traceback or a hang after the model has
been built. One entry of :data:`RULES` per combination.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


@dataclass(frozen=True)
class UnsupportedOptions:
    """No flags of its own."""


@dataclass(frozen=True)
class Rule:
    """One combination.

    Attributes:
        applies: is the combination asked for?
        problem: what is wrong with it.
    """

    applies: Callable[[Megatron], Any]
    problem: Problem


def _with(flag: str, *conditions: Callable[[Megatron], Any]) -> Callable[[Megatron], bool]:
    return lambda megatron: bool(megatron.get(flag)) and all(c(megatron) for c in conditions)


RULES = (
    Rule(
        _with("optimizer_cpu_offload", lambda m: not m.get("use_precision_aware_optimizer")),
        Problem(
            "--optimizer-cpu-offload",
            "needs the optimizer that keeps gradients and main parameters apart",
            "add --use-precision-aware-optimizer and --use-distributed-optimizer",
        ),
    ),
    Rule(
        _with("optimizer_cpu_offload", lambda m: not (m.get("bf16") or m.get("fp16"))),
        Problem(
            "--optimizer-cpu-offload",
            "needs 16-bit parameters: fp32 ones are views into the gradient buffer's layout, "
            "which no optimizer on the host can own",
            "add --bf16 or --fp16, or drop it",
        ),
    ),
)


def _problems(options: UnsupportedOptions, megatron: Megatron) -> list[Problem]:
    return [rule.problem for rule in RULES if rule.applies(megatron)]


def _attach(seams: Seams, options: UnsupportedOptions, megatron: Megatron) -> None:
    """Nothing to attach: when one of the rules applies, validation has raised."""


FEATURE = Feature(
    name="unsupported-combinations",
    summary="refuses combinations of Megatron's flags that cannot train",
    level=0,
    options=UnsupportedOptions,
    enabled=lambda options, megatron: bool(_problems(options, megatron)),
    validate=_problems,
    attach=_attach,
)
