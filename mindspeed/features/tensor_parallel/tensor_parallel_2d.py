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
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.adaptor.grid_layers import linear_products
from mindspeed.features.attention.context_parallel import comm_types
from mindspeed.features.feature import Feature, Megatron, Problem
from mindspeed.flags import flag
from mindspeed.ranges import RANKS
from mindspeed.tensor_parallel.two_dimensional import cost
from mindspeed.tensor_parallel.two_dimensional.cost import Widths
from mindspeed.tensor_parallel.two_dimensional.grid import current_grid, set_current_grid

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


_OVERLAP = (
    "enable_overlap_ag_with_matmul",
    "enable_overlap_matmul_with_rs",
    "enable_backward_overlap_ag_with_matmul",
)
_TP = "--tensor-model-parallel-size"

_CONTEXT_ALGORITHMS = ("megatron_cp_algo", "ulysses_cp_algo")


class TensorParallel2D(
    Feature,
    level=2,
    megatron_versions=">=0.16",
    seams=("parallel_groups", "layer_spec", "chunk"),
    conflicts=(
        "activation-plan",
        "adaptive-memory",
        "coc",
        "mc2",
        "tp-comm-overlap",
        "noop-layers",
        "recompute-activation-function",
        "recompute-communication",
        "recompute-norm",
        "swap-attention",
        "variable-lengths",
    ),
    excludes=dict.fromkeys(
        (
            "num_experts",
            "multi_latent_attention",
            "mtp_num_layers",
            "reset_attention_mask",
            "reset_position_ids",
            "sft",
            "lora_target_modules",
            "lora_modules_to_save",
            "lora_load",
            "fp8",
            "fp4",
            "delay_wgrad_compute",
            "cpu_offloading",
            "fine_grained_activation_offloading",
            "use_legacy_models",
            "is_hybrid_model",
            "hybrid_context_parallel",
            "use_megatron_fsdp",
            "use_te_activation_func",
            "attention_output_gate",
            "heterogeneous_layers_config_path",
        ),
        "",
    )
    | {"coc_fused_kernel": "one kernel cannot use the communicators of two groups"},
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

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        """Find errors in the flags, and options that are incompatible with a grid."""
        own = "--use-nd-matmul" if self.use_nd_matmul else "--tp-2d"
        if not (self.tp_2d or self.use_nd_matmul):
            given = [name for name, value in vars(self).items() if value != vars(type(self))[name]]
            spelt = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            yield Problem(spelt, "has no effect without --tp-2d", "add --tp-2d or remove it")
            return
        if self.tp_2d and self.use_nd_matmul:
            yield Problem("--use-nd-matmul", "is an older name of --tp-2d", "give one of them")
            return
        x_flag, y_flag = ("--nd1-dim1-size", "--nd2-dim1-size") if self.use_nd_matmul else (
            "--tp-x", "--tp-y")  # fmt: skip
        other = (self.tp_x, self.tp_y) if self.use_nd_matmul else (
            self.nd1_dim1_size, self.nd2_dim1_size)  # fmt: skip
        if other != (1, 1):
            yield Problem(
                own, "takes its sizes from its own flags", f"give {x_flag} and {y_flag} only"
            )
        x, y = self.grid_of()
        # Frameworks give it to Megatron only, where it is checked again.
        tp = megatron.get("tensor_model_parallel_size") or x * y
        if x < 2 or y < 2 or x * y != tp:
            yield Problem(
                own,
                f"{x_flag} {x} * {y_flag} {y} = {x * y} must be {_TP} {tp}, and both must be > 1",
                _possible_grids(tp, x_flag, y_flag),
            )
            return
        yield from _sizes(megatron, x, y, x_flag, y_flag)
        forward = [name for name in _OVERLAP[:2] if getattr(self, name)]
        if len(forward) > 1:
            spelt = " and ".join(f"--{name.replace('_', '-')}" for name in forward)
            yield Problem(spelt, "each hide a collective of the forward pass", "choose one of them")
        yield from _context_parallel(own, megatron)
        if (megatron.get("norm_placement") or "pre") != "pre":
            yield Problem(
                own, "has norms in front of attention and MLP only", "drop --norm-placement"
            )
        if megatron.get("qk_norm_over_all_heads"):
            yield Problem(own, "shares heads over x only", "drop --qk-norm-over-all-heads")

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        """Shard activations as sequence parallelism does, and pass the causal mask by name only."""
        values: dict[str, Any] = {"sequence_parallel": True}
        if megatron.get("attention_mask_type") != "general":
            values["create_attention_mask_in_dataloader"] = False
        return values

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        x, y = self.grid_of()
        fuse = bool(megatron.get("gradient_accumulation_fusion"))
        report(megatron, x, y)

        def create() -> None:
            from mindspeed.tensor_parallel.two_dimensional.megatron import create_grid

            destroy()
            set_current_grid(create_grid(x, y))

        def destroy() -> None:
            from mindspeed.tensor_parallel.two_dimensional.megatron import destroy_grid

            if (before := set_current_grid(None)) is not None:
                destroy_grid(before)

        def on_grid(block: Any, config: Any, first_layer: int) -> Any:
            from mindspeed.tensor_parallel.two_dimensional import megatron as layers

            return layers.on_grid(
                block,
                config,
                layers.GridLayers(
                    current_grid(),
                    linear_products(fuse),
                    self.enable_overlap_ag_with_matmul,
                    self.enable_overlap_matmul_with_rs,
                    self.enable_backward_overlap_ag_with_matmul,
                ),
            )

        def finish(model: Any, config: Any, vp_stage: int | None) -> None:
            from mindspeed.tensor_parallel.two_dimensional.megatron import finish_chunk

            finish_chunk(model, current_grid())

        seams.journal.call_on_undo(destroy)
        seams.parallel_groups.add(create, owner=self.name)
        seams.layer_spec.add(on_grid, owner=self.name)
        seams.chunk.add(finish, owner=self.name)

    def grid_of(self) -> tuple[int, int]:
        """The sizes X and Y of the grid."""
        if self.use_nd_matmul:
            return self.nd1_dim1_size, self.nd2_dim1_size
        return self.tp_x, self.tp_y


def report(megatron: Megatron, x: int, y: int) -> None:
    """Report the grid, and warn if one dimension would send less."""
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


def widths_of(megatron: Megatron) -> Widths | None:
    """Widths of the linear layers that the arguments define."""
    hidden, heads = megatron.get("hidden_size"), megatron.get("num_attention_heads")
    if not hidden or not heads:
        return None
    ffn = megatron.get("ffn_hidden_size") or 4 * hidden
    channels = megatron.get("kv_channels") or hidden // heads
    proj = channels * heads
    return Widths(
        hidden,
        proj + 2 * channels * _query_groups(megatron),
        proj,
        (2 if any(map(megatron.get, ("swiglu", "quick_geglu", "geglu"))) else 1) * ffn,
        ffn,
    )


def _query_groups(megatron: Megatron) -> int:
    groups = megatron.get("num_query_groups") if megatron.get("group_query_attention") else None
    return groups or megatron["num_attention_heads"]


def _possible_grids(tp: int, x_flag: str, y_flag: str) -> str:
    pairs = [(tp // y, y) for y in range(2, tp) if tp % y == 0 and tp // y > 1]
    if not pairs:
        return f"{_TP} must be a product of two numbers > 1"
    return "choose " + " or ".join(f"{x_flag} {x} {y_flag} {y}" for x, y in pairs)


def _sizes(megatron: Megatron, x: int, y: int, x_flag: str, y_flag: str) -> Iterator[Problem]:
    widths = widths_of(megatron)
    if widths is None:  # frameworks give sizes to the model only
        return
    checks = [
        ("--num-attention-heads", megatron["num_attention_heads"], x_flag, x),
        ("--num-query-groups", _query_groups(megatron), x_flag, x),
        ("--hidden-size", widths.hidden, y_flag, y),
        ("--ffn-hidden-size", widths.fc2, x_flag, x),
        ("--hidden-size", widths.hidden, x_flag, 1),
    ]
    for name, size, divisor_flag, divisor in checks:
        if size % divisor:
            yield Problem(
                f"{name} {size}",
                f"must be divisible by {divisor_flag} {divisor}",
                "choose another grid",
            )
    length, context = megatron.get("seq_length"), megatron.get("context_parallel_size") or 1
    for divisor, product in ((x * y, f"{x_flag} * {y_flag}"), (2 * y, f"2 * {y_flag}")):
        if length and length % (divisor * context):
            ranks = f" * --context-parallel-size {context}" if context > 1 else ""
            yield Problem(
                f"--seq-length {length}",
                f"must be divisible by {product} = {divisor}{ranks}",
                "choose another length or another grid",
            )


def _context_parallel(own: str, megatron: Megatron) -> Iterator[Problem]:
    if "a2a+p2p" in (comm_types(megatron) or ()):
        yield Problem("--cp-comm-type a2a+p2p", f"its groups do not fit {own}", "choose p2p or a2a")
    algorithm = megatron.get("context_parallel_algo") or _CONTEXT_ALGORITHMS[0]
    if (megatron.get("context_parallel_size") or 1) > 1 and algorithm not in _CONTEXT_ALGORITHMS:
        yield Problem(
            f"--context-parallel-algo {algorithm}",
            f"does not work with {own}",
            f"choose {' or '.join(_CONTEXT_ALGORITHMS)}",
        )
