"""Train with a recipe of Megatron-Bridge and its training loop, in fp32, from a tiny model.

python bridge_recipes.py import MODEL
torchrun --nproc_per_node 2 bridge_recipes.py pretrain MODEL --layout tensor_model_parallel_size=2
python bridge_recipes.py pretrain MODEL --plain

A recipe loads configuration and tokenizer of a model by its name on the hub. ``import`` puts MODEL
there, in the cache of ``HF_HOME``, and writes Megatron's checkpoint of its weights; the others
start from that. Both need ``HF_HUB_OFFLINE=1``. Losses and gradient norms are in the log.

``--plain`` is transformers and torch, on the batches that the last training on one rank has read.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from updates import stepped

import mindspeed.megatron_adaptor  # noqa: F401 (before anything of Megatron)
from mindspeed import device

device.treat_as_megatron("megatron.bridge")

NAME = "Qwen/Qwen3-0.6B"
"""Of the model on the hub, in the recipes below."""
LENGTH, STEPS, RATE = 64, 5, 1e-3
TOGETHER = 4
"""Sequences of a step."""
EPSILON = 1e-5
"""Without a large one the rounding of a tiny gradient decides the sign of its step."""
COMMIT = "0" * 40


def import_model(model: Path, home: Path) -> None:
    """Let the hub's cache have the model, and write Megatron's checkpoint of its weights."""
    from megatron.bridge import AutoBridge

    cached = home / "hub" / f"models--{NAME.replace('/', '--')}"
    for folder in ("refs", "snapshots"):
        (cached / folder).mkdir(parents=True)
    (cached / "refs" / "main").write_text(COMMIT)
    (cached / "snapshots" / COMMIT).symlink_to(model.absolute(), target_is_directory=True)
    with (home / "training.jsonl").open("w") as file:
        for number in range(STEPS * TOGETHER):
            words = [str((number + 1) * step % 97) for step in range(2, 10)]
            line = {"input": " ".join(words[:5]), "output": " ".join(words[5:])}
            file.write(json.dumps(line) + "\n")
    (home / "validation.jsonl").symlink_to("training.jsonl")
    AutoBridge.import_ckpt(NAME, str(home / "megatron"))


def recipe(kind: str, home: Path) -> Any:
    """The recipe, with what a tiny run in fp32 without a hub needs."""
    from megatron.bridge.recipes.qwen import qwen3_600m_pretrain_config, qwen3_600m_sft_config
    from megatron.bridge.training.config import FinetuningDatasetConfig

    if kind == "pretrain":
        config = qwen3_600m_pretrain_config()
        config.dataset.seq_length = LENGTH
        config.dataset.num_workers = 0
    else:
        config = qwen3_600m_sft_config()
        config.dataset = FinetuningDatasetConfig(
            dataset_root=home, seq_length=LENGTH, dataloader_type="batch", num_workers=0,
            do_validation=False, do_test=False,
        )  # fmt: skip
    config.model.seq_length = LENGTH
    for part in (config.model, config.optimizer):
        part.bf16, part.params_dtype = False, torch.float32
    config.model.pipeline_dtype = torch.float32
    config.mixed_precision = None
    config.dist.distributed_backend = device.current().backend
    config.train.train_iters, config.train.eval_iters = STEPS, 0
    config.train.global_batch_size, config.train.micro_batch_size = TOGETHER, 1
    config.optimizer.lr = config.optimizer.min_lr = RATE
    config.optimizer.adam_eps = EPSILON
    config.scheduler.lr_warmup_iters = 0
    config.checkpoint.save = config.checkpoint.load = None
    config.checkpoint.pretrained_checkpoint = str(home / "megatron")
    config.logger.log_interval, config.logger.tensorboard_dir = 1, None
    return config


def train(kind: str, home: Path, layout: dict[str, int]) -> None:
    """Run the training loop; one rank keeps its batches."""
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    batches: list[dict[str, Any]] = []

    def kept_step(state: Any, data_iterator: Iterator[Any], model: Any) -> Any:
        batches.append(next(data_iterator))
        return forward_step(state, iter(batches[-1:]), model)

    config = recipe(kind, home)
    for name, size in layout.items():
        setattr(config.model, name, size)
    config.model.sequence_parallel = config.model.tensor_model_parallel_size > 1
    run = {"pretrain": pretrain, "finetune": finetune}[kind]
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        run(config, forward_step)
    else:
        run(config, kept_step)
        torch.save(batches, home / f"{kind}.batches")


def plain(kind: str, home: Path, model: Path) -> None:
    """Print what transformers and torch compute, as the training loop does."""
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(
        model, attn_implementation="eager", torch_dtype=torch.float32
    )
    read = torch.load(home / f"{kind}.batches")
    steps = iter([read[i : i + TOGETHER] for i in range(0, len(read), TOGETHER)])
    losses: list[float] = []

    def loss() -> torch.Tensor:
        sums, counts = [], []
        for one in next(steps):
            logits = trained(input_ids=one["tokens"], position_ids=one["position_ids"]).logits
            each = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), one["labels"].flatten(), reduction="none"
            )
            sums.append((each * one["loss_mask"].flatten()).sum())
            counts.append(one["loss_mask"].sum())
        # Megatron's log has the mean over tokens; it trains on that of the micro-batches' means.
        losses.append((sum(sums) / sum(counts)).item())
        return torch.stack([a / b for a, b in zip(sums, counts, strict=True)]).mean()

    config = recipe(kind, home)
    matrices = [one for one in trained.parameters() if one.dim() > 1]
    vectors = [one for one in trained.parameters() if one.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.scheduler.start_weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        RATE,
        (config.optimizer.adam_beta1, config.optimizer.adam_beta2),
        EPSILON,
    )
    norms = stepped(trained, optimizer, loss, STEPS)[1::2]
    for value, norm in zip(losses, norms, strict=True):
        print(f" lm loss: {value:.6E} | grad norm: {norm:.3f} |")


def main() -> None:
    """Import a model, or train it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kind", choices=["import", "pretrain", "finetune"])
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model")
    parser.add_argument("--layout", nargs="*", default=[], metavar="SIZE=N")
    parser.add_argument("--plain", action="store_true", help="transformers and torch")
    args = parser.parse_args()
    home = Path(os.environ["HF_HOME"])
    if args.kind == "import":
        import_model(args.model, home)
    elif args.plain:
        plain(args.kind, home, args.model)
    else:
        pairs = (pair.split("=") for pair in args.layout)
        train(args.kind, home, {name: int(size) for name, size in pairs})


if __name__ == "__main__":
    main()
