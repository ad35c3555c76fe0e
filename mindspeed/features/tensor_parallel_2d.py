"""2D tensor parallelism: ``--tp-2d --tp-x X --tp-y Y``, X Y = ``--tensor-model-parallel-size``.

Hidden states, weights and activations are sharded over a grid of ranks: collectives of X and Y
ranks instead of one of p, and fewer bytes where X is large (docs/tensor-parallel.md has the table).
Losses, gradients and checkpoints are those of any other layout. Activations are sharded like those
of --sequence-parallel, which is switched on.

    --enable-overlap-ag-with-matmul            hides the forward all-gather of proj and fc2 (ring)
    --enable-overlap-matmul-with-rs            the forward reduce-scatter of qkv and fc1 (chunks)
    --enable-backward-overlap-ag-with-matmul   the backward all-gather of gradients (ring)

``--use-nd-matmul --nd1-dim1-size X --nd2-dim1-size Y`` is an older spelling of the same.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from mindspeed.features._two_dimensional_checks import grid_of, problems, widths_of
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import RANKS
from mindspeed.tensor_parallel.two_dimensional import cost

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class TensorParallel2D(
    Feature,
    level=2,
    seams=("parallel_groups", "layer_spec", "chunk"),
    conflicts=(
        "activation-plan",
        "adaptive-memory",
        "coc",
        "mc2",
        "tp-comm-overlap",
    ),
):
    """Tensor parallelism on a grid of ranks: hidden size and sequence are sharded."""

    tp_2d: bool = flag(False, "shard weights and activations over a grid of ranks")
    tp_x: int = flag(1, "ranks that share the rows (tokens) of hidden states", range=RANKS)
    tp_y: int = flag(1, "ranks that share the columns of hidden states", range=RANKS)
    enable_overlap_ag_with_matmul: bool = flag(
        False, "2D: multiply while the input of proj and fc2 is gathered"
    )
    enable_overlap_matmul_with_rs: bool = flag(
        False, "2D: multiply while the output of qkv and fc1 is reduced"
    )
    enable_backward_overlap_ag_with_matmul: bool = flag(
        False, "2D: multiply while output gradients are gathered"
    )
    use_nd_matmul: bool = flag(False, "older name of --tp-2d")
    nd1_dim1_size: int = flag(1, "older name of --tp-x", range=RANKS)
    nd2_dim1_size: int = flag(1, "older name of --tp-y", range=RANKS)

    def problems(self, megatron: Megatron) -> list[Problem]:
        return list(problems(self, megatron))

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        """Activations are sharded like sequence parallelism's; of the causal mask only the name."""
        values: dict[str, Any] = {"sequence_parallel": True}
        if megatron.get("attention_mask_type") != "general":
            values["create_attention_mask_in_dataloader"] = False
        return values

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        x, y = grid_of(self)
        fuse = bool(megatron.get("gradient_accumulation_fusion"))
        grids: list[Any] = []
        report(megatron, x, y)

        def create() -> None:
            from mindspeed.tensor_parallel.two_dimensional.megatron import create_grid

            destroy()
            grids.append(create_grid(x, y))

        def destroy() -> None:
            from mindspeed.tensor_parallel.two_dimensional.megatron import destroy_grid

            while grids:
                destroy_grid(grids.pop())

        def on_grid(block: Any, config: Any, first_layer: int) -> Any:
            from mindspeed.tensor_parallel.two_dimensional import megatron as layers

            return layers.on_grid(
                block,
                config,
                layers.Layers(
                    grids[0],
                    _products(fuse),
                    self.enable_overlap_ag_with_matmul,
                    self.enable_overlap_matmul_with_rs,
                    self.enable_backward_overlap_ag_with_matmul,
                ),
            )

        def finish(model: Any, config: Any, vp_stage: int | None) -> None:
            from mindspeed.tensor_parallel.two_dimensional.megatron import finish_chunk

            finish_chunk(model, grids[0])

        seams.journal.call_on_undo(destroy)
        seams.parallel_groups.add(create, owner=self.name)
        seams.layer_spec.add(on_grid, owner=self.name)
        seams.chunk.add(finish, owner=self.name)


def _products(fuse: bool) -> Any:
    """What every linear layer of this library computes and sends; features may replace it."""
    from mindspeed.te import comm, kernels
    from mindspeed.te.weight_gradient import WgradOptions, weight_gradient
    from mindspeed.tensor_parallel.two_dimensional.linear import Products

    options = WgradOptions(fuse)
    return Products(
        gather=comm.all_gather_first_dim,
        scatter=comm.reduce_scatter_first_dim,
        gather_matmul=lambda *args, **kwargs: kernels.gather_matmul(*args, **kwargs),
        weight_gradient=lambda weight, x, grad: weight_gradient(weight, x, grad, options),
    )


def report(megatron: Megatron, x: int, y: int) -> None:
    """Say which grid is used, and warn where one dimension would send less."""
    widths = widths_of(megatron)
    if os.environ.get("RANK", "0") != "0" or widths is None:
        return
    print(f"2D tensor parallel: grid {x} x {y}, hidden states [s/{x}, b, h/{y}]", flush=True)
    plain, chosen = cost.one_dimensional(widths, x * y), cost.two_dimensional(widths, x, y)
    if chosen.total <= plain.total:
        return
    best = cost.best_tp_2d(widths, x * y)
    advice = "--sequence-parallel without --tp-2d" if best is None else f"{best.x} x {best.y}"
    print(
        f"2D tensor parallel: warning: {x} x {y} sends {chosen.total / plain.total:.3f} "
        f"of the bytes of one dimension; {advice} sends least. Bytes of one dimension = 1:\n"
        f"{cost.table(widths, x * y)}",
        flush=True,
    )
