"""Tokens/s of the quickstart model: our trainer against a Hugging Face Trainer-style loop.

    python benchmarks/quickstart_vs_hf.py [--rounds 12] [--threads 1] [--json out.json]

One process, the same shape (LlamaForCausalLM with equal parameters), the same batches of 16 x 128
tokens from the same GPTDataset, AdamW, gradient clipping, a learning rate schedule and the loss
read by the host. The loops take turns in short rounds, so that other load on the machine meets
both; the figure is the ratio of the medians. The Hugging Face side has what its Trainer uses by
default: scaled-dot-product attention, fused AdamW, a DataLoader.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STEPS_PER_ROUND = 4
WARM_UP_ROUNDS = 2


def main() -> None:
    """Measure, print the ratio, write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options, Path(folder))
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds per step of both loops, wall and CPU, and the ratios."""
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)

    args, model, sets, tokenizer = _prepare(options, folder)
    loops = {"ours": _our_step(args, model, sets, tokenizer), "hugging_face": _hf_step(args, sets)}
    wall: dict[str, list[float]] = {name: [] for name in loops}
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    for round_ in range(options.rounds + WARM_UP_ROUNDS):
        for name, step in loops.items():
            start = time.perf_counter(), time.process_time()
            for _ in range(STEPS_PER_ROUND):
                step()
            if round_ >= WARM_UP_ROUNDS:
                wall[name].append((time.perf_counter() - start[0]) / STEPS_PER_ROUND)
                cpu[name].append((time.process_time() - start[1]) / STEPS_PER_ROUND)
    tokens = args.global_batch_size * args.seq_length
    figures: dict[str, Any] = {"threads": options.threads, "tokens_per_step": tokens}
    for clock, seconds in (("wall", wall), ("cpu", cpu)):
        middle = {name: statistics.median(values) for name, values in seconds.items()}
        for name, value in middle.items():
            figures[f"{name}_tokens_per_{clock}_second"] = round(tokens / value, 1)
        figures[f"ratio_{clock}"] = round(middle["hugging_face"] / middle["ours"], 3)
    return figures


def _prepare(options: argparse.Namespace, folder: Path) -> tuple[Any, Any, Any, Any]:
    """Arguments, our model, data and tokenizer, as ``mindspeed pretrain`` makes them."""
    import torch

    from mindspeed import recipes, session
    from mindspeed.data.preprocess import PreprocessOptions, preprocess
    from mindspeed.data.quickstart_corpus import write_python_docs
    from mindspeed.data.tokenizer import save_tokenizer, train_bpe
    from mindspeed.data.tokenizer_types import TokenizerOptions
    from mindspeed.training import data, resolve_data, setup
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.model import build
    from mindspeed.training.pretrain import count_batches
    from mindspeed.training.recipe import parse_with_recipe
    from mindspeed.training.resolve import resolve

    torch.set_num_threads(options.threads)
    corpus = write_python_docs(folder / "corpus.jsonl").path
    with open(corpus, "rb") as file:
        save_tokenizer(train_bpe((json.loads(line)["text"] for line in file), 2048), folder / "tok")
    tokenizer = TokenizerOptions(tokenizer_model=str(folder / "tok"))
    report = preprocess(PreprocessOptions((corpus,), folder / "c", tokenizer, append_eod=True))
    flags = {
        "config": recipes.path("quickstart"),
        "data-path": report.outputs[0],
        "tokenizer-model": folder / "tok",
        "tensor-model-parallel-size": 1,
        "pipeline-model-parallel-size": 1,
        "micro-batch-size": options.micro_batch_size,
    }
    words = [f"--{name}={value}" for name, value in flags.items()]
    args = resolve(parse_with_recipe(words, build_parser()), world_size=1).args
    session.install().configure(vars(args))
    setup.initialize(args)
    loaded = resolve_data.load_tokenizer(args)
    count_batches(args)
    model = build(args)
    return args, model, data.build_datasets(args, model.config, loaded), loaded


def _our_step(
    args: argparse.Namespace, model: Any, sets: Any, tokenizer: Any
) -> Callable[[], float]:
    from mindspeed.training import data
    from mindspeed.training.forward_step import checked, forward_step, sum_reports
    from mindspeed.training.step import Trainer

    readers = data.micro_batches(args, model.config, sets.train, 0, tokenizer)
    trainer = Trainer(args, model, checked(forward_step, args, ()))
    for chunk in model.chunks:
        chunk.train()
    done = 0

    def step() -> float:
        nonlocal done
        done += 1
        losses = trainer.step(readers, done).losses
        total, tokens = sum_reports(losses)["lm loss"].tolist()
        return total / tokens

    return step


def _hf_step(args: argparse.Namespace, sets: Any) -> Callable[[], float]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

    config = LlamaConfig(
        vocab_size=args.padded_vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.ffn_hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_query_groups,
        max_position_embeddings=args.seq_length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, args.lr_warmup_iters, args.train_iters)
    loader = torch.utils.data.DataLoader(sets.train, batch_size=args.micro_batch_size)

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    source = batches()
    accumulate = args.global_batch_size // args.micro_batch_size

    def step() -> float:
        loss_sum = 0.0
        for _ in range(accumulate):
            tokens = next(source)["tokens"]
            loss = model(input_ids=tokens, labels=tokens).loss / accumulate
            loss.backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        schedule.step()
        model.zero_grad()
        return loss_sum

    return step


if __name__ == "__main__":
    main()
