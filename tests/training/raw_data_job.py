"""Runs of ``mindspeed finetune --data`` in a process of the pool."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = ["tensor", "rank", "learns", "gradient", "from", "small", "data", "and", "large", "text"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: str) -> None:
    """A LLaMA of one layer with a tokenizer of one token a byte, and ChatML as its template."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = hf.LlamaConfig(
        vocab_size=320, num_attention_heads=2, max_position_embeddings=256, **sizes
    )
    hf.LlamaForCausalLM(config).save_pretrained(folder)


def write_conversations(path: Path, count: int = 64) -> None:
    """Questions and answers of some words, with a column that nothing reads."""
    lines = []
    for i in range(count):
        asked = [WORDS[(i * k) % len(WORDS)] for k in range(1, 3 + i % 7)]
        messages = [
            {"role": "user", "content": " ".join(asked)},
            {"role": "assistant", "content": " ".join(reversed(asked))},
        ]
        lines.append(json.dumps({"messages": messages, "source": "invented"}))
    path.write_text("\n".join(lines) + "\n")


def command(words: Sequence[str]) -> tuple[int, str]:
    """``mindspeed WORDS``: status and messages."""
    from mindspeed.cli.main import main

    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        status = main(list(words))
    return status, errors.getvalue()


def prepared(words: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Final values of ``mindspeed finetune WORDS``, and its messages."""
    import mindspeed.megatron_adaptor  # noqa: F401
    from mindspeed.cli.finetune import DEFAULTS
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.initialize import prepare

    parser, errors = build_parser(), io.StringIO()
    parser.set_defaults(**DEFAULTS)
    with contextlib.redirect_stderr(errors):
        settings = prepare(words, 1, parser=parser)
    plain = {
        k: v
        for k, v in vars(settings.args).items()
        if isinstance(v, bool | int | str | float | tuple | None)
    }
    return plain | {"recipe": settings.recipe}, errors.getvalue()


def printed(words: Sequence[str]) -> str:
    """What ``mindspeed WORDS`` prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert command(words)[0] == 0
    return output.getvalue()


def helped(flags: Sequence[str], command: str = "finetune") -> dict[str, str]:
    """What ``mindspeed COMMAND`` prints for each of several flags."""
    import os

    from mindspeed.cli.main import main

    os.environ["COLUMNS"] = "80"
    found = {}
    for words in flags:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            main([command, *words.split()])
        found[words] = output.getvalue()
    return found


def assumed_directory(folder: str, resume: bool) -> str:
    """Where a run in a folder would save, or why it does not start."""
    import argparse
    import os

    import mindspeed.megatron_adaptor  # noqa: F401
    from mindspeed.errors import ConfigError
    from mindspeed.training.raw_data import _assume_directory, _Flags

    args = argparse.Namespace(load="hf:models/tiny-1.5b", auto_resume=resume)
    flags, here = _Flags(args, ()), os.getcwd()
    os.chdir(folder)
    try:
        _assume_directory(flags, "chat.jsonl.gz", dry_run=False)
    except ConfigError as error:
        return str(error)
    finally:
        os.chdir(here)
    return flags.args.save
