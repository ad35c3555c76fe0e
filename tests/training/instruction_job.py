"""Conversations of invented tokens, and training on them on the ranks of a pool."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.trainer_job import TINY

# The flags of TINY without its data, sequence length and batch; dropout is off.
BASE = [word for word in TINY if word != "--mock-data"]


def write_conversations(prefix: str, samples: int = 64, longest: int = 60) -> None:
    """Questions and answers that count upwards, lognormally long, the answers trained."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from mindspeed.data.instruction_dataset import part_prefixes

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

    from mindspeed.training import data, resolve_data, setup
    from mindspeed.training.configs import transformer_config
    from mindspeed.training.initialize import prepare

    args = prepare([*TINY, *flags], int(os.environ["WORLD_SIZE"])).args
    setup.initialize(args)
    config = transformer_config(args)
    tokenizer = resolve_data.load_tokenizer(args)
    sets = data.build_datasets(args, config, tokenizer)
    (reader,) = data.micro_batches(args, config, sets.train, 0, tokenizer)
    found = [next(reader) for _ in range(count)]
    for batch in found:
        packing = batch.pop("packed_seq_params", None)
        batch["cu_seqlens"] = None if packing is None else packing.cu_seqlens_q
    return found


def packed_and_padded(flags: list[str], count: int) -> dict[str, Any]:
    """Losses of every token and all gradients of some rows, packed, and of their samples, padded.

    Returns:
        ``samples`` (number), and for each way ``losses`` of the trained tokens sample by sample,
        their ``total`` and the ``gradients`` of the total.
    """
    import os

    from mindspeed.training import data, resolve_data, setup
    from mindspeed.training.configs import transformer_config
    from mindspeed.training.initialize import prepare
    from mindspeed.training.model import build_modules, gpt_model

    args = prepare([*TINY, *flags], int(os.environ["WORLD_SIZE"])).args
    setup.initialize(args)
    tokenizer = resolve_data.load_tokenizer(args)
    config = transformer_config(args)
    (model,) = build_modules(args, config, gpt_model)
    rows = data.build_datasets(args, config, tokenizer).train
    items = [rows[index] for index in range(count)]
    samples = [sample for item in items for sample in _samples(item)]
    found: dict[str, Any] = {"samples": len(samples)}
    found["packed"] = _losses_and_gradients(args, model, items, packed=True)
    found["padded"] = _losses_and_gradients(args, model, samples, packed=False)
    return found


def _samples(item: dict[str, Any]) -> list[dict[str, Any]]:
    cu_seqlens = item["cu_seqlens"].tolist()
    names = [name for name in item if name != "cu_seqlens"]
    return [{name: item[name][start:end] for name in names} for start, end in pairwise(cu_seqlens)]


def _losses_and_gradients(args: Any, model: Any, items: list[Any], packed: bool) -> dict[str, Any]:
    from argparse import Namespace

    from mindspeed.training.batches import MicroBatches
    from mindspeed.training.data import Collate
    from mindspeed.training.forward_step import forward_step

    how = Namespace(**{**vars(args), "micro_batch_size": len(items), "pack_sequences": packed})
    loader = iter([Collate(0, args.seq_length, None, lambda n: n / 2)(items)])
    model.zero_grad()
    output, loss_function = forward_step(
        MicroBatches(how, loader, None, pre_process=True, post_process=True), model
    )
    total, _, _ = loss_function(output)
    total.backward()
    mask = loss_function.args[0].reshape(-1) == 1
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {
        "losses": output.detach().reshape(-1)[mask],
        "total": total.detach(),
        "gradients": gradients,
    }


def transformers_step(prefix: str, folder: str, samples: int) -> tuple[float, float]:
    """Loss and gradient norm of transformers on the first samples, in fp64.

    The loss is the mean over all trained tokens of the batch; the model is written to ``folder``.
    """
    import torch
    import transformers

    from mindspeed.data.instruction_dataset import InstructionFiles

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=176,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder)
    model = model.double()
    files = InstructionFiles(prefix)
    total = torch.zeros((), dtype=torch.float64)
    count = 0
    for sample in map(files.__getitem__, range(samples)):
        ids, labels = (
            torch.from_numpy(part.astype("int64")) for part in (sample.ids, sample.labels)
        )
        logits = model(ids[None]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")
        count += sample.num_trained
    loss = total / count
    loss.backward()
    norms = torch.stack([parameter.grad.norm() for parameter in model.parameters()])
    return float(loss.detach()), float(norms.norm())
