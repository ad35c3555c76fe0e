"""One rank of the tests of packed documents: data whose rows hold several documents."""

from __future__ import annotations

import importlib
import os
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

EOD = 1000  # of the NullTokenizer with --vocab-size 1000


def write_documents(prefix: str) -> None:
    """Documents of 1 to 60 tokens, the end included."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    draw = random.Random(0)
    for _ in range(300):
        length = draw.choice([0, 0, 1, 2, 3, 5, 9, 14, 20, 33, 59])
        tokens = [draw.randrange(EOD) for _ in range(length)]
        builder.add_document(torch.tensor([*tokens, EOD]), [length + 1])
    builder.finalize(f"{prefix}.idx")


def write_padded_rows(prefix: str) -> None:
    """Documents of 64 tokens that fill a row each: some words, and ends behind them."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    draw = random.Random(1)
    for _ in range(60):
        length = draw.choice([5, 11, 18, 30, 41])
        words = [draw.randrange(EOD) for _ in range(length)]
        builder.add_document(torch.tensor(words + [EOD] * (64 - length)), [64])
    builder.finalize(f"{prefix}.idx")


def train_and_count(flags: Sequence[str]) -> dict[str, Any]:
    """Train; how many messages this rank sent, and how long its micro-batches were."""
    from mindspeed.instruments import CommLedger
    from mindspeed.training import batches
    from tests.support.trainer_job import train

    lengths, read_batch = [], batches.read_batch

    def watched(*args: Any, **options: Any) -> Any:
        read = read_batch(*args, **options)
        lengths.append(read.seq_length)
        return read

    batches.read_batch = watched
    with CommLedger() as ledger:
        result = train(flags)
    headers = ledger.calls("send", group="PIPELINE_HEADER_GROUP")
    return {**result, "sent": ledger.calls("send"), "headers": headers, "lengths": lengths}


def train_and_watch_plans(flags: Sequence[str]) -> dict[str, Any]:
    """Train with adaptive layouts.

    Returns:
        The ``order`` of what this rank did with micro-batches, and the ``threads`` that computed a
        layout.
    """
    from mindspeed.training import batches
    from tests.support.trainer_job import train

    planner = importlib.import_module("mindspeed.attention.planners.adaptive")
    order: list[str] = []
    threads: list[str] = []

    def watch(module: Any, name: str, note: Callable[[], None]) -> None:
        function = getattr(module, name)

        def watched(*args: Any, **options: Any) -> Any:
            note()
            return function(*args, **options)

        setattr(module, name, watched)

    watch(batches, "read_batch", lambda: order.append("read"))
    watch(batches, "shard_batch", lambda: order.append("train"))
    watch(planner, "initial_shardings", lambda: threads.append(threading.current_thread().name))
    return {**train(flags), "order": order, "threads": threads}


def packed_and_dense(flags: Sequence[str]) -> dict[str, Any]:
    """Losses and gradients of one micro-batch, packed, and by Megatron's own dense mask.

    Returns:
        ``boundaries``, and for each way ``losses`` of all tokens and ``gradients`` of their sum.
    """
    from megatron.core.datasets import gpt_dataset

    from mindspeed.training import data, resolve_data, setup
    from mindspeed.training.configs import transformer_config
    from mindspeed.training.initialize import prepare
    from mindspeed.training.model import build_modules, gpt_model
    from tests.support.trainer_job import TINY

    args = prepare([*TINY, *flags], int(os.environ["WORLD_SIZE"])).args
    setup.initialize(args)
    config, tokenizer = transformer_config(args), resolve_data.load_tokenizer(args)
    (model,) = build_modules(args, config, gpt_model)
    sets = data.build_datasets(args, config, tokenizer)
    (reader,) = data.micro_batches(args, config, sets.train, 0, tokenizer)
    batch = next(reader)
    packing = batch.pop("packed_seq_params")
    # The original: our patch of it builds no mask.
    dense = gpt_dataset._get_ltor_masks_and_position_ids.__wrapped__
    rows = [dense(row, EOD, True, True, True, True) for row in batch["tokens"]]
    masks, loss_masks, positions = (torch.stack(parts) for parts in zip(*rows, strict=True))
    assert batch["loss_mask"].equal(loss_masks)
    assert batch["position_ids"].equal(positions)
    found: dict[str, Any] = {"boundaries": packing.packed.cu_seqlens}
    for name, how in {
        "packed": {"attention_mask": None, "packed_seq_params": packing},
        "dense": {"attention_mask": masks},
    }.items():
        model.zero_grad()
        losses = model(batch["tokens"], positions, labels=batch["labels"], **how)
        (losses * loss_masks).sum().backward()
        gradients = {key: value.grad.clone() for key, value in model.named_parameters()}
        found[name] = {"losses": losses.detach(), "gradients": gradients}
    return found
