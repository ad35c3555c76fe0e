"""``--base-weights``: the frozen weights of linear layers in fewer bits, from the first moment."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from mindspeed.te.quantized_weight import QuantizedFormat, quantized_weights, store


def left_out(args: argparse.Namespace) -> AbstractContextManager[Any]:
    """A region that builds linear layers without weights, if they get fewer bits."""
    return quantized_weights() if args.base_weights else nullcontext()


def store_weights(args: argparse.Namespace, module: torch.nn.Module, place: torch.device) -> None:
    """Give the linear layers of a stage their weights, in the form of the flags."""
    if args.base_weights:
        store(module, QuantizedFormat(args.base_weights, args.double_quantization), place)
