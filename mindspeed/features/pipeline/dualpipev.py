"""Pipeline stages in a V-shape: ``--schedules-method dualpipev``, ``--pipeline-schedule zb-v``.

Every rank has two chunks, and the first and the last stage are both on rank 0. A micro-batch goes
down the ranks and up again, so all ranks hold equally many activations, those of p micro-batches,
and the bubble is that of an interleaved schedule whose weight gradients fill the gaps.

    --schedules-method dualpipev [--dualpipev-dw-detach]   the order of DeepSeek's DualPipeV
    --pipeline-schedule zb-v                               weight gradients wherever a rank waits

DualPipeV computes some weight gradients apart from those of the inputs, in its warm-up and, with
``--dualpipev-dw-detach``, in its cool-down (as ``--pipeline-schedule dualpipev`` always does).

These flags and ``--pipeline-schedule`` with a schedule on a V or in waves, or
with a file that places its stages otherwise, split the model this way
(:mod:`mindspeed.pipeline.megatron_placement`). On a V the user gives no flag of virtual stages:
there are two chunks on every rank. Waves have as many as a flag of virtual stages says, a file says
it itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.features.pipeline import plans as shared
from mindspeed.features.pipeline.divided_backward import divide_backward, divided_backward_problems
from mindspeed.flags import flag
from mindspeed.pipeline.placed_stages import WAVES, flag_of, layout_of, layout_string, placement_of

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
    for other, spelling in splits.items():
        if megatron.get(other):
            yield Problem(
                name,
                f"gives every pipeline rank {_number(chunks)} itself: {spelling} {megatron[other]} "
                "says something else",
                f"remove {spelling}; {LAYOUT} with {placement.num_stages} stages splits the layers "
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


class DualPipeV(
    Feature,
    level=2,
    megatron_versions=">=0.15",
    seams=("pipeline_ends", "model_arguments", "chunk", "schedule"),
    conflicts=(
        "adaptive-memory",  # these four ask which layers wait for backward in Megatron's order
        "recompute-in-advance",
        "recompute-in-bubble",
        "swap-attention",
        "automated-pipeline",
        "dynamic-pipeline",
        "recompute-layers-per-pp-rank",
        "tensor-parallel-2d",
        "unaligned-pipeline",
    ),
    excludes={**shared.EXCLUDES_OF_PAIRS, **EXCLUDES},
    planning=("needs steps",),
    schedule="dualpipev",
):
    """Pipeline stages in a V-shape: first and last on rank 0."""

    schedules_method: Literal["dualpipev"] | None = flag(
        None, "pipeline schedule: dualpipev has two chunks per rank in a V-shape"
    )
    dualpipev_dw_detach: bool = flag(
        False, "dualpipev: split the backwards of the cool-down into input and weight gradients"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return self != DualPipeV() or flag_of(megatron) is not None

    def asked_by(self, megatron: Megatron) -> str | None:
        return flag_of(megatron)

    def problems(self, megatron: Megatron) -> list[Problem]:
        name = flag_of(megatron)
        if name is None or (self.dualpipev_dw_detach and self.schedules_method is None):
            fix = "add it, or remove this flag"
            return [
                Problem(
                    "--dualpipev-dw-detach", "is a variant of --schedules-method dualpipev", fix
                )
            ]
        found = list(problems(name, megatron))
        if self.schedules_method is not None:  # else --pipeline-schedule checks its own
            found += shared.problems_of(name, megatron)
            found += divided_backward_problems(name, megatron)
            found += [] if found else self._plan_problems(name, megatron)
        return found

    def _plan_problems(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        ranks, count = (
            megatron["pipeline_model_parallel_size"],
            num_microbatches(megatron),
        )
        if count is not None and count < 2 * ranks:
            yield Problem(
                name,
                f"needs 2 * --pipeline-model-parallel-size {ranks} = {2 * ranks} micro-batches or "
                f"more in every step; there are {count}",
                "make --global-batch-size larger or --micro-batch-size smaller, or take "
                "--pipeline-schedule zb-v, which has no such limit",
            )
            return
        from mindspeed.pipeline.schedule.schedules import ScheduleRequest

        factor = megatron.get("pipeline_memory_limit")
        limit = None if factor is None else shared.limit_of(factor, ranks, 1)
        request = ScheduleRequest(
            kind="dualpipev",
            split_cooldown=self.dualpipev_dw_detach,
            memory_limit=limit,
            pairs=shared.has_pairs(megatron),
        )
        if isinstance(problem := shared.plan_of(name, megatron, request), Problem):
            yield problem

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        return corrects(megatron)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        attach_placement(seams, megatron, self.name)
        if self.schedules_method is None:
            return  # --pipeline-schedule chooses the order

        def schedule(previous: Any) -> Any:
            from mindspeed.pipeline.schedule.megatron import scheduled

            return scheduled(
                previous,
                kind="dualpipev",
                split_cooldown=self.dualpipev_dw_detach,
                pairs=shared.has_pairs(megatron),
            )

        divide_backward(seams, self.name)
        seams.schedule.add(schedule, owner=self.name)
