"""``mindspeed verify``: compare a checkpoint with its digests, or its logits with transformers.

    mindspeed verify --checkpoint runs/my
    mindspeed verify --load runs/my --hf exported --input corpus.jsonl

The first form reads every file of a checkpoint, or of all checkpoints in a directory, and compares
its digest with the one stored at saving. The exit status is 1 if a file differs.

The second form runs two models on the same text in one process and compares their logits. The exit
status is 1 if they differ by more than ``--tolerance``. The Hugging Face directory is usually one
that ``mindspeed export`` wrote or ``mindspeed convert`` read.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed.errors import ConfigError, DataError
from mindspeed.job import Precision
from mindspeed.json_fields import read_object
from mindspeed.parsing import decode_json
from mindspeed.ranges import NOT_NEGATIVE, number, whole

if TYPE_CHECKING:
    import torch

HELP = "compare a checkpoint's files with their digests, or its logits with transformers"

TOLERANCE = {"fp32": 1e-3, "half": 0.25}  # maximum difference of a logit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="checkpoint whose files are compared with their digests",
    )
    add("--load", metavar="DIR", help="directory of checkpoints")
    add("--ckpt-step", type=whole(0), help="iteration to load (default: the latest)")
    add("--hf", type=Path, metavar="DIR", help="Hugging Face model")
    add("--input", type=Path, metavar="FILE", help="text, or jsonl with a text field")
    add("--samples", type=whole(1), default=8, help="number of sequences")
    add(
        "--tolerance",
        type=number(NOT_NEGATIVE),
        help="maximum difference of a logit (default: 0.001 in fp32, 0.25 in bf16 and fp16)",
    )


@dataclass(frozen=True)
class Comparison:
    """Comparison of two models on the same text.

    Attributes:
        largest: maximum difference of a logit.
        agreement: fraction of positions with the same argmax.
        losses: mean losses of the two models.
        tokens: number of compared positions.
    """

    largest: float
    agreement: float
    losses: tuple[float, float]
    tokens: int


def run(args: argparse.Namespace) -> int:
    """Compare files with digests, or two models with each other; print."""
    if args.checkpoint is not None:
        return _examine(args)
    if missing := [f"--{name}" for name in ("load", "hf", "input") if not getattr(args, name)]:
        raise ConfigError(
            f"{', '.join(missing)} missing: give --checkpoint DIR to compare files with their "
            "digests, or --load DIR --hf DIR --input FILE to compare two models"
        )
    return _compare_models(args)


def _examine(args: argparse.Namespace) -> int:
    if args.load or args.hf or args.input:
        raise ConfigError("--checkpoint compares files only: leave out --load, --hf and --input")
    from mindspeed.checkpoint.examine import examine

    good = True
    for finding in examine(args.checkpoint):
        good &= finding.problem is None
        print(f"{finding.path}: {finding.extent if finding.problem is None else finding.problem}")
    return 0 if good else 1


def _compare_models(args: argparse.Namespace) -> int:
    if not (args.hf / "config.json").is_file():
        raise ConfigError(f"--hf {args.hf}: not a Hugging Face model, it has no config.json")
    texts = _texts(args.input)
    from mindspeed.training.warning_filters import filter_warnings

    filter_warnings()
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.inference.load import Source, load_model

    with contextlib.redirect_stdout(sys.stderr):  # standard output is for the result alone
        loaded = load_model(Source(args.load, args.ckpt_step), 1)
    length = loaded.args.seq_length
    sequences = [ids[:length] for ids in map(loaded.tokenizer.tokenize, texts) if len(ids) > 1]
    sequences = sorted(sequences, key=len, reverse=True)[: args.samples]
    if not sequences:
        raise DataError(f"--input {args.input}: no text of two tokens or more")
    result = compare(loaded.stage, _transformers_model(args.hf, loaded), sequences)
    narrow = Precision.of(loaded.args).narrow
    tolerance = args.tolerance or TOLERANCE["half" if narrow else "fp32"]
    good = result.largest <= tolerance
    print(
        f"{result.tokens} tokens: logits differ by at most {result.largest:.2e} "
        f"({'within' if good else 'MORE than'} {tolerance:g}), same most likely token at "
        f"{result.agreement:.2%} of the positions, loss {result.losses[0]:.6f} here and "
        f"{result.losses[1]:.6f} in transformers"
    )
    return 0 if good else 1


def compare(ours: Any, theirs: Any, sequences: list[list[int]]) -> Comparison:
    """Run both models on ``sequences`` one by one.

    Args:
        ours: A whole ``GPTModel``, on one rank.
        theirs: A ``PreTrainedModel``.
        sequences: token ids.
    """
    import torch

    largest, same, count = 0.0, 0, 0
    sums = [0.0, 0.0]
    for sequence in sequences:
        here, there = _logits(ours, theirs, torch.tensor([sequence]))
        largest = max(largest, float((here - there).abs().max()))
        same += int((here.argmax(-1) == there.argmax(-1)).sum())
        count += len(sequence)
        labels = torch.tensor(sequence[1:])
        for index, logits in enumerate((here, there)):
            losses = torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
            sums[index] += float(losses)
    targets = count - len(sequences)
    return Comparison(largest, same / count, (sums[0] / targets, sums[1] / targets), count)


def _logits(ours: Any, theirs: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [tokens, vocabulary] of both models in fp32, without padding entries."""
    import torch

    with torch.inference_mode():
        device = next(ours.parameters()).device
        tokens = tokens.to(device)
        positions = torch.arange(tokens.shape[1], device=device)[None]
        here = ours(input_ids=tokens, position_ids=positions, attention_mask=None)[0].float().cpu()
        there = theirs(input_ids=tokens).logits[0].float().cpu()
    entries = min(here.shape[-1], there.shape[-1])
    return here[:, :entries], there[:, :entries]


def _transformers_model(directory: Path, loaded: Any) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("this needs transformers: pip install 'mindspeed[suite]'") from error
    from mindspeed.models.hf_files import CONFIG
    from mindspeed.models.transformers_versions import check_spelling

    check_spelling(read_object(directory / CONFIG, DataError), f"--hf {directory}")
    first = next(loaded.stage.parameters())
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=first.dtype, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise DataError(f"--hf {directory}: transformers cannot load it: {error}") from error
    return model.to(first.device).eval()


def _texts(path: Path) -> list[str]:
    """Texts of a jsonl file, or the lines of a plain one."""
    if not path.is_file():
        raise DataError(f"--input {path}: there is no such file")
    lines = path.read_text("utf-8").splitlines()
    if path.suffix != ".jsonl":
        return [line for line in lines if line.strip()]
    try:
        return [decode_json(line)["text"] for line in lines if line.strip()]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"--input {path}: lines of {{'text': ...}} are expected") from error
