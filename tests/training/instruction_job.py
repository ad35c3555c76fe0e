"""Conversations of invented tokens, and training on them on the ranks of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_job import TINY

# The flags of TINY without its data, sequence length and batch; dropout is off.
BASE = [word for word in TINY if word != "--mock-data"]


def write_conversations(prefix: str, samples: int = 64, longest: int = 60) -> None:
    """Questions and answers that count upwards, lognormally long, the answers trained."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from mindspeed.data.instruction import part_prefixes

    random = np.random.default_rng(0)
    builders = [IndexedDatasetBuilder(f"{part}.bin", np.int32) for part in part_prefixes(prefix)]
    for _ in range(samples):
        length = int(np.clip(random.lognormal(2.8, 0.7), 4, longest))
        asked = int(random.integers(1, length - 1))
        ids = (random.integers(0, 900) + np.arange(length)).astype(np.int32) % 1000
        labels = np.where(np.arange(length) < asked, -100, ids).astype(np.int32)
        for builder, values in zip(builders, (ids, np.ones_like(ids), labels), strict=True):
            builder.add_document(values, [length])
    for builder, part in zip(builders, part_prefixes(prefix), strict=True):
        builder.finalize(f"{part}.idx")


def flags_for(prefix: Path | str, *more: str) -> list[str]:
    """Training on the conversations of a prefix."""
    flags = ["--no-mock-data", "--is-instruction-dataset", "--data-path", str(prefix)]
    return [*flags, "--split", "1,0,0", *" ".join(more).split()]


def batches(flags: list[str], count: int) -> list[dict[str, Any]]:
    """The first micro-batches of this rank's stage."""
    import os

    from mindspeed.cli.pretrain import _prepare
    from mindspeed.training import data, setup
    from mindspeed.training.configs import transformer_config

    args = _prepare([*TINY, *flags], int(os.environ["WORLD_SIZE"])).args
    setup.initialize(args)
    config = transformer_config(args)
    tokenizer = data.load_tokenizer(args)
    sets = data.build_datasets(args, config, tokenizer)
    (reader,) = data.micro_batches(args, config, sets.train, 0, tokenizer)
    found = [next(reader) for _ in range(count)]
    for batch in found:
        packing = batch.pop("packed_seq_params", None)
        batch["cu_seqlens"] = None if packing is None else packing.cu_seqlens_q
    return found
