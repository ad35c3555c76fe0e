"""``--activation-plan FILE``: what happens to the activations of every site of every layer.

The file (YAML or JSON) defines for ranges of layers which sites keep their activations, recompute
them in backward, or hold them in host memory (:mod:`mindspeed.memory.layer_rules`). Whatever the
plan, losses and gradients stay bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.features.memory.activation_memory import EXCLUDES, attach_plan
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.memory.layer_rules import LayerRule

_FLAG = "--activation-plan"


class ActivationPlan(
    Feature,
    level=2,
    seams=("chunk",),
    excludes={**EXCLUDES, "fp8": "a second run would change scaling factors"},
):
    """A file says which activations are kept, recomputed or offloaded, site by site."""

    activation_plan: str = flag(
        "", "file (YAML or JSON) that says which activations are kept, recomputed or offloaded"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return bool(self.activation_plan)

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        from mindspeed.memory.layer_rules import largest

        if megatron.get("recompute_granularity") == "full":
            yield conflict(
                _FLAG,
                "--recompute-granularity full",
                "both recompute layers",
                'remove one; a plan says the same with {"all": {"layer": "recompute"}}',
            )
        rules, total = _rules(self.activation_plan), megatron.get("num_layers")
        if total is not None and largest(rules) >= total:
            yield Problem(
                _FLAG,
                f"there is no layer {largest(rules)}: layers are numbered from 0, and "
                f"--num-layers is {total}",
            )

    def uneven_layers(self, megatron: Megatron) -> str:
        from mindspeed.memory.layer_rules import largest

        return _FLAG if largest(_rules(self.activation_plan)) >= 0 else ""

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        rules = _rules(self.activation_plan)

        def plan(sites: dict[str, dict[str, Any]], layers: Any) -> Any:
            from mindspeed.memory.layer_rules import plan_for

            return plan_for(rules, layers.numbers)

        attach_plan(seams, self.name, _FLAG, megatron, plan)


def _rules(path: str) -> tuple[LayerRule, ...]:
    from mindspeed.memory.layer_rules import rules_of
    from mindspeed.parsing import read_yaml

    where = f"{_FLAG} {path}"
    value = read_yaml(path, where)
    try:
        return rules_of(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
