"""``--ampipe-degree``: attention in chunks of the sequence, which hides the experts' dispatch.

    --ampipe-degree 4

Layers with a mixture of experts run in D chunks: while the tokens of one chunk travel to their
experts, the next chunk attends; while the experts compute, the results of others travel back. Only
the last combine, 1/D of all, is not hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.attention.context_parallel import comm_types
from mindspeed.features.experts.layer_programs import (
    all_to_all_problems,
    expert_parallel_problems,
    expert_problems,
)
from mindspeed.features.feature import Feature, Megatron, Problem, conflict, option_of
from mindspeed.flags import flag
from mindspeed.ranges import Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME, TENSOR = "--ampipe-degree", "--ampipe-tp-sp-comm-overlap"

_PARTS = ("layernorm", "mlp", "moe", "shared_experts", "mla_up_proj")


class Ampipe(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("chunk",),
    conflicts=(
        "activation-plan",
        "adaptive-memory",
        "automated-pipeline",
        "coc",
        "dualpipev",
        "experts-pipeline",
        "mc2",
        "moe-adaptive-recompute",
        "moe-zero-memory",
        "nanopipe",
        "packed-documents",
        "pipe-experts",
        "recompute-activation-function",
        "recompute-communication",
        "recompute-in-advance",
        "recompute-in-bubble",
        "recompute-norm",
        "swap-attention",
        "tensor-parallel-2d",
        "tp-comm-overlap",
        "unaligned-linear",
        "variable-lengths",
    ),
    excludes=dict.fromkeys(  # they change what is computed between the parts of a layer, or at once
        (
            "multi_latent_attention",
            "reset_attention_mask",
            "moe_expert_capacity_factor",
            "moe_shared_expert_overlap",
            "moe_dynamic_padding",
            "moe_enable_routing_replay",
            "overlap_moe_expert_parallel_comm",
            "delay_wgrad_compute",
            "fine_grained_activation_offloading",
            "attention_output_gate",
            "qk_clip",
            "fp8",
            "fp4",
        ),
        "",
    ),
    after=("moe-overlap",),
):
    """Attention in chunks of the sequence hides the experts' communication."""

    ampipe_degree: int = flag(
        1, "chunks of the sequence in layers with experts; 1: the whole", range=Range(1, 1024)
    )
    ampipe_tp_sp_comm_overlap: bool = flag(
        False, "hide the tensor-parallel collectives of the chunks' experts, too"
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        if self.ampipe_degree == 1:
            yield Problem(TENSOR, f"is a part of {NAME}", f"add {NAME} 2 or more, or remove it")
            return
        yield from expert_problems(
            f"{NAME} {self.ampipe_degree}",
            megatron,
            all_to_all_problems,
            expert_parallel_problems,
            self._layout,
            self._parts,
        )

    def _parts(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        if self.ampipe_tp_sp_comm_overlap and not megatron.get("sequence_parallel"):
            yield Problem(
                TENSOR,
                "hides the tensor-parallel collectives that sequence parallelism adds",
                "add --sequence-parallel, or remove it",
            )
        for argument, value in [
            ("attention_mask_type", "general"),
            ("position_embedding_type", "alibi"),
        ]:
            if megatron.get(argument) == value:
                yield conflict(name, f"{option_of(argument)} {value}")
        if "sinkhorn" in str(megatron.get("moe_router_load_balancing_type")):
            yield Problem(
                name,
                "routes chunk by chunk, and --moe-router-load-balancing-type sinkhorn balances "
                "over the whole",
                "take aux_loss",
            )
        if megatron.get("recompute_granularity") == "selective":
            parts = [one for one in megatron.get("recompute_modules") or () if one in _PARTS]
            if parts:
                yield conflict(
                    name,
                    f"--recompute-modules {' '.join(parts)}",
                    "they end in another chunk than they begin",
                    "take core_attn, moe_act, or --recompute-granularity full",
                )
        if megatron.get("cuda_graph_impl") not in (None, "none"):
            yield Problem(name, "cannot be recorded by --cuda-graph-impl", "remove one")

    def _layout(self, name: str, megatron: Megatron) -> Iterator[Problem]:
        degree = self.ampipe_degree
        tp = megatron.get("tensor_model_parallel_size") or 1
        cp = megatron.get("context_parallel_size") or 1
        if cp > 1:
            yield from _context_problems(name, degree, tp, megatron)
        parts = {
            NAME: degree,
            "--tensor-model-parallel-size": tp,
            "--context-parallel-size": cp,
        }
        length, divisor = megatron.get("seq_length"), degree * tp * cp
        if length and length % divisor:
            product = " x ".join(f"{flag} {size}" for flag, size in parts.items() if size > 1)
            yield Problem(
                name,
                f"--seq-length {length} is not divisible by {divisor} ({product})",
                "choose a degree that divides the rows of a rank",
            )

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        def chunks(model: Any, config: Any, vp_stage: int | None) -> None:
            from mindspeed.moe.ampipe.megatron import attach, layers_with_experts

            for layer in layers_with_experts(model):
                attach(
                    layer,
                    self.ampipe_degree,
                    seams.journal,
                    tensor_overlap=self.ampipe_tp_sp_comm_overlap,
                )

        seams.chunk.add(chunks, owner=self.name)


def _context_problems(name: str, degree: int, tp: int, megatron: Megatron) -> Iterator[Problem]:
    algorithm = megatron.get("context_parallel_algo")
    gathers = set(comm_types(megatron) or ()) == {"all_gather"}
    if not gathers and algorithm != "kvallgather_cp_algo":
        yield Problem(
            name,
            "gathers keys and values of all context-parallel ranks before it cuts the queries",
            "add --context-parallel-algo kvallgather_cp_algo",
        )
    if degree * tp % 2:
        yield Problem(
            name, "is odd, and context-parallel ranks hold two chunks of the sequence", "take 2"
        )
