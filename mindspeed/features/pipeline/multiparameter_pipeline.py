"""Pipeline stages that send several tensors: ``--use-multiparameter-pipeline-model-parallel``.

A stage may return a tuple or list of tensors; the next one gets the list by ``set_input_tensor``.
Number, shapes and types travel with the tensors, and may differ between stages and micro-batches.
Gradients come back for every tensor that requires one, zeros for those that nobody used; whole
numbers and truth values only go forward.

``args.pipeline_tensor_shapes = [{"shape": (s, b, h), "dtype": torch.float32}, ...]`` may declare
what every stage sends; it is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.pipeline import plans as shared
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

_NAME = "--use-multiparameter-pipeline-model-parallel"


class MultiparameterPipeline(
    Feature, level=2, megatron_versions=">=0.15", seams=("schedule",), excludes=shared.EXCLUDES
):
    """Pipeline stages that send several tensors."""

    use_multiparameter_pipeline_model_parallel: bool = flag(
        False, "a pipeline stage may return several tensors"
    )

    def problems(self, megatron: Megatron) -> list[Problem]:
        return [*shared.problems_of(_NAME, megatron), *_declaration_problems(megatron)]

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        def declared() -> Any:
            return megatron.get("pipeline_tensor_shapes")

        def schedule(previous: Any) -> Any:
            from mindspeed.pipeline.schedule.megatron import with_messages

            return with_messages(previous, several_tensors=True, declared=declared)

        seams.schedule.add(schedule, owner=self.name)


def _declaration_problems(megatron: Megatron) -> Iterator[Problem]:
    for index, one in enumerate(megatron.get("pipeline_tensor_shapes") or ()):
        if not (isinstance(one, dict) and {"shape", "dtype"} <= one.keys()):
            yield Problem(
                _NAME,
                f"args.pipeline_tensor_shapes[{index}] is {one!r}",
                'give {"shape": (s, b, h), "dtype": torch.float32}, or leave them out',
            )
