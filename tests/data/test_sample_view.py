"""Samples are shown as the model sees them: special tokens, and what is trained."""

from __future__ import annotations

import io

import numpy as np
from rich.console import Console

from mindspeed.data.loss_mask import IGNORED, TokenizedConversation
from mindspeed.data.preprocess_report import MOST_CHARACTERS, TRAINED, decoded, print_samples


class Letters:
    """Token n is the n-th letter; token 0 ends a text and is left out when it is decoded."""

    def detokenize(self, ids):
        return "".join(chr(96 + one) for one in ids if one)

    def piece(self, token):
        return "<end>" if token == 0 else None


def sample(ids, trained):
    ids = np.array(ids, np.int32)
    return TokenizedConversation(ids, np.where(np.array(trained, bool), ids, IGNORED))


def shown(one, **options):
    file = io.StringIO()
    print_samples([one], Letters(), Console(file=file, width=80, **options))
    return file.getvalue()


def test_trained_tokens_have_a_style_and_special_ones_are_there():
    text = decoded(sample([1, 2, 3, 0, 4, 0], [0, 1, 1, 1, 0, 1]), Letters())
    assert text.plain == "abc<end>d<end>"
    marked = [text.plain[span.start : span.end] for span in text.spans if span.style == TRAINED]
    assert marked == ["bc<end>", "<end>"]


def test_without_colours_what_is_trained_is_in_brackets():
    text = shown(sample([1, 2, 3], [0, 1, 0]))
    assert text == "sample 1: 3 tokens, 1 of them trained\na\u27e6b\u27e7c\n"
    assert "\u27e6" not in shown(sample([1, 2], [0, 1]), force_terminal=True)


def test_samples_without_or_with_trained_tokens_alone_and_long_ones():
    assert shown(sample([1, 2], [0, 0])).endswith("\nab\n")
    assert shown(sample([1, 2], [1, 1])).endswith("\n\u27e6ab\u27e7\n")
    assert shown(sample([], [])).startswith("sample 1: 0 tokens")
    long = shown(sample([1] * (2 * MOST_CHARACTERS), [0] * (2 * MOST_CHARACTERS)))
    assert "[...]" in long and long.count("a") < MOST_CHARACTERS + 10
