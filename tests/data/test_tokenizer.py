"""Tokenizers: training, saving, and agreement with transformers and megatron.core."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.data.tokenizer import (
    END_OF_TEXT,
    PADDING,
    TokenizerOptions,
    build_tokenizer,
    save_tokenizer,
    train_bpe,
)
from mindspeed.errors import ConfigError, DataError

TEXTS = ["the cat sat on the mat\n", "naïve café, 東京 and 🙂", "def f(x):\n    return x\n"] * 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe(TEXTS, 400), path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return build_tokenizer(TokenizerOptions(tokenizer_model=str(directory)))


def test_training_twice_gives_the_same_vocabulary():
    assert train_bpe(TEXTS, 300).to_str() == train_bpe(TEXTS, 300).to_str()


def test_special_tokens_end_documents_and_pad(tokenizer):
    assert (tokenizer.eod, tokenizer.pad) == (0, 1)
    assert tokenizer.vocab_size <= 400
    assert tokenizer.detokenize([tokenizer.eod, *tokenizer.tokenize("x"), tokenizer.pad]) == "x"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_every_text_survives_the_round_trip(tokenizer, text):
    if END_OF_TEXT not in text and PADDING not in text:
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text


def test_auto_tokenizer_opens_the_directory_and_gives_the_same_ids(directory, tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id) == (0, 0, 1)
    assert theirs(TEXTS[:3])["input_ids"] == tokenizer.tokenize_batch(TEXTS[:3])


def test_a_directory_of_another_class_is_read_through_transformers(directory, tokenizer, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": END_OF_TEXT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    other = build_tokenizer(TokenizerOptions(tokenizer_model=str(tmp_path)))
    assert other.tokenize(TEXTS[1]) == tokenizer.tokenize(TEXTS[1])
    assert other.pad == other.eod == tokenizer.eod


def test_megatron_opens_the_directory_and_gives_the_same_ids(directory, tokenizer):
    pytest.importorskip("transformers")
    pytest.importorskip("megatron.core")
    from megatron.core.tokenizers import MegatronTokenizer

    theirs = MegatronTokenizer.from_pretrained(
        str(directory), metadata_path={"library": "huggingface"}
    )
    assert theirs.tokenize(TEXTS[2]) == tokenizer.tokenize(TEXTS[2])
    assert (theirs.eod, theirs.vocab_size) == (tokenizer.eod, tokenizer.vocab_size)


def test_null_tokenizer_has_its_eod_after_the_vocabulary():
    pytest.importorskip("megatron.core")
    null = build_tokenizer(TokenizerOptions("NullTokenizer", vocab_size=10))
    assert (null.eod, null.pad, null.vocab_size) == (10, 10, 11)
    assert null.tokenize_batch(["1 2", "3"]) == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (TokenizerOptions("Nonsense"), ConfigError, "HuggingFaceTokenizer, "),
        (TokenizerOptions(), ConfigError, "needs --tokenizer-model DIRECTORY"),
        (TokenizerOptions(tokenizer_model="no/such"), DataError, "there is no such directory"),
        (TokenizerOptions("NullTokenizer"), ConfigError, "needs --vocab-size"),
        (TokenizerOptions("GPT2BPETokenizer"), ConfigError, "needs --vocab-file"),
        (TokenizerOptions("TikTokenizer"), ConfigError, "needs --tokenizer-model FILE"),
        (TokenizerOptions("Llama2Tokenizer", "no/such"), DataError, "there is no such file"),
    ],
)
def test_wrong_options_name_the_remedy(options, error, message):
    pytest.importorskip("megatron.core")
    with pytest.raises(error, match=message):
        build_tokenizer(options)


def test_a_damaged_tokenizer_file_is_named(directory, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(DataError, match=r"tokenizer\.json is damaged"):
        build_tokenizer(TokenizerOptions(tokenizer_model=str(tmp_path)))


def test_a_tokenizer_without_an_end_token_is_refused(directory, tmp_path):
    plain = (directory / "tokenizer.json").read_text().replace(END_OF_TEXT, "<other>")
    (tmp_path / "tokenizer.json").write_text(plain)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="set eos_token"):
        build_tokenizer(TokenizerOptions(tokenizer_model=str(tmp_path)))


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ConfigError, match="at least 258"):
        train_bpe(TEXTS, 200)
