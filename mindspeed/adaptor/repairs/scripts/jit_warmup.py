"""Defects of the warm-up of fused functions, before the model is built.

Where: ``megatron.training.initialize._warmup_jit_function`` draws random tensors on the device,
sized by the rank's tensor-parallel shard.
First symptom: where the device is the host, it draws from the generator of the host, which routers
and dropout use, and all weights with ``--use-cpu-initialization``. They depend on the
tensor-parallel size and the micro-batch size then, and differ from those of a job on a GPU and of
this library's trainer.
Second symptom: ``--swiglu`` with an odd width of the rank's MLP fails. The warm-up splits a tensor
of this width in two, as large as the model's only after this split.
Fix: restore the state of the host generator after the warm-up; warm up on an even width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from mindspeed.adaptor.arguments import script_arguments
from mindspeed.adaptor.patch import repair


def _odd(values: Mapping[str, Any]) -> bool:
    width, ranks = values.get("ffn_hidden_size"), values.get("tensor_model_parallel_size") or 1
    return bool(values.get("swiglu") and width and width // ranks % 2)


def preserve_cpu_rng(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``_warmup_jit_function``."""

    def _warmup_jit_function(*args: Any, **kwargs: Any) -> None:
        with torch.random.fork_rng(devices=[]), _even_width():
            original(*args, **kwargs)

    return _warmup_jit_function


@contextlib.contextmanager
def _even_width() -> Iterator[None]:
    args = script_arguments()
    if args is None or not _odd(vars(args)):
        yield
        return
    width, args.ffn_hidden_size = args.ffn_hidden_size, 2 * args.tensor_model_parallel_size
    try:
        yield
    finally:
        args.ffn_hidden_size = width


PATCHES = (
    repair(
        "megatron.training.initialize:_warmup_jit_function",
        preserve_cpu_rng,
        "weights and dropout masks drawn on the host do not depend on the warm-up",
        expects={"<0.19": "()", ">=0.19": "(tp_size)"},
    ),
)
