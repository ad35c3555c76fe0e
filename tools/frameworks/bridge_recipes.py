"""Train with a recipe of Megatron-Bridge and its training loop, in fp32, from a tiny model.

python bridge_recipes.py import MODEL
torchrun --nproc_per_node 2 bridge_recipes.py pretrain MODEL --layout tensor_model_parallel_size=2

A recipe loads configuration and tokenizer of a model by its name on the hub. ``import`` puts MODEL
there, in the cache of ``HF_HOME``, and writes Megatron's checkpoint of its weights; the others
start from that. Both need ``HF_HUB_OFFLINE=1``. Losses and gradient norms are in the log.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

import mindspeed.megatron_adaptor  # noqa: F401 (before anything of Megatron)
from mindspeed import device

device.treat_as_megatron("megatron.bridge")

NAME = "Qwen/Qwen3-0.6B"
"""Of the model on the hub, in the recipes below."""
LENGTH, STEPS, RATE = 64, 3, 1e-3
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
        for number in range(16):
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
    config.train.global_batch_size, config.train.micro_batch_size = 4, 1
    config.optimizer.lr = config.optimizer.min_lr = RATE
    config.scheduler.lr_warmup_iters = 0
    config.checkpoint.save = config.checkpoint.load = None
    config.checkpoint.pretrained_checkpoint = str(home / "megatron")
    config.logger.log_interval, config.logger.tensorboard_dir = 1, None
    return config


def train(kind: str, home: Path, layout: dict[str, int]) -> None:
    """Run the training loop."""
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    config = recipe(kind, home)
    for name, size in layout.items():
        setattr(config.model, name, size)
    config.model.sequence_parallel = config.model.tensor_model_parallel_size > 1
    {"pretrain": pretrain, "finetune": finetune}[kind](config, forward_step)


def main() -> None:
    """Import a model, or train it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kind", choices=["import", "pretrain", "finetune"])
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model")
    parser.add_argument("--layout", nargs="*", default=[], metavar="SIZE=N")
    args = parser.parse_args()
    home = Path(os.environ["HF_HOME"])
    if args.kind == "import":
        import_model(args.model, home)
    else:
        pairs = (pair.split("=") for pair in args.layout)
        train(args.kind, home, {name: int(size) for name, size in pairs})


if __name__ == "__main__":
    main()
