"""``--half-batch-overlap``: one half of a micro-batch computes while the other communicates.

    --half-batch-overlap          # with two or more tensor-parallel ranks and samples

The samples of a micro-batch go through each transformer layer in two halves, in turn. The
collectives of one hide behind the products of the other: the reduction of a row-parallel layer,
which CoC can hide behind its own product only, and with sequence parallelism the gathering before
the next column-parallel layer, too. Bytes stay, messages double, products have half the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem, conflict
from mindspeed.features.tensor_parallel.overlapped_products import common_problems
from mindspeed.flags import flag

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams

NAME = "--half-batch-overlap"
_ONE = "both hide the collectives of the same linear layers, and parts of a half are small"
_PARTS = "it runs the parts of a layer one by one, which leaves no whole layer to free or move"
_READS = "outputs of linear layers are complete only where the next part of the layer reads them"
_RANKS = "parameters that ranks share are gathered and freed around whole layers"
_RECOMPUTED = ("layernorm", "mlp", "moe", "shared_experts", "moe_act", "mla_up_proj")


class HalfBatch(
    Feature,
    level=2,
    seams=("chunk",),
    conflicts={
        "coc": _ONE,
        "mc2": _ONE,
        "tp-comm-overlap": _ONE,
        "tensor-parallel-2d": "its linear layers communicate over two groups each",
        "unaligned-linear": "ranks have different numbers of rows",
        "activation-plan": _PARTS,
        "adaptive-memory": _PARTS,
        "automated-pipeline": _PARTS,
        "recompute-activation-function": _PARTS,
        "recompute-communication": _PARTS,
        "recompute-in-advance": _PARTS,
        "recompute-in-bubble": _PARTS,
        "recompute-layers-per-pp-rank": _PARTS,
        "recompute-norm": _PARTS,
        "swap-attention": _PARTS,
        "packed-documents": "documents of a micro-batch are planned for all of its samples",
        "guard": _READS,
        "record": _READS,
    },
    excludes={
        "num_experts": "the layers of experts exchange tokens of the whole micro-batch",
        "multi_latent_attention": "its column layers share one input, whose gradients are summed",
        "use_megatron_fsdp": _RANKS,
        "use_torch_fsdp2": _RANKS,
        "cpu_offloading": _PARTS,
        "fine_grained_activation_offloading": _PARTS,
        "delay_wgrad_compute": "weight gradients are added over both halves in their backward",
        "cuda_graph_impl": "graphs are captured of whole layers",
        "sft": "its micro-batches are packed documents",
    },
):
    """One half of a micro-batch computes while the other communicates."""

    half_batch_overlap: bool = flag(
        False, "run layers in two halves of a micro-batch, which hide each other's collectives"
    )

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        yield from common_problems(NAME, megatron)
        if megatron.get("micro_batch_size") == 1:
            yield Problem(
                NAME,
                "--micro-batch-size 1 has no two halves",
                "choose 2 or more, or use --use-ascend-coc --coc-parallel-num 4",
            )
        if (megatron.get("zero_stage") or 0) > 1:
            yield conflict(NAME, f"--zero-stage {megatron['zero_stage']}", _RANKS)
        if megatron.get("recompute_granularity") == "selective":
            modules = megatron.get("recompute_modules") or ()
            if again := [one for one in _RECOMPUTED if one in modules]:
                fix = "use core_attn, or --recompute-granularity full"
                yield conflict(NAME, f"--recompute-modules {' '.join(again)}", _PARTS, fix)

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.te import local_linears
        from mindspeed.tensor_parallel.halves.megatron import attach

        def halve(model: Any, config: Any, vp_stage: int | None) -> None:
            local_linears.convert_chunk(model, config, vp_stage)
            attach(model, seams.journal)

        seams.chunk.add(halve, owner=self.name)
