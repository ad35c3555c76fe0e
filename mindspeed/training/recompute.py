"""``--auto-recompute-device-size``: recompute as few layers as fit into a device.

The original watched the memory of the first steps and then chose. Here the choice is made before
the first step, by the estimate of ``--dry-run`` (:mod:`mindspeed.training.estimate`): all ranks
and resumed runs make the same choice.

    0, 1, 2, ... layers of every stage  (--recompute-method block), then all of them, one at a time
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from mindspeed.training.estimate import estimate

_MIB = 2**20


def choose(args: argparse.Namespace) -> str:
    """Set Megatron's flags of recomputation in ``args``; returns what was chosen, for the user."""
    size = args.auto_recompute_device_size
    chosen, needed = "", 0.0
    for chosen in _choices(args):  # noqa: B007  (the last one that was tried)
        needed = estimate(args).memory / _MIB
        if needed <= size:
            break
    fits = "" if needed <= size else ", which does not fit: use more devices, or a smaller batch"
    found = f"{chosen}, {needed:,.0f} MiB per rank, estimated{fits}"
    return f"--auto-recompute-device-size {size}: {found}"


def _choices(args: argparse.Namespace) -> Iterator[str]:
    """Sets one choice after another, from the fastest to the smallest, and names it."""
    chunks = args.virtual_pipeline_model_parallel_size or 1
    layers = -(-args.num_layers // (args.pipeline_model_parallel_size * chunks))
    yield "no recomputation"
    args.recompute_granularity, args.recompute_method = "full", "block"
    of = "virtual stage" if chunks > 1 else "stage"
    for again in range(1, layers):
        args.recompute_num_layers = again
        yield f"{again} of {layers} layers of every {of} are recomputed"
    args.recompute_method, args.recompute_num_layers = "uniform", 1
    yield "every layer is recomputed"
