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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

MATRIX, LIST = "--pipeline-num-transformer-layers", "--num-layer-list"
OLD_SWITCH, OLD_LIST = "--use-manual-layer-allocation", "--manual-layers"


@dataclass(frozen=True)
class UnalignedPipelineOptions:
    """How many layers each pipeline stage has."""

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


_SPLITS = {
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
    "num_layers_per_virtual_pipeline_stage": "--num-layers-per-virtual-pipeline-stage",
    "num_virtual_stages_per_pipeline_rank": "--num-virtual-stages-per-pipeline-rank",
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
}
"""Arguments of Megatron's that divide the layers, too, and their flags."""


def _problems(options: UnalignedPipelineOptions, megatron: Megatron) -> list[Problem]:
    given = [name for name, value in _given(options) if value is not None]
    if not given:
        return [Problem(OLD_SWITCH, f"needs {OLD_LIST}", f"add {OLD_LIST} 5,6,6,5")]
    if len(given) > 1:
        return [Problem(given[0], f"and {given[1]} both divide the layers", "give one")]
    try:
        wanted = layout_of(options, megatron)
    except ValueError as error:
        return [Problem(given[0], str(error))]
    return [
        Problem(given[0], f"cannot be combined with {spelling}", "both divide the layers: give one")
        for other, spelling in _SPLITS.items()
        if megatron.get(other) not in (None, False, wanted)
    ]


def _given(options: UnalignedPipelineOptions) -> tuple[tuple[str, str | None], ...]:
    return (
        (MATRIX, options.pipeline_num_transformer_layers),
        (LIST, options.num_layer_list),
        (OLD_LIST, options.manual_layers),
    )


def layout_of(options: UnalignedPipelineOptions, megatron: Megatron) -> str:
    """Megatron's layout.

    Raises:
        ValueError: the division is none, or of another model.
    """
    from mindspeed.pipeline.layout import layout, parse_list, parse_matrix, problem_of

    ((name, text),) = [(name, text) for name, text in _given(options) if text is not None]
    layers = (parse_matrix if name == MATRIX else parse_list)(text)
    ranks = megatron.get("pipeline_model_parallel_size")
    if ranks == 1:
        raise ValueError(
            f"{text}: --pipeline-model-parallel-size is 1, so one rank has all layers; remove the "
            "flag or choose 2 or more ranks"
        )
    if problem := problem_of(layers, ranks, megatron.get("num_layers")):
        raise ValueError(f"{text} {problem}")
    return layout(layers, megatron.get("mtp_num_layers") or 0)


def _derives(options: UnalignedPipelineOptions, megatron: Megatron) -> dict[str, Any]:
    if problems := _problems(options, megatron):
        raise ConfigError("\n".join(map(str, problems)))
    return {"pipeline_model_parallel_layout": layout_of(options, megatron)}


def _attach(seams: Seams, options: UnalignedPipelineOptions, megatron: Megatron) -> None:
    wanted = layout_of(options, megatron)

    def check(arguments: dict[str, Any]) -> dict[str, Any]:
        """A framework that builds the configuration itself must take the layout over."""
        found = arguments["config"].pipeline_model_parallel_layout
        if str(found) != wanted:
            raise ConfigError(
                f"the layers of the pipeline stages were given as a flag, so the model needs "
                f"pipeline_model_parallel_layout={wanted!r} in its configuration, which has "
                f"{str(found)!r}"
            )
        return arguments

    seams.model_arguments.add(check, owner=FEATURE.name)


FEATURE = Feature(
    name="unaligned-pipeline",
    summary="pipeline stages with different numbers of layers",
    level=0,
    options=UnalignedPipelineOptions,
    enabled=lambda options, megatron: bool(
        options.pipeline_num_transformer_layers is not None
        or options.num_layer_list is not None
        or options.manual_layers is not None
        or options.use_manual_layer_allocation
    ),
    validate=_problems,
    derives=_derives,
    attach=_attach,
    seams=("model_arguments",),
    after=("automated-pipeline",),
)
