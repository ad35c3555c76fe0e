"""Checks the commands of example scripts inside a rank, where Megatron is behind the adaptor."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SETUP = "tests.support.warm"

SMALL = [
    *["--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "176"],
    *["--num-attention-heads", "4", "--kv-channels", "16", "--seq-length", "32"],
    *["--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "2"],
    *["--pipeline-model-parallel-size", "1", "--log-interval", "1", "--no-progress-bar"],
]


def check(commands: Mapping[str, Sequence[str]]) -> dict[str, str | None]:
    """What is wrong with each command; None if it would start."""
    return {name: _problem(words) for name, words in commands.items()}


def _problem(words: Sequence[str]) -> str | None:
    from mindspeed.errors import MindSpeedError

    try:
        if words[0] == "torchrun":
            _check_training(words)
        else:
            _check_use(words[1], words[2:])
    except MindSpeedError as error:
        return str(error)
    return None


def _check_training(words: Sequence[str]) -> None:
    """A dry run on as many ranks as torchrun was to start."""
    from mindspeed.training.initialize import prepare

    script, flags = training_flags(words)
    assert Path(script).is_file(), script
    ranks = int(words[words.index("--nnodes") + 1]) * int(
        words[words.index("--nproc-per-node") + 1]
    )
    prepare([*flags, "--dry-run"], ranks)


def training_flags(words: Sequence[str]) -> tuple[str, list[str]]:
    """Script and its flags of a torchrun command."""
    at = next(index for index, word in enumerate(words) if word.endswith(".py"))
    return words[at], list(words[at + 1 :])


def _check_use(command: str, words: Sequence[str]) -> None:
    """Parse the command and cut the model as it asks."""
    from mindspeed.inference.load import Source, resolve_source

    module = importlib.import_module(f"mindspeed.cli.{command}")
    parser = argparse.ArgumentParser(command)
    module.add_arguments(parser)
    args = parser.parse_args(words)
    resolve_source(Source(args.load, None, args.tp, args.pp), args.tp * args.pp)


def train_two_steps(words: Sequence[str], flags: Sequence[str]) -> dict[str, Any]:
    """Run a pretraining command with a small model and invented data."""
    from mindspeed.training.initialize import prepare
    from mindspeed.training.pretrain import pretrain

    given = training_flags(words)[1]
    given.remove("--auto-resume")
    for name in ("--data-path", "--tokenizer-name-or-path", "--tokenizer-type", "--save"):
        given = without(given, name)
    given = [*without(given, "--save-interval"), *SMALL, *flags]
    given += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "500"]
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        settings = prepare([*given, "--metrics-file", str(metrics)], int(os.environ["WORLD_SIZE"]))
        iteration = pretrain(settings)
        lines = metrics.read_text().splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    losses = [record["lm_loss"] for record in records if "lm_loss" in record]
    return {"iteration": iteration, "losses": losses}


def train_and_digest(flags: Sequence[str]) -> str:
    """Train; a hash of this rank's parameters."""
    from mindspeed.training.initialize import prepare
    from mindspeed.training.model import gpt_model
    from mindspeed.training.pretrain import pretrain
    from tests.support.trainer_job import digest

    stages = []

    def provider(*given: Any) -> Any:
        stages.append(gpt_model(*given))
        return stages[-1]

    pretrain(prepare(flags, int(os.environ["WORLD_SIZE"])), provider)
    return digest(stages)


def without(words: Sequence[str], name: str) -> list[str]:
    """A command line without a flag and its value."""
    at = words.index(name)
    return [*words[:at], *words[at + 2 :]]
