"""Pipeline stages with different numbers of layers.

    --pipeline-num-transformer-layers "[[0,1],[1,1]*4,[1,0]]"   ranks x chunks
    --num-layer-list 5,6,6,5                                     one chunk per rank
    --use-manual-layer-allocation --manual-layers 5,6,6,5        the same, older

A rank with the embedding or the output layer computes as long as the others if it has fewer
transformer layers. The flags become Megatron's ``--pipeline-model-parallel-layout``, so they also
allow numbers of layers that the pipeline size does not divide. The model and its checkpoints are
those of an even division.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature, Megatron, Problem, conflict, option_of
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

MATRIX, LIST = "--pipeline-num-transformer-layers", "--num-layer-list"
OLD_SWITCH, OLD_LIST = "--use-manual-layer-allocation", "--manual-layers"


class UnalignedPipeline(
    Feature,
    level=0,
    megatron_versions=">=0.15",
    seams=("model_arguments",),
    after=("automated-pipeline",),
    planning=("lays out",),
):
    """Pipeline stages with different numbers of layers."""

    pipeline_num_transformer_layers: str | None = flag(
        None,
        "layers of every chunk of every pipeline rank, such as [[0,1],[1,1]*4,[1,0]]: a row per "
        "rank, a column per chunk, *n repeats a row",
    )
    num_layer_list: str | None = flag(
        None, "layers of every pipeline rank, such as 5,6,6,5, no-op layers among them"
    )
    use_manual_layer_allocation: bool = flag(False, "take the layers of --manual-layers")
    manual_layers: str | None = flag(None, "older spelling of --num-layer-list")

    def enabled(self, megatron: Megatron) -> bool:
        return bool(
            self.pipeline_num_transformer_layers is not None
            or self.num_layer_list is not None
            or self.manual_layers is not None
            or self.use_manual_layer_allocation
        )

    def problems(self, megatron: Megatron) -> list[Problem]:
        given = [name for name, value in self._given() if value is not None]
        if not given:
            return [Problem(OLD_SWITCH, f"needs {OLD_LIST}", f"add {OLD_LIST} 5,6,6,5")]
        if len(given) > 1:
            return [Problem(given[0], f"and {given[1]} both divide the layers", "give one")]
        try:
            wanted = self.layout_of(megatron)
        except ValueError as error:
            return [Problem(given[0], str(error))]
        return [
            conflict(given[0], option_of(other), "both divide the layers", "give one")
            for other in _SPLITS
            if megatron.get(other) not in (None, False, wanted)
        ]

    def _given(self) -> tuple[tuple[str, str | None], ...]:
        return (
            (MATRIX, self.pipeline_num_transformer_layers),
            (LIST, self.num_layer_list),
            (OLD_LIST, self.manual_layers),
        )

    def layout_of(self, megatron: Megatron) -> str:
        """Layout of the stages in Megatron's format.

        Raises:
            ValueError: the division is none, or of another model.
        """
        from mindspeed.pipeline.layout import layout, parse_list, parse_matrix, problem_of

        ((name, text),) = [(name, text) for name, text in self._given() if text is not None]
        layers = (parse_matrix if name == MATRIX else parse_list)(text)
        ranks = megatron.get("pipeline_model_parallel_size")
        if ranks == 1:
            raise ValueError(
                f"{text}: --pipeline-model-parallel-size is 1, so one rank has all layers; remove "
                "the flag or choose 2 or more ranks"
            )
        if problem := problem_of(layers, ranks, megatron.get("num_layers")):
            raise ValueError(f"{text} {problem}")
        return layout(layers, megatron.get("mtp_num_layers") or 0)

    def derives(self, megatron: Megatron) -> dict[str, Any]:
        if problems := self.problems(megatron):
            raise ConfigError("\n".join(map(str, problems)))
        return {"pipeline_model_parallel_layout": self.layout_of(megatron)}

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        wanted = self.layout_of(megatron)

        def check(arguments: dict[str, Any]) -> dict[str, Any]:
            """Check that a framework's own configuration has the layout."""
            found = arguments["config"].pipeline_model_parallel_layout
            if str(found) != wanted:
                raise ConfigError(
                    f"the layers of the pipeline stages were given as a flag, so the model needs "
                    f"pipeline_model_parallel_layout={wanted!r} in its configuration, which has "
                    f"{str(found)!r}"
                )
            return arguments

        seams.model_arguments.add(check, owner=self.name)


_SPLITS = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
)
"""Arguments of Megatron's that divide the layers, too."""
