"""``--n-shared-experts N``: N experts that every token visits, besides those that it is routed to.

    output = routed experts + shared_1(x) + ... + shared_N(x)

N MLPs of the routed experts' width, added, are one MLP of N times the width, so the flag is
Megatron's ``--moe-shared-expert-intermediate-size`` = N x ``--moe-ffn-hidden-size``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.features.experts.layer_programs import expert_problems
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import SIZE

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

WIDTH = "moe_shared_expert_intermediate_size"


class SharedExperts(Feature, level=2, seams=("model_arguments",)):
    """Experts that every token visits, by their number."""

    n_shared_experts: int | None = flag(
        None,
        "experts that every token visits, each as wide as a routed one",
        range=SIZE,
    )

    def _width(self, megatron: Megatron) -> int | None:
        """Total width of the shared experts; None if the model's sizes are unknown."""
        width = megatron.get("moe_ffn_hidden_size") or megatron.get("ffn_hidden_size")
        if width is None and (hidden := megatron.get("hidden_size")):  # Megatron-LM's rule
            width = int(4 * hidden * 2 / 3 / 64) * 64 if megatron.get("swiglu") else 4 * hidden
        return (self.n_shared_experts or 0) * width if width else None

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        return expert_problems(f"--n-shared-experts {self.n_shared_experts}", megatron, self._given)

    def _given(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        width, given = self._width(megatron), megatron.get(WIDTH)
        if width is not None and given not in (None, width):
            yield Problem(
                name,
                f"is a width of {width} (each as wide as a routed expert), "
                f"--moe-shared-expert-intermediate-size is {given}",
                "remove one",
            )

    def derives(self, megatron: Megatron) -> dict[str, Any]:
        if problems := list(self.problems(megatron)):
            raise ConfigError("\n".join(map(str, problems)))
        width = self._width(megatron)
        return {} if width is None or "num_experts" not in megatron else {WIDTH: width}

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        def check(arguments: dict[str, Any]) -> dict[str, Any]:
            """Check that a framework's own configuration has the width."""
            config = arguments["config"]
            width = self.n_shared_experts * (config.moe_ffn_hidden_size or config.ffn_hidden_size)
            if config.num_moe_experts and config.moe_shared_expert_intermediate_size != width:
                raise ConfigError(
                    f"--n-shared-experts {self.n_shared_experts}: the model needs {WIDTH}={width} "
                    f"in its configuration, which has {config.moe_shared_expert_intermediate_size}"
                )
            return arguments

        seams.model_arguments.add(check, owner=self.name)
