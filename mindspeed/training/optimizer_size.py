"""Bytes of the optimizer per trained parameter, from the flags.

master weight     4 in 16-bit training; 2 with remainders (--reuse-fp32-param), 2 1/8 exact ones
moments           4 each; 2 in bf16 and fp16, 1 + 4/256 in fp8, of which embeddings are exempt
                  (--quant-states-exempt); SGD and the matrices of Muon have one; Cadam has one of
                  2 + 4/row
average           4 with --optimizer-selection fused_ema_adamw
gradient copies   4 of 16-bit gradients, while the optimizer runs (--release-fp32-grad: none)

In host memory: all states with --swap-optimizer, of which the device has two windows while the
optimizer runs; both moments with --virtual-optimizer, or some GiB of them; with
--optimizer-cpu-offload states and fp32 gradients of a fraction of the weights, the last one whole.
"""

from __future__ import annotations

import argparse

import torch

from mindspeed.optimizer.placement import GIB, limits
from mindspeed.optimizer.rules import chosen

_ADAM = ("adam", "fused_adam")
_FP8 = 1 + 4 / 256
_MOMENT = {torch.float32: 4.0, torch.bfloat16: 2.0, torch.float16: 2.0, torch.uint8: _FP8}


def state_bytes(args: argparse.Namespace, element: int, matrix: bool = True) -> float:
    """Bytes of the states of one parameter, its master weight included.

    Args:
        args: final values.
        element: bytes of the parameter; one of 4 is its own master weight.
        matrix: Muon updates it itself.
    """
    average = 4.0 if args.optimizer_selection == "fused_ema_adamw" else 0.0
    return (_master(args) if element < 4 else 0.0) + _moments(args, matrix) + average


def exempt_bytes(args: argparse.Namespace) -> float:
    """Bytes more of a parameter whose moments stay fp32 where others are fp8."""
    if chosen(vars(args)) not in _ADAM or args.optimizer_cpu_offload:
        return 0.0
    dtypes = (args.exp_avg_dtype, args.exp_avg_sq_dtype)
    moments = 2 if args.quant_states else sum(dtype == torch.uint8 for dtype in dtypes)
    return moments * (4.0 - _FP8)


def host_bytes(args: argparse.Namespace, entries: float, states: float) -> float:
    """Bytes of the states that are in host memory.

    Args:
        args: final values.
        entries: of the parameters that a rank updates.
        states: bytes of their states.
    """
    if args.swap_optimizer:
        return states
    if args.optimizer_cpu_offload:
        return args.optimizer_offload_fraction * states  # type: ignore[no-any-return]
    if not args.virtual_optimizer:
        return 0.0
    limit = limits(tuple(args.virtual_optimizer))[-1]  # the last stage is fullest
    return min(entries * _moments(args), limit * GIB)


def host_gradient_bytes(args: argparse.Namespace, entries: float) -> float:
    """Bytes of the gradients that ``--optimizer-cpu-offload`` keeps in host memory.

    Args:
        args: final values.
        entries: of the parameters that a rank updates.
    """
    offloaded = args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0
    return 4.0 * entries * offloaded  # type: ignore[no-any-return]


def window_bytes(args: argparse.Namespace, states: float) -> float:
    """Bytes of the windows through which states in host memory are streamed."""
    return 2 * states / args.swap_optimizer_times if args.swap_optimizer else 0.0


def gradient_copy_bytes(args: argparse.Namespace) -> float:
    """Bytes of the copy of one parameter's gradient that the update needs."""
    narrow = args.fp16 or args.bf16
    reads_narrow = args.release_fp32_grad or args.quant_grads or _precision_aware(args)
    if not narrow or args.accumulate_allreduce_grads_in_fp32 or reads_narrow:
        return 0.0
    return 4.0


def _precision_aware(args: argparse.Namespace) -> bool:
    """Whether the optimizer keeps the master weights, by a flag of Megatron's or of ours."""
    own = ("reuse_fp32_param", "release_fp32_grad", "quant_states", "quant_grads", "swap_optimizer")
    return bool(args.use_precision_aware_optimizer or any(getattr(args, name) for name in own))


def _master(args: argparse.Namespace) -> float:
    if args.optimizer_cpu_offload:
        return 4.0
    remainders = args.use_precision_aware_optimizer and args.store_param_remainders and args.bf16
    if args.main_params_dtype == torch.float16:
        return 2.0
    if not (args.reuse_fp32_param or remainders):
        return 4.0
    exact = args.reuse_fp32_param_exact or args.npu_deterministic or args.deterministic_mode
    return 2.125 if args.reuse_fp32_param and exact else 2.0


def _moments(args: argparse.Namespace, matrix: bool = True) -> float:
    if (name := chosen(vars(args))) == "cadam":
        return 2 + 4 / args.hidden_size
    if name not in _ADAM:
        return 4.0 if matrix or name == "sgd" else 8.0
    if args.optimizer_cpu_offload:
        return 8.0
    if args.quant_states:
        return 2 * _FP8
    return _MOMENT[args.exp_avg_dtype] + _MOMENT[args.exp_avg_sq_dtype]
