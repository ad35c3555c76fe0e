"""Floating-point operations of one training step, by Megatron's convention.

The formula is :mod:`mindspeed.profiling.model_flops`. These are model FLOPs, the numerator of MFU,
without recomputation; executed FLOPs are counted by ``--op-cal-tflops``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

from mindspeed import session
from mindspeed.profiling.model_flops import (
    Computing,
    ModelShape,
    causal_keys,
    flops_of_tokens,
    window_of,
    window_pattern,
)


def training_flops(args: argparse.Namespace, samples: int) -> float:
    """Floating-point operations to train on ``samples`` sequences of full length."""
    tokens = args.seq_length * samples
    pairs = tokens * keys_of_a_query(args)(args.seq_length)
    return flops_of_tokens(model_shape(args), tokens, pairs)


def model_shape(args: argparse.Namespace) -> ModelShape:
    """The sizes of a model from its final values."""
    shape = ModelShape.from_megatron(vars(args), _computing())
    assert shape is not None  # final values have no model but GPT
    return shape


def keys_of_a_query(args: argparse.Namespace) -> Callable[[int], float]:
    """Length of a sequence -> keys that a query sees, mean over its queries and the layers."""
    values = vars(args)
    return partial(causal_keys, window_of(values), window_pattern(values, _computing()))


def _computing() -> Computing:
    """Features may have layers that do not compute."""
    active = session.current()
    return list if active is None else active.seams.computing_layers.pipe
