"""Decoded samples with the trained tokens in colour."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
from rich.console import Console
from rich.text import Text

from mindspeed.data.loss_mask import IGNORED, Sample
from mindspeed.data.tokenizer_types import TextTokenizer

TRAINED = "bold green"
MOST_CHARACTERS = 2000
"""Longer samples are shown without their middle."""


def decoded(sample: Sample, tokenizer: TextTokenizer) -> Text:
    """The text of a sample; tokens with a label have the style :data:`TRAINED`."""
    trained = sample.labels != IGNORED
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(trained)]
    text = Text()
    for start, end in pairwise(edges):
        if start < end:
            part = _text(sample.ids[start:end].tolist(), tokenizer)
            text.append(part, TRAINED if trained[start] else "")
    return text


def _text(ids: list[int], tokenizer: TextTokenizer) -> str:
    """The text of ids with special tokens, which a tokenizer leaves out when it decodes."""
    special = {one: not tokenizer.detokenize([one]) for one in set(ids)}
    return "".join(
        "".join(tokenizer.piece(one) or "" for one in group)
        if left_out
        else tokenizer.detokenize(list(group))
        for left_out, group in groupby(ids, special.__getitem__)
    )


def print_samples(
    samples: list[Sample],
    tokenizer: TextTokenizer,
    console: Console,
    first: int = 1,
    parts: Sequence[str] = (),
) -> None:
    """Print samples, each below a line with its sizes.

    Args:
        samples: what to print.
        tokenizer: that decodes them.
        console: without colours, trained parts are in brackets.
        first: number of the first one.
        parts: names of the parts of a sample, each of which is one of ``samples``.
    """
    names = [f", {part}" for part in parts] or [""]
    for index, sample in enumerate(samples):
        count = int((sample.labels != IGNORED).sum())
        number, part = divmod(index, len(names))
        what = f"sample {first + number}{names[part]}"
        head = f"{what}: {len(sample.ids):,} tokens, {count:,} of them trained"
        console.print(Text(head, "dim"), soft_wrap=True)
        text = decoded(sample, tokenizer)
        if console.color_system is None:
            text = _bracketed(text)
        if len(text) > MOST_CHARACTERS:
            half = MOST_CHARACTERS // 2
            text = Text("\n[...]\n", "dim").join([text[:half], text[-half:]])
        console.print(text, soft_wrap=True)


def _bracketed(text: Text) -> Text:
    """The text with marks around what is trained, for files and terminals without colours."""
    plain, at, parts = text.plain, 0, []
    for span in text.spans:
        parts += [plain[at : span.start], "\u27e6", plain[span.start : span.end], "\u27e7"]
        at = span.end
    return Text("".join([*parts, plain[at:]]))
