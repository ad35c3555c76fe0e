"""Bad inputs for every command: flags, recipes, JSON and files, from one seed.

    numbers      every number of every command, out of its range
    choices      every choice, with a word that is none
    words        every text and path, with what people and attackers type there
    mixtures     one to three flags of the trainer at once, each value allowed for itself
    structures   recipes, DeepSpeed's, config.json, adapters, tokenizers: a value of another kind, a
                 key less, a key more
    bytes        any of the files cut off, flipped, replaced by something else

A case says whether it must be refused; where it need not, it may also be accepted, but never end
in a traceback, in a signal or without a word.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TINY = [
    "--num-layers",
    "2",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "2",
    "--seq-length",
    "8",
    "--lr",
    "1e-3",
    "--train-iters",
    "1",
    "--mock-data",
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    "31",
]
DRY = ["pretrain", *TINY, "--dry-run"]
RECIPE = """
model: {num_layers: 2, hidden_size: 16, num_attention_heads: 2, swiglu: true}
parallel: {tensor_model_parallel_size: 1}
optimizer: {lr: 0.001, clip_grad: 1.0}
data: {seq_length: 8, mock_data: true, tokenizer_type: NullTokenizer, vocab_size: 31}
training: {train_iters: 1, micro_batch_size: 2}
lora: {lora_target_modules: [q_proj]}
"""
DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 8},
    "zero_optimization": {"stage": 1},
}
WORDS = (
    *("", " ", ".", "..", "/", "/proc/x", "/etc/passwd", "/etc/passwd/x", "nope", "/dev/null", "~"),
    *("a\nb", "a" * 300, "b" * 5000, "hf:", "hf:nope", "hf:/dev/null", "-1", "--", "\u202e", "%s"),
    *(
        "$(reboot)",
        "../../../../etc/shadow",
        "{}",
        "[]",
        "null",
        "nan",
        "1e400",
        ",",
        ":",
        "=",
        "*",
    ),
    *("a b", "\udcff", "\x1b[2J", "model", "corpus.jsonl", "model/config.json"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 10**12, 10**400, 0.5, -0.5, math.nan, math.inf, "", "x", "0"),
    *([], {}, [None], [[]], {"a": 1}, "\udcff", "9" * 5000),
)
# Values of Python's that make no sense for a size, whatever its declared range says.
NO_SIZE = ("0", "-1", "-7", "nan", "inf", "1e400", "1.5", "x", "", "9" * 5000, "0x10", "--", "[1]")
SIZES = (
    *("num-layers", "hidden-size", "num-attention-heads", "seq-length", "micro-batch-size"),
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"),
    *("expert-model-parallel-size", "global-batch-size", "train-iters", "ffn-hidden-size"),
    *("kv-channels", "num-experts", "make-vocab-size-divisible-by", "log-interval"),
)
# Found by hand; each once was a traceback, a crash or a silent success.
KNOWN_DRY = (
    *("--adam-beta1 2", "--clip-grad -1", "--loss-scale nan", "--rotary-base inf", "--seed -1"),
    *("--hidden-dropout 2", "--attention-dropout 1e400", "--init-method-std nan", "--lr nan"),
    *("--recompute-granularity full", "--pipeline-model-parallel-layout xyz"),
    *("--moe-router-topk 9 --num-experts 2", "--kv-channels 7 --position-embedding-type rope"),
    *("--padded-vocab-size 5", "--hierarchical-context-parallel-sizes 2", "--eval-interval 0"),
    *("--nccl-communicator-config-path /x", "--num-workers -1", "--distributed-timeout-minutes 0"),
    "--recompute-num-layers 99 --recompute-granularity full --recompute-method uniform",
    *("--save /etc/passwd", "--save /etc/passwd/x", "--tensorboard-dir /etc/passwd", "--save ''"),
    *("--metrics-file .", "--config-logger-dir /etc/passwd/x"),
)
KNOWN: tuple[tuple[str, ...], ...] = (
    ("pretrain", *TINY, "--save", "/proc/x"),
    ("pretrain", *TINY, "--nproc", "1000000"),
    ("convert", "--input", "model", "--output", "/proc/x"),
    ("convert", "--input", "model", "--output", "out", "--max-shard-size", "nan"),
    ("convert", "--input", "model", "--output", "out", "--added-token-num", "99999999999"),
    ("tokenizer", "--input", "corpus.jsonl", "--vocab-size", "300", "--output", "/proc/x"),
    ("preprocess", "--input", "corpus.jsonl", "--tokenizer-model", "model", "--output-prefix", ""),
    (
        "preprocess",
        "--input",
        "corpus.jsonl",
        "--tokenizer-model",
        "model",
        "--output-prefix",
        "/proc/x",
    ),
    ("generate", "--load", "hf:model", "--prompt", "a", "--tp", "0"),
    ("generate", "--load", "hf:model", "--prompt", "a", "--tp", "-1"),
    ("generate", "--load", "a" * 5000, "--prompt", "a"),
    ("attention", "plan", "--seq-length", "64", "--cp", "2", "--plot", "/proc/x.png"),
    ("doctor", "--security", "nope"),
    ("plot", "nope"),
)
FLAGS_BY_COMMAND: dict[str, list[str]] = {
    "tokenizer": ["--input", "corpus.jsonl", "--vocab-size", "300", "--output", "out"],
    "preprocess": ["--input", "corpus.jsonl", "--tokenizer-model", "model", "--output-prefix", "p"],
    "convert": ["--input", "model", "--output", "out"],
    "export": ["--load", "nope", "--output", "out"],
    "verify": ["--load", "nope", "--hf", "model", "--input", "corpus.jsonl"],
    "merge-lora": ["--load", "hf:model", "--lora-load", "adapter", "--save", "out"],
    "generate": ["--load", "hf:model", "--prompt", "a", "--max-new-tokens", "1"],
    "chat": ["--load", "hf:model", "--prompt-type", "chatml", "--max-new-tokens", "1"],
    "serve": ["--load", "nope"],
    "evaluate": ["--load", "hf:model", "--task", "boolq", "--task-data-path", "boolq"],
    "plot": ["metrics.jsonl"],
    "attention": ["plan", "--seq-length", "64", "--cp", "2"],
    "pipeline": ["plan", "--pp", "2", "--microbatches", "4", "--schedule", "1f1b"],
    "moe": ["plan", "--model", "mixtral-8x7b", "--ep", "2"],
    "quickstart": ["--workdir", "work"],
    "corpus": ["--output", "docs"],
    "features": [],
    "ops": [],
    "patches": [],
    "doctor": [],
    "models": [],
    "recipes": [],
}
_NEVER_RUN = ("quickstart", "corpus", "serve")  # they would work for minutes, or for ever


@dataclass(frozen=True)
class Case:
    """One command line.

    Attributes:
        kind: of which part of the generator.
        argv: what follows ``mindspeed``; paths are relative to the directory of the case.
        refused: whether it must fail.
        files: files that are not those of the good inputs: path -> content.
        env: additional environment variables.
    """

    kind: str
    argv: tuple[str, ...]
    refused: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


def known() -> list[Case]:
    """The cases that were found by hand.

    Of sizes and wrong values a third of the pairs, every size with four or five of the values and
    every value with five or six of the sizes: all sizes are read by one function.
    """
    cases = [
        Case("size", (*DRY, f"--{size}={value}"), True)
        for row, size in enumerate(SIZES)
        for column, value in enumerate(NO_SIZE)
        if (row + column) % 3 == 0
    ]
    for text in KNOWN_DRY:
        words = [word.strip("'") for word in text.split()]
        cases.append(Case("known", (*DRY, *words), True))
    return cases + [Case("known", argv, True) for argv in KNOWN]


def generated(good: Mapping[str, bytes], seed: int) -> Iterator[Case]:
    """Endless bad inputs.

    Args:
        good: the good input files, by path.
        seed: of all choices.
    """
    draw = random.Random(seed)
    trainer = _Trainer()
    commands = {name: _parser_of(name) for name in FLAGS_BY_COMMAND}
    makers: list[tuple[int, Callable[[], Case | None]]] = [
        (5, lambda: trainer.number(draw)),
        (2, lambda: trainer.choice(draw)),
        (4, lambda: trainer.word(draw)),
        (8, lambda: trainer.mixture(draw)),
        (5, lambda: _number(draw, commands)),
        (5, lambda: _word(draw, commands)),
        (4, lambda: _recipe(draw)),
        (2, lambda: _deepspeed(draw)),
        (6, lambda: _structure(draw, good)),
        (6, lambda: _bytes(draw, good)),
    ]
    weights = [weight for weight, _ in makers]
    while True:
        (_, make), *_ = draw.choices(makers, weights)
        if (case := make()) is not None:
            yield case


class _Trainer:
    """The flags of ``mindspeed pretrain``."""

    def __init__(self) -> None:
        from mindspeed.ranges import range_of
        from mindspeed.training.arguments import build_parser
        from mindspeed.training.flag_types import Ignored, Switch

        actions = [
            action
            for action in build_parser()._actions
            if action.option_strings and action.dest not in ("help", "nproc", "config", "dry_run")
            and not isinstance(action, Ignored)
        ]  # fmt: skip
        self.numbers = [action for action in actions if range_of(action)]
        self.switches = [action for action in actions if isinstance(action, Switch)]
        self.choices = [action for action in actions if action.choices]
        rest = {id(a) for a in (*self.numbers, *self.switches, *self.choices)}
        self.texts = [a for a in actions if id(a) not in rest and a.nargs != 0]

    def number(self, draw: random.Random) -> Case:
        action = draw.choice(self.numbers)
        return Case("number", (*DRY, _assigned(draw, action, _outside(draw, action))), True)

    def choice(self, draw: random.Random) -> Case:
        action = draw.choice(self.choices)
        word = draw.choice([word for word in WORDS if word not in map(str, action.choices)])
        return Case("choice", (*DRY, _assigned(draw, action, word)), True)

    def word(self, draw: random.Random) -> Case:
        action = draw.choice(self.texts)
        return Case("word", (*DRY, _assigned(draw, action, draw.choice(WORDS))))

    def mixture(self, draw: random.Random) -> Case:
        words = []
        for _ in range(draw.randint(1, 3)):
            action = draw.choice((*self.numbers, *self.switches, *self.choices))
            if action in self.switches:
                words.append(draw.choice(action.option_strings))
            elif action in self.choices:
                words.append(_assigned(draw, action, str(draw.choice(list(action.choices)))))
            else:
                words.append(_assigned(draw, action, _inside(draw, action)))
        return Case("mixture", (*DRY, *words))


def _assigned(draw: random.Random, action: argparse.Action, value: str) -> str:
    name = draw.choice([name for name in action.option_strings if name.startswith("--")])
    return f"{name}={value}"


def _outside(draw: random.Random, action: argparse.Action) -> str:
    from mindspeed.ranges import range_of

    limits = range_of(action)
    assert limits is not None
    tried = [limits.low - 1, limits.high + 1, math.nan, math.inf, -math.inf, -(10**30)]
    return str(draw.choice([*(value for value in tried if limits.problem(value)), "x", ""]))


def _inside(draw: random.Random, action: argparse.Action) -> str:
    from mindspeed.ranges import range_of, whole_number

    limits = range_of(action)
    assert limits is not None
    tried = [
        limits.low,
        limits.high,
        0,
        1,
        2,
        3,
        7,
        8,
        16,
        100,
        4096,
        2**31 - 1,
        0.1,
        0.5,
        1e-30,
        1e30,
    ]
    whole = getattr(action.type, "convert", None) is whole_number or action.nargs == "+"
    fitting = [v for v in tried if not limits.problem(v) and (not whole or v == int(v))]
    value = draw.choice(fitting)
    return str(int(value)) if whole else str(value)


def _parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(command)
    module = importlib.import_module(f"mindspeed.cli.{command.replace('-', '_')}")
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    return parser


def _number(draw: random.Random, parsers: Mapping[str, argparse.ArgumentParser]) -> Case | None:
    from mindspeed.ranges import range_of

    command = draw.choice(list(parsers))
    numbers = [a for a in parsers[command]._actions if range_of(a) and a.option_strings]
    if not numbers:
        return None
    action = draw.choice(numbers)
    words = (command, *FLAGS_BY_COMMAND[command], _assigned(draw, action, _outside(draw, action)))
    return Case("number", words, True)


def _word(draw: random.Random, parsers: Mapping[str, argparse.ArgumentParser]) -> Case | None:
    command = draw.choice([name for name in parsers if name not in _NEVER_RUN])
    texts = [
        action
        for action in parsers[command]._actions
        if action.option_strings and action.nargs != 0 and action.dest != "help"
    ]
    if not texts:
        return None
    action, word = draw.choice(texts), draw.choice(WORDS)
    if (command, word) == ("doctor", "/"):  # an audit of the whole disk is right, and long
        return None
    return Case("word", (command, *FLAGS_BY_COMMAND[command], _assigned(draw, action, word)))


def _recipe(draw: random.Random) -> Case:
    import yaml

    recipe = yaml.safe_load(RECIPE)
    if draw.random() < 0.3:
        content, refused = _damaged(draw, RECIPE.encode()), False
    elif draw.random() < 0.2:
        line = draw.choice(["model: {}", "x: 1", "training: {seed: 010}", "training: {seed: 1:30}"])
        content, refused = f"{RECIPE}\n{line}".encode(), True
    else:
        _change(draw, recipe)
        content, refused = _dumped(recipe).encode("utf-8", "surrogatepass"), False
    words = ("pretrain", "--config", "recipe.yaml", "--dry-run")
    return Case("recipe", words, refused, {"recipe.yaml": content})


def _dumped(value: Any) -> str:
    """JSON is YAML, but for the words of numbers that are none."""
    text = json.dumps(value, ensure_ascii=False) if not _long(value) else "{a: " + "9" * 5000 + "}"
    return text.replace("NaN", ".nan").replace("-Infinity", "-.inf").replace("Infinity", ".inf")


def _long(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_long, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int) and abs(value) > 10**300


def _deepspeed(draw: random.Random) -> Case:
    config = copy.deepcopy(DEEPSPEED)
    _change(draw, config)
    content = _damaged(draw, _json(config)) if draw.random() < 0.3 else _json(config)
    return Case("deepspeed", (*DRY, "--deepspeed_config", "ds.json"), False, {"ds.json": content})


def _json(value: Any) -> bytes:
    if _long(value):
        return b'{"a": ' + b"9" * 5000 + b"}"
    return json.dumps(value).encode()


PREPROCESS = (
    *("preprocess", "--input", "corpus.jsonl", "--tokenizer-model", "model"),
    *("--output-prefix", "p"),
)
# File -> command lines that read it.
READERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "model/config.json": (
        ("convert", "--input", "model", "--output", "out"),
        ("pretrain", "--model", "model", *TINY[6:], "--dry-run"),
        ("generate", "--load", "hf:model", "--prompt", "a", "--max-new-tokens", "1"),
    ),
    "model/generation_config.json": (
        ("generate", "--load", "hf:model", "--prompt", "a", "--max-new-tokens", "1"),
    ),
    "model/tokenizer.json": (
        PREPROCESS,
        ("generate", "--load", "hf:model", "--prompt", "a", "--max-new-tokens", "1"),
    ),
    "model/tokenizer_config.json": (
        PREPROCESS,
        ("chat", "--load", "hf:model", "--hf-chat-template", "--max-new-tokens", "1"),
    ),
    "model/model.safetensors": (("convert", "--input", "model", "--output", "out"),),
    "adapter/adapter_config.json": (
        ("merge-lora", "--load", "hf:model", "--lora-load", "adapter", "--save", "out"),
        (*DRY, "--load", "hf:model", "--lora-load", "adapter"),
    ),
    "adapter/adapter_model.safetensors": (
        ("merge-lora", "--load", "hf:model", "--lora-load", "adapter", "--save", "out"),
    ),
    "corpus.jsonl": (
        PREPROCESS,
        ("tokenizer", "--input", "corpus.jsonl", "--vocab-size", "300", "--output", "out"),
    ),
    "boolq/dev.jsonl": (
        ("evaluate", "--load", "hf:model", "--task", "boolq", "--task-data-path", "boolq"),
    ),
    "metrics.jsonl": (("plot", "metrics.jsonl"),),
    "template.yaml": (
        ("chat", "--load", "hf:model", "--prompt-type", "template.yaml", "--max-new-tokens", "1"),
    ),
    "template.jinja": (
        ("chat", "--load", "hf:model", "--prompt-type", "template.jinja", "--max-new-tokens", "1"),
    ),
    "params.json": (
        (*PREPROCESS, "--hf-datasets-params", "params.json"),
    ),
    "data.parquet": (
        (*PREPROCESS, "--input", "data.parquet"),
    ),
    "settings.yaml": ((*DRY, "--micro-batch-size", "1"),),
}  # fmt: skip


def _read(draw: random.Random, name: str, content: bytes) -> Case:
    env = {"MINDSPEED_CONFIG": name} if name == "settings.yaml" else {}
    return Case(name, draw.choice(READERS[name]), False, {name: content}, env)


def _structure(draw: random.Random, good: Mapping[str, bytes]) -> Case:
    """A JSON file, or a line of one, with another value."""
    name = draw.choice([name for name in READERS if ".json" in name])
    lines = name.endswith(".jsonl")
    parts = good[name].decode().splitlines() if lines else [good[name].decode()]
    at = draw.randrange(len(parts))
    value = json.loads(parts[at])
    for _ in range(draw.randint(1, 2)):
        _change(draw, value)
    parts[at] = _json(value).decode()
    return _read(draw, name, "\n".join(parts).encode())


def _bytes(draw: random.Random, good: Mapping[str, bytes]) -> Case:
    name = draw.choice(list(READERS))
    return _read(draw, name, _damaged(draw, good[name]))


def _change(draw: random.Random, tree: Any) -> None:
    """Replace, remove or add one value at any depth."""
    value = copy.deepcopy(draw.choice(VALUES))  # the next change may be inside of it
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = draw.choice(keys)
        if not (isinstance(tree[key], dict | list) and tree[key]) or draw.random() < 0.3:
            break
        tree = tree[key]
    action = draw.random()
    if action < 0.7:
        tree[key] = value
    elif action < 0.85:
        del tree[key]
    elif isinstance(tree, dict):
        tree[draw.choice(["x", "", "__class__", "num_layers"])] = value
    else:
        tree.append(value)


def _damaged(draw: random.Random, content: bytes) -> bytes:
    at = draw.randrange(len(content)) if content else 0
    kinds: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: content[:at],
        lambda: content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :],
        lambda: content[:at] + b"\xff\xfe" + content[at:],
        lambda: content + content,
        lambda: b"[" * 20_000,
        lambda: b"\0" * 64,
        lambda: b"\x89PNG\r\n" + content,
        lambda: draw.randbytes(64),
        lambda: content.replace(b"\n", b"\r"),
        lambda: b"null",
        lambda: b"[1, 2]",
        lambda: b"PAR1" + b"x" * 20,
        lambda: b"PK\x03\x04" + content,
        lambda: b"\x1f\x8b" + content,
        lambda: b'{"a":1}' + content,
    ]
    return draw.choice(kinds)()
