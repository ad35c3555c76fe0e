"""Model chunks that are not in Megatron's loop: what the flags need, and what they attach.

``--schedules-method dualpipev`` and ``--pipeline-schedule`` with a schedule on a V or in waves, or
with a file that places its stages otherwise, split the model this way
(:mod:`mindspeed.pipeline.megatron_placement`). On a V the user gives no flag of virtual stages:
there are two chunks on every rank. Waves have as many as a flag of virtual stages says, a file says
it itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Megatron, Problem, conflict
from mindspeed.pipeline.placed_stages import WAVES, layout_of, layout_string, placement_of

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams
    from mindspeed.pipeline.schedule.placement import Placement

LAYOUT = "--pipeline-model-parallel-layout"
_VIRTUAL_STAGES = {
    "num_layers_per_virtual_pipeline_stage": "--num-layers-per-virtual-pipeline-stage",
    "num_virtual_stages_per_pipeline_rank": "--num-virtual-stages-per-pipeline-rank",
}
_OTHER_SPLITS = {
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
}
EXCLUDES = dict.fromkeys(
    (
        "defer_embedding_wgrad_compute",
        "use_legacy_models",
        "is_hybrid_model",
        "hybrid_override_pattern",
    ),
    "",
)


def num_microbatches(megatron: Megatron) -> int | None:
    """Smallest number of micro-batches of a step; None if the arguments do not define it."""
    size = megatron.get("global_batch_size")
    if ramp := megatron.get("rampup_batch_size"):
        size = int(ramp[0])
    each = (megatron.get("micro_batch_size") or 0) * (megatron.get("data_parallel_size") or 0)
    return size // each if size and each else None


def problems(name: str, megatron: Megatron) -> Iterator[Problem]:
    """Find everything that is incompatible with the places of the stages.

    Args:
        name: the flag that selects them, with its value.
    """
    placement = placement_of(megatron)
    if placement is None or placement.ranks < 2:
        return  # whoever makes the plan refuses it
    if len(set(map(len, placement.stages))) > 1:
        yield Problem(
            name,
            f"has {' and '.join(map(str, sorted(set(map(len, placement.stages)))))} stages on a "
            "rank: Megatron gives every pipeline rank equally many model chunks",
            "take a file with as many stages on every rank",
        )
        return
    chunks, by_flag = placement.chunks, megatron.get("pipeline_schedule") in WAVES
    if by_flag and chunks == 1:
        yield Problem(
            name,
            "needs two or more model chunks on every pipeline rank",
            "add --num-virtual-stages-per-pipeline-rank",
        )
        return
    given = megatron.get("virtual_pipeline_model_parallel_size") or 1
    splits = _OTHER_SPLITS if by_flag or given == chunks else _OTHER_SPLITS | _VIRTUAL_STAGES
    for other, flag in splits.items():
        if megatron.get(other):
            yield Problem(
                name,
                f"gives every pipeline rank {_number(chunks)} itself: {flag} {megatron[other]} "
                "says something else",
                f"remove {flag}; {LAYOUT} with {placement.num_stages} stages splits the layers "
                "unevenly",
            )
    if megatron.get("ckpt_format") == "torch":
        yield conflict(
            name,
            "--ckpt-format torch",
            "it stores layers by rank and chunk",
            "use --ckpt-format torch_dist",
        )
    yield from _layers(name, megatron, placement)
    yield from _shared_weights(name, megatron, placement)


def _number(chunks: int) -> str:
    return {1: "one chunk", 2: "two chunks"}.get(chunks, f"{chunks} chunks")


def _layers(name: str, megatron: Megatron, placement: Placement) -> Iterator[Problem]:
    layers, layout = megatron.get("num_layers"), megatron.get("pipeline_model_parallel_layout")
    ranks, chunks, needed = placement.ranks, placement.chunks, placement.num_stages
    if layout is not None:
        stages = _stages(str(layout))
        if stages != needed:
            yield Problem(
                name,
                f"needs {chunks} stages on each of {ranks} pipeline ranks; {LAYOUT} {layout} has "
                f"{stages}",
                f"give {needed} stages, in the order in which a micro-batch passes them",
            )
    elif layers is not None and layers % needed:
        yield Problem(
            name,
            f"splits --num-layers {layers} into {chunks} * --pipeline-model-parallel-size {ranks} "
            f"= {needed} equal stages",
            f"choose a multiple of {needed}, or give {LAYOUT}",
        )


def _shared_weights(name: str, megatron: Megatron, placement: Placement) -> Iterator[Problem]:
    """Find weights that two ranks share which have no group for it."""
    first, last = placement.ends
    if first == last or (first, last) == (0, placement.ranks - 1):
        return
    found = []
    if megatron.get("untie_embeddings_and_output_weights") is False:
        found.append(("tied embeddings", "--untie-embeddings-and-output-weights"))
    if predicted := megatron.get("mtp_num_layers"):
        found.append((f"--mtp-num-layers {predicted}", "no layers of multi-token prediction"))
    for what, fix in found:
        yield Problem(
            name,
            f"has its first stage on rank {first} and its last one on rank {last}: {what} need "
            f"both on one rank, or on the ranks 0 and {placement.ranks - 1}, whose embeddings "
            "Megatron adds up",
            f"take {fix}, or another placement",
        )


def _stages(layout: str) -> int:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    return PipelineParallelLayerLayout.get_num_stages_from_str(layout)  # type: ignore[no-any-return]


def corrects(megatron: Megatron) -> dict[str, Any]:
    """Set the chunks of a rank, and the layout of their layers."""
    placement = placement_of(megatron)
    if placement is None:
        return {}
    chunks = placement.chunks
    values: dict[str, Any] = {
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None
    }
    if megatron.get("pipeline_model_parallel_layout") is None and megatron.get("num_layers"):
        values["pipeline_model_parallel_layout"] = layout_string(megatron)
    return values


def attach_placement(seams: Seams, megatron: Megatron, owner: str) -> None:
    """Build the chunks where the stages are placed; those at the ends read the data."""
    placement = placement_of(megatron)
    assert placement is not None

    def arguments(given: dict[str, Any]) -> dict[str, Any]:
        from mindspeed.pipeline.megatron_placement import chunk_arguments

        return chunk_arguments(given, placement)

    def ends(_: tuple[bool, bool], vp_stage: int | None) -> tuple[bool, bool]:
        from mindspeed.pipeline.megatron_placement import ends

        return ends(placement, vp_stage)

    shared: list[Any] = []

    def share(model: Any, config: Any, vp_stage: int | None) -> None:
        from mindspeed.pipeline.megatron_placement import SharedEmbedding

        if not shared:
            shared.append(SharedEmbedding(placement))
        shared[0](model, config, vp_stage)

    if megatron.get("num_layers"):  # frameworks give it to the model only
        seams.show_arguments(owner=owner, pipeline_model_parallel_layout=layout_of(megatron))
    seams.model_arguments.add(arguments, owner=owner)
    seams.pipeline_ends.add(ends, owner=owner)
    seams.chunk.add(share, owner=owner)
