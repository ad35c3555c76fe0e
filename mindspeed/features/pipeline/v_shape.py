"""Model chunks in a V-shape: what the flags that choose it need, and what it attaches.

``--schedules-method dualpipev`` and ``--pipeline-schedule`` with ``zb-v``, ``dualpipev`` or a file
of such a schedule split the model this way (:mod:`mindspeed.pipeline.megatron_v_shape`).
The user gives no flag of virtual stages: there are two chunks on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Megatron, Problem, conflict
from mindspeed.pipeline.layout import even_layout
from mindspeed.pipeline.v_shape import layout_of

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

LAYOUT = "--pipeline-model-parallel-layout"
_OTHER_SPLITS = {
    "num_layers_per_virtual_pipeline_stage": "--num-layers-per-virtual-pipeline-stage",
    "num_virtual_stages_per_pipeline_rank": "--num-virtual-stages-per-pipeline-rank",
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
    """Find everything that is incompatible with a V-shape.

    Args:
        name: the flag that selects it, with its value.
    """
    ranks = megatron.get("pipeline_model_parallel_size") or 1
    if ranks < 2:
        return  # whoever makes the plan refuses it
    for other, flag in _OTHER_SPLITS.items():
        if megatron.get(other):
            yield Problem(
                name,
                f"gives every pipeline rank two chunks itself: {flag} {megatron[other]} says "
                "something else",
                f"remove {flag}; {LAYOUT} with {2 * ranks} stages splits the layers unevenly",
            )
    if megatron.get("ckpt_format") == "torch":
        yield conflict(
            name,
            "--ckpt-format torch",
            "it stores layers by rank and chunk",
            "use --ckpt-format torch_dist",
        )
    yield from _layers(name, megatron, ranks)


def _layers(name: str, megatron: Megatron, ranks: int) -> Iterator[Problem]:
    layers, layout = megatron.get("num_layers"), megatron.get("pipeline_model_parallel_layout")
    if layout is not None:
        stages = _stages(str(layout))
        if stages != 2 * ranks:
            yield Problem(
                name,
                f"needs 2 stages on each of {ranks} pipeline ranks; {LAYOUT} {layout} has {stages}",
                f"give {2 * ranks} stages, in the order in which a micro-batch passes them",
            )
    elif layers is not None and layers % (2 * ranks):
        yield Problem(
            name,
            f"splits --num-layers {layers} into 2 * --pipeline-model-parallel-size {ranks} = "
            f"{2 * ranks} equal stages",
            f"choose a multiple of {2 * ranks}, or give {LAYOUT}",
        )


def _stages(layout: str) -> int:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    return PipelineParallelLayerLayout.get_num_stages_from_str(layout)  # type: ignore[no-any-return]


def corrects(megatron: Megatron) -> dict[str, Any]:
    """Set two chunks per rank, and the layout of their layers."""
    values: dict[str, Any] = {"virtual_pipeline_model_parallel_size": 2}
    layers, ranks = megatron.get("num_layers"), megatron.get("pipeline_model_parallel_size")
    if megatron.get("pipeline_model_parallel_layout") is None and layers and ranks:
        values["pipeline_model_parallel_layout"] = even_layout(
            layers, ranks, megatron.get("mtp_num_layers") or 0
        )
    return values


def attach_v_shape(seams: Seams, megatron: Megatron, owner: str) -> None:
    """Build the chunks of a V-shape, whose ends read the data."""

    def arguments(given: dict[str, Any]) -> dict[str, Any]:
        from mindspeed.pipeline.megatron_v_shape import chunk_arguments

        return chunk_arguments(given)

    def ends(_: tuple[bool, bool], vp_stage: int | None) -> tuple[bool, bool]:
        from mindspeed.pipeline.megatron_v_shape import ends

        return ends(vp_stage)

    shared: list[Any] = []

    def share(model: Any, config: Any, vp_stage: int | None) -> None:
        from mindspeed.pipeline.megatron_v_shape import SharedEmbedding

        if not shared:
            shared.append(SharedEmbedding())
        shared[0](model, config, vp_stage)

    if megatron.get("num_layers"):  # frameworks give it to the model only
        seams.show_arguments(owner=owner, pipeline_model_parallel_layout=layout_of(megatron))
    seams.model_arguments.add(arguments, owner=owner)
    seams.pipeline_ends.add(ends, owner=owner)
    seams.chunk.add(share, owner=owner)
