"""Labels follow the characters of the answers, whatever the tokenizer and the text."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import ByteLevel

from mindspeed.data import templates
from mindspeed.data.chat_template import Rendered
from mindspeed.data.loss_mask import IGNORED, TokenizedConversation, encode
from mindspeed.data.tokenizer import build_tokenizer, save_tokenizer
from mindspeed.data.tokenizer_types import TokenizerOptions

CORPUS = ["the answer is 42\n\n  def f(x):\n    return x", "### Response:\nyes", "a b c"] * 5
MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<reserved_106>", "<reserved_107>"]


def byte_level(directory) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = ByteLevel(trim_offsets=True)  # as GPT-2 and Llama 3 have it
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|endoftext|>", "<|padding|>", *MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    save_tokenizer(tokenizer, directory)


def byte_fallback(directory) -> None:
    """Llama 2's kind: blanks are a letter, unknown characters are spelled in bytes."""
    letters = [chr(i) for i in range(33, 127)] + ["▁", "\n", "the", "▁a"]
    names = ["<unk>", "<|endoftext|>", "<|padding|>", *MARKS]
    names += [f"<0x{i:02X}>" for i in range(256)] + letters
    vocabulary = {name: i for i, name in enumerate(names)}
    merges = [("▁", "a")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(m, normalized=False) for m in names[1 : 3 + 6]])
    save_tokenizer(tokenizer, directory)


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def tokenizer(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param.__name__)
    request.param(directory)
    return build_tokenizer(TokenizerOptions(tokenizer_model=str(directory)))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    spm = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=model,
        vocab_size=320,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


class WithoutOffsets:
    """A tokenizer that cannot say which characters a token stands for."""

    def __init__(self, inner):
        self._inner = inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def tokenize_with_offsets(self, texts, add_special_tokens):
        return None


def decoded(tokenizer, ids) -> str:
    return tokenizer._backend._tokenizer.decode(list(ids), skip_special_tokens=False)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | st.sampled_from(
    ["  def f(x):\n", "\n\nyes", "a  b ", "é東🙂", "the answer is 42\n"]
)
TURNS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3).filter(
    lambda turns: not any(mark in text for turn in turns for text in turn for mark in ["<", "|>"])
)


def conversation(turns) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


@settings(max_examples=60, deadline=None)
@given(turns=TURNS, name=st.sampled_from(["chatml", "llama2", "mistral", "baichuan2", "alpaca"]))
def test_only_assistant_tokens_are_trained(tokenizer, turns, name):
    template = templates.load(name)
    rendered = template.render(conversation(turns))
    rendered = Rendered(rendered.text, rendered.spans)  # without stand-ins, tested below
    said = [rendered.text[a:b] for a, b in rendered.spans]
    sample = encode(tokenizer, [rendered], special=template.special)[0]
    trained = sample.labels[sample.labels != IGNORED]
    offsets = tokenizer.tokenize_with_offsets([rendered.text], False)[0].offsets
    edges = {edge for span in rendered.spans for edge in span}
    crossing = any(a < edge < b for a, b in offsets for edge in edges)
    if crossing:  # a merge across the seam: the token belongs to the answer as a whole
        text = decoded(tokenizer, trained)
        assert len(text) > len("".join(said))
    else:
        assert decoded(tokenizer, trained) == "".join(said)
    # in pieces there is never a merge across the seam
    sample = encode(WithoutOffsets(tokenizer), [rendered], special=template.special)[0]
    assert decoded(tokenizer, sample.labels[sample.labels != IGNORED]) == "".join(said)
    assert decoded(tokenizer, sample.ids) == rendered.text


@settings(max_examples=60, deadline=None)
@given(turns=TURNS)
def test_sentencepiece_offsets_are_character_offsets(sentencepiece, turns):
    tokenizer = build_tokenizer(TokenizerOptions("SentencePieceTokenizer", str(sentencepiece)))
    rendered = templates.load("alpaca").render(conversation(turns))
    sample = encode(tokenizer, [rendered], plain=True)[0]
    assert sample.ids.tolist() == tokenizer.tokenize(rendered.text)
    offsets = np.array(tokenizer.tokenize_with_offsets([rendered.text], True)[0].offsets)
    covered = np.zeros(len(rendered.text) + 1, bool)
    for start, end in offsets[sample.labels != IGNORED]:
        covered[start:end] = True
    for start, end in rendered.spans:
        assert covered[start:end].all()


def test_a_merge_across_the_prompt_boundary_shifts_only_the_legacy_mask(tokenizer):
    rendered = Rendered("Response:\n\n\nyes", ((10, 15),))  # "\n" + "\n\nyes"
    exact = encode(tokenizer, [rendered])[0]
    assert exact.ids.tolist() == tokenizer.tokenize(rendered.text)
    text = decoded(tokenizer, exact.labels[exact.labels != IGNORED])
    assert text.endswith("\n\nyes")
    legacy = encode(tokenizer, [rendered], boundary="legacy")[0]
    prompt = len(tokenizer.tokenize(rendered.text[:10]))
    assert (legacy.labels == IGNORED).sum() == prompt
    assert legacy.labels[prompt:].tolist() == legacy.ids[prompt:].tolist()


def test_a_format_without_end_token_trains_the_next_marker_as_end(tokenizer):
    template = templates.load("baichuan2")
    rendered = template.render(conversation([("a", "b"), ("c", "d")]))
    for kind in (tokenizer, WithoutOffsets(tokenizer)):
        sample = encode(kind, [rendered], special=template.special)[0]
        user, assistant, end = (tokenizer.token_id(text) for text in template.special)
        trained = sample.labels != IGNORED
        b, d = (tokenizer.tokenize(text)[0] for text in "bd")
        assert sample.labels[trained].tolist() == [b, end, d, end]
        assert sample.ids[trained].tolist() == [b, user, d, end]
        assert sample.ids[0] == user and assistant in sample.ids


@pytest.mark.parametrize("length", range(1, 12))
def test_samples_are_cut_at_the_prompt_before_the_answer(length):
    ids = np.arange(12, dtype=np.int32)
    labels = np.where((ids >= 6) & (ids < 10), ids, IGNORED)
    sample = TokenizedConversation(ids, labels).fit(length)
    assert len(sample.ids) == len(sample.labels) == length
    kept = sample.labels[sample.labels != IGNORED].tolist()
    assert kept == [6, 7, 8, 9][: max(length - 1, 0)] or length >= 7
    if length >= 7:
        assert kept == [6, 7, 8, 9]
    assert sample.trained == (length >= 2)
