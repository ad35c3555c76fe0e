"""``--moe-fb-overlap``: the all-to-all of one micro-batch hides behind the computation of another.

    all-to-all    combine(B)    dispatch(F)   dispatch(B)              combine(F)
    computation   attention(F)  experts(B)    dw(B), experts(F)        attention(B)

While the forward of a micro-batch (F) communicates, the backward of the one before (B) computes,
and the other way round, layer by layer. The schedule is Megatron's
(``--overlap-moe-expert-parallel-comm``), or one of ours with pairs (interleaved, nano-pipe, zb-v,
DualPipeV, a table), with weight gradients delayed until they hide a dispatch
(``--delay-wgrad-compute``) where the layers can compute them apart. It runs parts of layers one by
one, so nothing that replaces the forward of a layer, or the schedule, can be on at the same time.

With Megatron's own flag the feature only refuses what would have no effect, and repairs what the
schedule frees too early (:mod:`mindspeed.moe.layer.megatron`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError
from mindspeed.features.experts.layer_programs import (
    DEEPSPEED,
    expert_parallel_problems,
    expert_problems,
    on_layers,
)
from mindspeed.features.feature import Feature, Megatron, Problem, conflict, exclusions
from mindspeed.flags import flag
from mindspeed.pipeline.placed_stages import flag_of

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME, MEGATRONS = "--moe-fb-overlap", "--overlap-moe-expert-parallel-comm"
_LAYER = "it runs the parts of a layer one by one, and that flag changes how a layer runs"
_HIDDEN = "both hide the same all-to-all"
_SCHEDULE = "both choose the order of micro-batches"
_MEMORY = "it runs the parts of a layer one by one, which leaves no whole layer to free or move"


class MoeFbOverlap(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("model_arguments", "chunk"),
    conflicts={
        "adaptive-memory": _MEMORY,
        "ampipe": _LAYER,
        "balanced-experts": _LAYER,
        "dynamic-pipeline": _SCHEDULE,
        "experts-pipeline": _LAYER,
        "fold3d": _SCHEDULE,
        "moe-adaptive-recompute": _LAYER,
        "moe-allgather-overlap": _LAYER,
        "moe-alltoall-exchange": _LAYER,
        "moe-overlap": _LAYER,
        "pipe-experts": _LAYER,
        "recompute-activation-function": _MEMORY,
        "recompute-in-advance": _MEMORY,
        "recompute-in-bubble": _MEMORY,
        "recompute-norm": _MEMORY,
        "swap-attention": _MEMORY,
    },
    after=("moe-tp-extend-ep", "unaligned-pipeline"),
    planning=("changes layers", "needs steps"),
):
    """The all-to-all of a micro-batch hides behind another's computation."""

    moe_fb_overlap: bool = flag(
        False, "hide the all-to-all of a micro-batch behind the computation of another"
    )

    def enabled(self, megatron: Megatron) -> bool:
        return bool(self.moe_fb_overlap or megatron.get("overlap_moe_expert_parallel_comm"))

    def asked_by(self, megatron: Megatron) -> str | None:
        return None if self.moe_fb_overlap else MEGATRONS

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if megatron.get("moe_model_type") == DEEPSPEED:
            name = NAME if self.moe_fb_overlap else MEGATRONS
            yield conflict(name, "--moe-model-type deepspeed_moe", _LAYER)
        if self.moe_fb_overlap:
            yield from expert_problems(NAME, megatron, expert_parallel_problems, _requirements)

    def derives(self, megatron: Megatron) -> dict[str, Any]:
        if not self.moe_fb_overlap:
            return {}
        if problems := list(self.problems(megatron)):
            raise ConfigError("\n".join(map(str, problems)))
        delays = megatron.get("transformer_impl", "transformer_engine") == "transformer_engine"
        return {
            "overlap_moe_expert_parallel_comm": True,
            "delay_wgrad_compute": delays and not megatron.get("moe_use_legacy_grouped_gemm"),
        }

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.moe.layer.megatron import keep_rows

        drops = megatron.get("moe_zero_memory") == "level0"  # rows are not kept for backward

        def check(arguments: dict[str, Any]) -> dict[str, Any]:
            """Check that a framework's own configuration has the schedule."""
            if not arguments["config"].overlap_moe_expert_parallel_comm:
                raise ConfigError(
                    f"{NAME}: the model needs overlap_moe_expert_parallel_comm=True in its "
                    "configuration"
                )
            return arguments

        def keep(layer: Any) -> None:
            if layer.num_local_experts == 1 and not drops:
                keep_rows(layer, seams.journal)

        seams.model_arguments.add(check, owner=self.name)
        on_layers(seams, self.name, keep)


def _requirements(name: str, megatron: Megatron) -> Iterator[Problem]:
    """Find missing options; Megatron asserts them one at a time, and later."""
    yield from exclusions(name, {"moe_shared_expert_overlap": _HIDDEN}, megatron)
    dispatcher = megatron.get("moe_token_dispatcher_type", "alltoall")
    if dispatcher not in ("alltoall", "flex"):
        yield Problem(
            name,
            f"hides an all-to-all, and --moe-token-dispatcher-type is {dispatcher}",
            "give --moe-token-dispatcher-type alltoall",
        )
    if megatron.get("bf16") is False and megatron.get("fp16") is False:
        yield Problem(name, "is for 16-bit parameters", "add --bf16 or --fp16")
    if megatron.get("recompute_granularity") == "full":
        yield conflict(
            name,
            "--recompute-granularity full",
            "whole layers cannot be recomputed where their parts run one by one",
            "use --recompute-granularity selective",
        )
    pp = megatron.get("pipeline_model_parallel_size") or 1
    if pp > 1 and not _has_chunks(megatron):
        yield Problem(
            name,
            f"--pipeline-model-parallel-size {pp} needs two model chunks on each rank",
            "give --num-layers-per-virtual-pipeline-stage, or --pipeline-schedule zb-v",
        )
    mtp = megatron.get("mtp_num_layers") or 0
    if mtp > 1 or (mtp == 1 and pp == 1):
        yield Problem(
            name,
            f"--mtp-num-layers {mtp}: at most 1, and only on two or more pipeline ranks",
            "remove one, or add pipeline ranks",
        )


def _has_chunks(megatron: Megatron) -> bool:
    names = (
        "virtual_pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    )
    return flag_of(megatron) is not None or any(megatron.get(name) is not None for name in names)
