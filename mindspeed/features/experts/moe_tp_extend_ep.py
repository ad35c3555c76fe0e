"""``--moe-tp-extend-ep``: tensor-parallel ranks hold whole experts instead of slices of all.

    --tensor-model-parallel-size 4 --expert-model-parallel-size 2 --moe-tp-extend-ep
    experts of a rank: num_experts / 8, whole            (without: num_experts / 2, a quarter each)

The experts are spread over TP x EP ranks. Nothing has to be gathered over the tensor-parallel group
before their products or scattered after them, and each product is as wide as the expert. It is a
layout of Megatron's, chosen before Megatron checks its arguments: expert tensor parallel size 1 and
expert parallel size EP x TP. Checkpoints are those of every other layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.features.experts.layer_programs import expert_problems
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--moe-tp-extend-ep"
GIVEN = "_moe_tp_extend_ep_of"
"""Name in the arguments: the expert parallel size that the user has given."""


class MoeTpExtendEp(Feature, level=2, seams=("model_arguments",), planning=("lays out",)):
    """Tensor-parallel ranks hold whole experts instead of slices."""

    moe_tp_extend_ep: bool = flag(
        False, "spread whole experts over tensor-parallel ranks too: TP x EP expert ranks"
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        return expert_problems(NAME, megatron, _sizes)

    def derives(self, megatron: Megatron) -> dict[str, Any]:
        if "num_experts" not in megatron:
            return {}
        if problems := list(self.problems(megatron)):
            raise ConfigError("\n".join(map(str, problems)))
        ep = given_expert_parallel_size(megatron)
        return {
            GIVEN: ep,
            "expert_tensor_parallel_size": 1,
            "expert_model_parallel_size": ep * (megatron.get("tensor_model_parallel_size") or 1),
        }

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        def check(arguments: dict[str, Any]) -> dict[str, Any]:
            """Check that a framework's own configuration has the extended sizes."""
            config = arguments["config"]
            tp, ep = config.tensor_model_parallel_size, config.expert_model_parallel_size
            if config.expert_tensor_parallel_size != 1 or ep % tp:
                raise ConfigError(
                    f"{NAME}: the model needs expert_tensor_parallel_size=1 and a multiple of {tp} "
                    "(tensor_model_parallel_size) as expert_model_parallel_size in its "
                    f"configuration, which has {config.expert_tensor_parallel_size} and {ep}"
                )
            return arguments

        seams.model_arguments.add(check, owner=self.name)


def given_expert_parallel_size(megatron: Megatron) -> int:
    """The expert parallel size that the user gave, before it was extended."""
    size = megatron.get("expert_model_parallel_size") or 1
    known = megatron.get(GIVEN)
    if not known or megatron.get("expert_tensor_parallel_size") != 1:
        return size
    return known if known * (megatron.get("tensor_model_parallel_size") or 1) == size else size


def _sizes(name: str, megatron: Megatron) -> Iterator[Problem]:
    tp = megatron.get("tensor_model_parallel_size") or 1
    ep = given_expert_parallel_size(megatron)
    experts, sliced = megatron["num_experts"], megatron.get("expert_tensor_parallel_size")
    if sliced not in (None, 1):
        yield Problem(
            name,
            f"makes the experts whole, and --expert-tensor-parallel-size {sliced} cuts them",
            "remove one",
        )
    if experts % (tp * ep):
        yield Problem(
            name,
            f"--num-experts {experts} cannot be spread over tensor {tp} x expert {ep} = {tp * ep} "
            "ranks",
            "choose sizes whose product divides the number of experts",
        )
    pp, world = megatron.get("pipeline_model_parallel_size") or 1, megatron.get("world_size") or 0
    if world % (tp * ep * pp):
        yield Problem(
            name,
            f"{world} ranks cannot be divided by tensor {tp} x expert {ep} x pipeline {pp} = "
            f"{tp * ep * pp}",
            "start a multiple of that, or choose smaller sizes",
        )
