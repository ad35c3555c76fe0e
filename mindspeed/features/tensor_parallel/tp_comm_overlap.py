"""Megatron's ``--tp-comm-overlap`` without NVIDIA's Transformer Engine.

Fused kernels over symmetric memory on GPUs and of torch_npu on NPUs; where those cannot run, parts
of a product that overlap with the collective. Both layer specs. With NVIDIA's package nothing
changes: it uses its userbuffers.

    tp_comm_overlap_ag          gather, then product: forward of column layers, dx of row layers
    tp_comm_overlap_rs          product, then scatter: forward of row layers
    tp_comm_overlap_rs_dgrad    the same for dx of column layers, whose collective the weight
                                gradient hides otherwise
    tp_comm_overlap_disable_qkv, tp_comm_overlap_disable_fc1    not in these layers

These are fields of Megatron's config, read when a model chunk is built. ``tp_comm_bulk_wgrad`` and
``tp_comm_bulk_dgrad`` are always on: a collective that is not overlapped with its own product runs
at the same time as another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.features.tensor_parallel import overlapped_products as shared
from mindspeed.flags import flag

if TYPE_CHECKING:
    import torch

    from mindspeed.adaptor.seams import Seams
    from mindspeed.tensor_parallel.strategy import Operation

NAME = "--tp-comm-overlap"
_LAYERS = {
    "tp_comm_overlap_disable_qkv": "linear_qkv",
    "tp_comm_overlap_disable_fc1": "linear_fc1",
}
_USERBUFFERS = {
    "tp_comm_overlap_cfg": (None, "describes userbuffers of NVIDIA's Transformer Engine"),
    "tp_comm_bootstrap_backend": ("nccl", "sets up userbuffers of NVIDIA's Transformer Engine"),
    "tp_comm_bulk_wgrad": (True, "is always on here"),
    "tp_comm_bulk_dgrad": (True, "is always on here"),
}


class TpCommOverlap(Feature, level=0, seams=("kernels", "chunk"), excludes=shared.READ_WEIGHTS):
    """Megatron's overlap of products and tensor-parallel collectives, on every device."""

    tp_comm_overlap: bool = flag(
        False, "overlap products of linear layers and their collectives", megatron=True
    )

    def enabled(self, megatron: Megatron) -> bool:
        from mindspeed import device, te

        if not self.tp_comm_overlap:
            return False
        return te.choose(device.current().name)[0] != "native"

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        yield from shared.common_problems(NAME, megatron)
        yield from shared.sequence_parallel_problem(NAME, "overlaps", megatron)
        for name, (default, why) in _USERBUFFERS.items():
            if megatron.get(name, default) != default:
                spelling = "--" + name.replace("_", "-")
                yield Problem(f"{NAME} with {spelling}", f"{spelling} {why}", "remove it")

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        every = shared.fused_overlap()
        products = shared.attach_products(seams, self.name, every)

        def follow_config(model: torch.nn.Module, config: Any, vp_stage: int | None) -> None:
            products.use(replace(every, **_of_config(config)))
            _keep_layers_plain(model, config)

        seams.chunk.add(follow_config, owner=self.name)


def _of_config(config: Any) -> dict[str, Any]:
    """The products that the config of a model chunk overlaps, as fields of ``Overlap``."""
    gathers, scatters = config.tp_comm_overlap_ag, config.tp_comm_overlap_rs
    scatters_dgrad = config.tp_comm_overlap_rs_dgrad
    operations: list[Operation] = ["gather_matmul"] if gathers else []
    operations += ["matmul_scatter"] if scatters or scatters_dgrad else []
    return {
        "operations": tuple(operations),
        "row_forward": scatters,
        "column_backward": scatters_dgrad,
    }


def _keep_layers_plain(model: torch.nn.Module, config: Any) -> None:
    plain = {layer for name, layer in _LAYERS.items() if getattr(config, name)}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in plain:
            module.overlap_communication = False  # type: ignore[assignment]
