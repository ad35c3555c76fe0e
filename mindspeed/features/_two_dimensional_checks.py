"""Checks of the flags of 2D tensor parallelism, before any rank starts to work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed.features.feature import Megatron, Problem
from mindspeed.tensor_parallel.two_dimensional.cost import Widths

if TYPE_CHECKING:
    from mindspeed.features.tensor_parallel_2d import TensorParallel2D

_OVERLAP = (
    "enable_overlap_ag_with_matmul",
    "enable_overlap_matmul_with_rs",
    "enable_backward_overlap_ag_with_matmul",
)
_TP = "--tensor-model-parallel-size"


def grid_of(options: TensorParallel2D) -> tuple[int, int]:
    """X and Y."""
    if options.use_nd_matmul:
        return options.nd1_dim1_size, options.nd2_dim1_size
    return options.tp_x, options.tp_y


def widths_of(megatron: Megatron) -> Widths | None:
    """Widths of the linear layers, where the arguments say them."""
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
        (2 if megatron.get("swiglu") else 1) * ffn,
        ffn,
    )


def _query_groups(megatron: Megatron) -> int:
    groups = megatron.get("num_query_groups") if megatron.get("group_query_attention") else None
    return groups or megatron["num_attention_heads"]


def problems(options: TensorParallel2D, megatron: Megatron) -> Iterator[Problem]:
    """Everything that is wrong with the flags, or does not go together with a grid."""
    own = "--use-nd-matmul" if options.use_nd_matmul else "--tp-2d"
    if not (options.tp_2d or options.use_nd_matmul):
        given = [
            name for name, value in vars(options).items() if value != vars(type(options))[name]
        ]
        spelt = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        yield Problem(spelt, "has no effect without --tp-2d", "add --tp-2d or remove it")
        return
    if options.tp_2d and options.use_nd_matmul:
        yield Problem("--use-nd-matmul", "is an older name of --tp-2d", "give one of them")
        return
    x_flag, y_flag = ("--nd1-dim1-size", "--nd2-dim1-size") if options.use_nd_matmul else (
        "--tp-x", "--tp-y")  # fmt: skip
    other = (options.tp_x, options.tp_y) if options.use_nd_matmul else (
        options.nd1_dim1_size, options.nd2_dim1_size)  # fmt: skip
    if other != (1, 1):
        yield Problem(own, "takes its sizes from its own flags", f"give {x_flag} and {y_flag} only")
    x, y = grid_of(options)
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
    forward = [name for name in _OVERLAP[:2] if getattr(options, name)]
    if len(forward) > 1:
        spelt = " and ".join(f"--{name.replace('_', '-')}" for name in forward)
        yield Problem(spelt, "each hide a collective of the forward pass", "choose one of them")
    for name, text in _UNAVAILABLE.items():
        if megatron.get(name):
            yield Problem(own, f"does not work with {text}", "remove one of them")
    yield from _context_parallel(own, megatron)


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


_UNAVAILABLE = {
    "num_experts": "mixture of experts (--num-experts)",
    "multi_latent_attention": "latent attention (--multi-latent-attention)",
    "mtp_num_layers": "multi-token prediction (--mtp-num-layers)",
    "reset_attention_mask": "packed documents (--reset-attention-mask)",
    "reset_position_ids": "packed documents (--reset-position-ids)",
    "sft": "packed documents (--sft)",
    "variable_seq_lengths": "--variable-seq-lengths",
    "lora_target_modules": "adapters (--lora-target-modules)",
    "lora_modules_to_save": "adapters (--lora-modules-to-save)",
    "lora_load": "adapters (--lora-load)",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "coc_fused_kernel": "--coc-fused-kernel: one kernel cannot use the communicators of two groups",
    "noop_layers": "--noop-layers",
    "recompute_norm": "--recompute-norm",
    "recompute_activation_function": "--recompute-activation-function",
    "swap_attention": "--swap-attention",
    "optimize_recomp_communication_level": "--optimize-recomp-communication-level",
    "unaligned_linear": "--unaligned-linear",
    "delay_wgrad_compute": "--delay-wgrad-compute",
    "cpu_offloading": "--cpu-offloading",
    "fine_grained_activation_offloading": "--fine-grained-activation-offloading",
    "use_legacy_models": "--use-legacy-models",
    "is_hybrid_model": "--hybrid-override-pattern",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_te_activation_func": "--use-te-activation-func",
    "attention_output_gate": "--attention-output-gate",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
}
_CONTEXT_ALGORITHMS = ("megatron_cp_algo", "ulysses_cp_algo")


def _context_parallel(own: str, megatron: Megatron) -> Iterator[Problem]:
    types = megatron.get("cp_comm_type") or ["p2p"]
    types = [types] if isinstance(types, str) else types
    if "a2a+p2p" in types:
        yield Problem("--cp-comm-type a2a+p2p", f"its groups do not fit {own}", "choose p2p or a2a")
    algorithm = megatron.get("context_parallel_algo") or _CONTEXT_ALGORITHMS[0]
    if (megatron.get("context_parallel_size") or 1) > 1 and algorithm not in _CONTEXT_ALGORITHMS:
        yield Problem(
            f"--context-parallel-algo {algorithm}",
            f"does not work with {own}",
            f"choose {' or '.join(_CONTEXT_ALGORITHMS)}",
        )
