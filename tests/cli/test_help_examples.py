"""The examples in the help of planning commands: every one is a job that starts."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from mindspeed.cli import explain, plan
from mindspeed.models.presets import presets

RECIPE = """
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4}
data: {seq_length: 32, tokenizer_type: NullTokenizer, vocab_size: 99}
training: {micro_batch_size: 1, global_batch_size: 64, train_iters: 1}
optimizer: {lr: 0.001}
"""


def examples(module: ModuleType) -> list[list[str]]:
    """The words behind ``mindspeed`` of each example; ``...`` stands for required flags."""
    text = (inspect.getdoc(module) or "").replace("\\\n", " ")
    lines = re.findall(r"^    mindspeed (.*)$", text, re.MULTILINE)
    required = "--bf16 --seq-length 4096 --global-batch-size 64"
    return [shlex.split(line.replace("...", required)) for line in lines]


def names() -> list[str]:
    return [shlex.join(words) for module in (plan, explain) for words in examples(module)]


@pytest.mark.parametrize("line", names())
def test_an_example_is_a_job_that_starts(line: str, ranks, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(RECIPE)
    folder = tmp_path / "models/my-model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(presets()["qwen3-0.6b"].config)))
    words = shlex.split(line)
    [devices] = ranks(1, start, words, str(tmp_path), setup="tests.support.warm", backend=None)
    assert devices and all(number >= 1 for number in devices)


def start(words: Sequence[str], directory: str) -> list[int]:
    """Start the jobs that a command would plan.

    Returns:
        Their numbers of ranks.
    """
    from mindspeed.planner.question import PURPOSES, job_words, named_model
    from mindspeed.planner.scripts import job_of

    before = Path.cwd()
    os.chdir(directory)
    try:
        command = {"plan": plan, "explain": explain}[words[0]]
        parser = plan.job_parser(words[0], None)
        command.add_arguments(parser)
        model = words[1] if not words[1].startswith("-") else None
        own, flags = plan.read(parser, words[2 if model else 1 :])
        plan.use_machine(own)
        devices = own.on[1] if own.on else own.devices
        devices = devices[0] if isinstance(devices, tuple) else devices
        if model is None:
            return [job_of(flags).settings(None, devices).args.world_size]
        name, sizes = named_model(model)
        found = []
        for purpose in own.purposes or PURPOSES:
            _, job = job_words(PURPOSES[purpose], name, sizes, flags, devices)
            found.append(job_of(job).settings(None, devices).args.world_size)
        return found
    finally:
        os.chdir(before)
