"""Bytes of the optimizer per trained parameter, from the flags.

master weight     4 in 16-bit training; 2 with remainders (--reuse-fp32-param), 2 1/8 exact ones
moments           4 each; 2 in bf16 and fp16, 1 + 4/256 in fp8; SGD and Muon have one
gradient copies   4 of 16-bit gradients, while the optimizer runs (--release-fp32-grad: none)
"""

from __future__ import annotations

import argparse

import torch

_FP8 = 1 + 4 / 256
_MOMENT = {torch.float32: 4.0, torch.bfloat16: 2.0, torch.float16: 2.0, torch.uint8: _FP8}


def state_bytes(args: argparse.Namespace) -> float:
    """Bytes of the states of one parameter, its master weight included."""
    return _master(args) + _moments(args)


def gradient_copy_bytes(args: argparse.Namespace) -> float:
    """Bytes of the copy of one parameter's gradient that the update needs."""
    narrow = args.fp16 or args.bf16
    reads_narrow = args.release_fp32_grad or args.quant_grads or _precision_aware(args)
    if not narrow or args.accumulate_allreduce_grads_in_fp32 or reads_narrow:
        return 0.0
    return 4.0


def _precision_aware(args: argparse.Namespace) -> bool:
    """Whether the optimizer keeps the master weights, by a flag of Megatron's or of ours."""
    own = args.reuse_fp32_param or args.release_fp32_grad or args.quant_states or args.quant_grads
    return bool(args.use_precision_aware_optimizer or own)


def _master(args: argparse.Namespace) -> float:
    if not (args.fp16 or args.bf16):
        return 0.0  # the parameter itself
    chosen = args.use_precision_aware_optimizer and args.store_param_remainders and args.bf16
    if args.main_params_dtype == torch.float16:
        return 2.0
    if not (args.reuse_fp32_param or chosen):
        return 4.0
    exact = args.reuse_fp32_param_exact or args.npu_deterministic or args.deterministic_mode
    return 2.125 if args.reuse_fp32_param and exact else 2.0


def _moments(args: argparse.Namespace) -> float:
    if args.optimizer != "adam":
        return 4.0
    if args.quant_states:
        return 2 * _FP8
    return _MOMENT[args.exp_avg_dtype] + _MOMENT[args.exp_avg_sq_dtype]
