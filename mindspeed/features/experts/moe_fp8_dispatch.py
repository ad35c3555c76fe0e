"""``--moe-fp8-dispatch``: tokens travel to experts in eight bits.

    tokens   e4m3, with a scale for every 128 elements that is a power of two, one byte
    both     the gradients of the experts' results, too

A row takes .504 of its bytes in bf16; with ``both`` a step of a layer .752 of all four exchanges.
The experts compute with what arrives (:mod:`mindspeed.moe.wire`); results, probabilities and counts
stay as they are. For every program: all-to-all in all its exchanges, all-gather, pieces, groups,
hot experts, Ampipe, pairs of a forward and a backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.errors import ConfigError
from mindspeed.features.experts.layer_programs import (
    change_paired_layers,
    dispatcher_problems,
    expert_problems,
    layer_problems,
    rank_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--moe-fp8-dispatch"


class MoeFp8Dispatch(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("model_arguments", "chunk"),
):
    """Tokens travel to experts in eight bits."""

    moe_fp8_dispatch: Literal["disable", "tokens", "both"] = flag(
        "disable",
        "send tokens to experts in e4m3 with a scale for every 128 elements (tokens), and the "
        "gradients of their results, too (both)",
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        yield from expert_problems(
            f"{NAME} {self.moe_fp8_dispatch}",
            megatron,
            dispatcher_problems,
            layer_problems,
            rank_problems,
            _row_problems,
        )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        def check(arguments: dict[str, Any]) -> dict[str, Any]:
            """Check a framework's own configuration."""
            config = arguments["config"]
            width = getattr(config, "moe_latent_size", None) or config.hidden_size
            if config.num_moe_experts and (problem := _width_problem(width)):
                raise ConfigError(f"{NAME}: rows of {width} elements: {problem}; {_FIX}")
            if config.fp16:
                raise ConfigError(f"{NAME}: {_HALF}; use bf16")
            return arguments

        seams.model_arguments.add(check, owner=self.name)
        change_paired_layers(seams, self.name, megatron, fp8=self.moe_fp8_dispatch)


def _row_problems(name: str, megatron: Megatron) -> Iterator[Problem]:
    latent = megatron.get("moe_latent_size")
    width = latent or megatron.get("hidden_size")
    if width and (problem := _width_problem(width)):
        size = f"--moe-latent-size {width}" if latent else f"--hidden-size {width}"
        yield Problem(f"{name} with {size}", problem, _FIX)
    if megatron.get("fp16"):
        yield Problem(name, _HALF, "use --bf16")


_HALF = "what arrives is exact in bf16, and fp16 cannot hold its range"
_FIX = "choose a multiple of 128, or remove the flag"


def _width_problem(width: int) -> str:
    from mindspeed.moe.wire import BLOCK

    return f"each {BLOCK} elements of a row share a scale" if width % BLOCK else ""
