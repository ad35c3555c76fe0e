"""The jobs of questions, started."""

from __future__ import annotations

from collections.abc import Sequence

import mindspeed.megatron_adaptor  # noqa: F401
from mindspeed.planner.job import Job
from mindspeed.planner.question import LONGEST, PURPOSES, job_words, named_model


def start(names: Sequence[str], devices: int) -> list[str]:
    """Start a job of every purpose for every model.

    Returns:
        What was tried: model, purpose, tokens of a step, whether adapters are trained.
    """
    tried = []
    for name in names:
        model, flags = named_model(name)
        for purpose in PURPOSES.values():
            assumed, words = job_words(purpose, model, flags, [], devices)
            assert words == ["--model", name, *assumed]
            args = Job(words).settings(None, devices).args
            assert args.seq_length == min(LONGEST, flags["max_position_embeddings"]), name
            assert args.global_batch_size % devices == 0 and args.bf16, name
            tried.append(f"{name} {purpose.name} {bool(args.lora_target_modules)}")
    return tried
