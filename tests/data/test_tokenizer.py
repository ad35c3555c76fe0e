"""Tokenizers: training, saving, and agreement with transformers and megatron.core."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.data import tokenizer_types
from mindspeed.data.tokenizer import PADDING, build_tokenizer, save_tokenizer, train_bpe
from mindspeed.data.tokenizer_types import END_OF_TEXT, TokenizerOptions
from mindspeed.errors import ConfigError, DataError
from tests.support.lazy import needs

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


@pytest.mark.parametrize("around", [False, True])
def test_extra_ids_are_special_tokens_after_the_vocabulary(directory, tokenizer, tmp_path, around):
    folder = directory
    if around:  # a tokenizer that puts a token before and behind every text
        folder = tmp_path
        whole = json.loads((directory / "tokenizer.json").read_text())
        ends = {
            name: {"id": name, "ids": [i], "tokens": [name]} for i, name in ((0, "a"), (1, "b"))
        }
        parts = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ends]
        parts.insert(1, {"Sequence": {"id": "A", "type_id": 0}})
        kind = {"type": "TemplateProcessing", "single": parts, "pair": [], "special_tokens": ends}
        kind["pair"] = [*parts, {"Sequence": {"id": "B", "type_id": 1}}]
        (folder / "tokenizer.json").write_text(json.dumps({**whole, "post_processor": kind}))
        name = "tokenizer_config.json"
        (folder / name).write_text((directory / name).read_text())
    options = TokenizerOptions(
        tokenizer_model=str(folder), vocab_extra_ids=2, include_special_tokens=around
    )
    marked, size = build_tokenizer(options), tokenizer.vocab_size
    assert marked.vocab_size == size + 2
    assert [marked.token_id(f"<extra_id_{i}>") for i in range(3)] == [size, size + 1, None]
    text = "the cat<extra_id_1> on<extra_id_0>"
    head, tail = ([0], [1]) if around else ([], [])
    parts = [tokenizer.tokenize(part) for part in ("the cat", " on", "<extra_id_2>")]
    expected = [*head, *parts[0], size + 1, *parts[1], size, *tail]
    plain = [*head, *parts[2], *tail]
    assert marked.tokenize_batch([text, "<extra_id_2>"]) == [expected, plain]
    assert marked.detokenize(expected) == text
    assert marked.unique_identifiers != tokenizer.unique_identifiers
    assert marked.eod == tokenizer.eod
    if not around:
        assert marked.tokenize_with_offsets(["cat"], False) is not None
        assert marked.tokenize_with_offsets([text], False) is None


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
    needs("megatron.core")
    from megatron.core.tokenizers import MegatronTokenizer

    theirs = MegatronTokenizer.from_pretrained(
        str(directory), metadata_path={"library": "huggingface"}
    )
    assert theirs.tokenize(TEXTS[2]) == tokenizer.tokenize(TEXTS[2])
    assert (theirs.eod, theirs.vocab_size) == (tokenizer.eod, tokenizer.vocab_size)


def test_null_tokenizer_has_its_eod_after_the_vocabulary():
    needs("megatron.core")
    null = build_tokenizer(TokenizerOptions("NullTokenizer", vocab_size=10))
    assert (null.eod, null.pad, null.vocab_size) == (10, 10, 11)
    assert null.tokenize_batch(["1 2", "3"]) == [[1, 2], [3]]
    vars(null)["_inner"] = SimpleNamespace(pad=-1)  # as in 0.18
    assert null.pad == null.eod


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (TokenizerOptions("Nonsense"), ConfigError, "HuggingFaceTokenizer, "),
        (TokenizerOptions(), ConfigError, "needs --tokenizer-model DIRECTORY"),
        (TokenizerOptions(tokenizer_model="no/such"), DataError, "there is no such directory"),
        (TokenizerOptions("NullTokenizer"), ConfigError, "needs --vocab-size"),
        (
            TokenizerOptions("NullTokenizer", vocab_size=9, vocab_extra_ids=1),
            ConfigError,
            "--vocab-extra-ids: NullTokenizer has no texts",
        ),
        (TokenizerOptions("GPT2BPETokenizer"), ConfigError, "needs --vocab-file"),
        (TokenizerOptions("TikTokenizer"), ConfigError, "needs --tokenizer-model FILE"),
        (TokenizerOptions("Llama2Tokenizer", "no/such"), DataError, "there is no such file"),
    ],
)
def test_wrong_options_name_the_remedy(options, error, message):
    needs("megatron.core")
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


def test_a_vocabulary_below_256_bytes_is_refused():
    with pytest.raises(ConfigError, match="at least 258"):
        train_bpe(TEXTS, 200)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A SentencePiece model of Llama's kind."""
    spm = pytest.importorskip("sentencepiece")
    content = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=content,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    path = tmp_path_factory.mktemp("sentencepiece") / "tokenizer.model"
    path.write_bytes(content.getvalue())
    return path


SENTENCES = ["the cat sat", "  two blanks", "naïve 🙂\n", ""]


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece_ids_are_those_of_megatron(model, kind):
    needs("megatron.core")
    from megatron.core.tokenizers import MegatronTokenizer

    theirs = MegatronTokenizer.from_pretrained(
        str(model), metadata_path={"library": "sentencepiece"}
    )
    for path in (model, model.parent):
        ours = build_tokenizer(TokenizerOptions(kind, str(path)))
        assert ours.tokenize_batch(SENTENCES) == [theirs.tokenize(text) for text in SENTENCES]
        assert (ours.eod, ours.vocab_size) == (theirs.eod, theirs.vocab_size)
    for text, ids in zip(SENTENCES, ours.tokenize_batch(SENTENCES), strict=True):
        assert ours.detokenize(ids) == text


def directory_of(model, folder, **config):
    (folder / "tokenizer.model").write_bytes(model.read_bytes())
    base = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | config))
    return str(folder)


def test_the_class_name_of_early_llama_directories_gives_llamas_ids(model, tmp_path):
    pytest.importorskip("transformers")
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    adds = {"add_bos_token": True}
    new = directory_of(model, tmp_path / "new", tokenizer_class="LlamaTokenizer", **adds)
    old = directory_of(model, tmp_path / "old", tokenizer_class="LLaMATokenizer", **adds)
    right = build_tokenizer(TokenizerOptions("PretrainedFromHF", new))
    with pytest.warns(UserWarning, match="LLaMATokenizer, which is read as LlamaTokenizer"):
        ours = build_tokenizer(TokenizerOptions("PretrainedFromHF", old))
    plain = build_tokenizer(TokenizerOptions("SentencePieceTokenizer", str(model)))
    for text in SENTENCES[:3]:
        assert ours.tokenize(text) == right.tokenize(text)
    assert ours.tokenize("the cat sat") == [1, *plain.tokenize("the cat sat")]


def test_remote_code_is_replaced_by_its_model_and_never_run(model, tmp_path):
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]},
        "add_bos_token": True,
        "additional_special_tokens": ["<s>"],
    }
    (tmp_path / "tokenization_baichuan.py").write_text("raise SystemExit('this code was run')")
    path = directory_of(model, tmp_path, **config)
    plain = build_tokenizer(TokenizerOptions("SentencePieceTokenizer", str(model)))
    ours = build_tokenizer(TokenizerOptions("PretrainedFromHF", path))
    assert ours.tokenize("the cat") == [1, *plain.tokenize("the cat")]
    assert ours.eod == 2 and 2 in ours.tokenize("a</s>b") and 2 not in ours.tokenize("a/s")
    asked = build_tokenizer(TokenizerOptions("HuggingFaceTokenizer", path))
    assert asked.tokenize("the cat") == plain.tokenize("the cat")
    (tmp_path / "tokenizer.model").unlink()
    with pytest.raises(DataError, match="run its code with --trust-remote-code if you trust it"):
        build_tokenizer(TokenizerOptions("PretrainedFromHF", path))


def test_pretrained_from_hf_keeps_the_tokens_that_the_tokenizer_adds(directory, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    save_tokenizer(inner, tmp_path)
    found = {
        kind: build_tokenizer(TokenizerOptions(kind, str(tmp_path))).tokenize("the")
        for kind in ("PretrainedFromHF", "HuggingFaceTokenizer")
    }
    assert found["PretrainedFromHF"] == [0, *found["HuggingFaceTokenizer"]]


def test_gpt2_files_give_the_same_ids_without_the_internet(directory, tokenizer, tmp_path):
    content = json.loads((directory / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [" ".join(merge) for merge in content["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    files = {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}
    gpt2 = build_tokenizer(TokenizerOptions("GPT2BPETokenizer", **files))
    assert gpt2.tokenize_batch(TEXTS[:3]) == tokenizer.tokenize_batch(TEXTS[:3])
    assert (gpt2.eod, gpt2.vocab_size) == (tokenizer.eod, tokenizer.vocab_size)
    with pytest.raises(ConfigError, match="needs --merge-file"):
        build_tokenizer(TokenizerOptions("GPT2BPETokenizer", vocab_file=files["vocab_file"]))


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_bert_files_give_the_ids_of_transformers(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "The", "cat", "##s", ",", "caf"]
    (tmp_path / "vocab.txt").write_text("\n".join([*words, "##e", "##é"]))
    ours = build_tokenizer(TokenizerOptions(kind, vocab_file=str(tmp_path / "vocab.txt")))
    theirs = transformers.BertTokenizer.from_pretrained(
        tmp_path, do_lower_case=kind == "BertWordPieceLowerCase"
    )
    for text in ("The cats, café dog", "the"):
        assert ours.tokenize(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ours.eod, ours.pad, ours.vocab_size) == (3, 0, 13)
    with pytest.raises(DataError, match="there is no file"):
        build_tokenizer(TokenizerOptions(kind, vocab_file=str(tmp_path / "no.txt")))


def test_a_wrong_model_file_is_named(tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "tokenizer.model").write_bytes(b"rubbish")
    with pytest.raises(DataError, match="is no valid SentencePiece model"):
        build_tokenizer(TokenizerOptions("SentencePieceTokenizer", str(tmp_path)))


def test_the_bytes_of_a_token_have_its_blank_and_parts_of_characters():
    pieces = {1: "\u2581cat", 2: "<0xE7>", 3: "s", 4: "ç", 5: "\u2581\u2581"}

    class Pieces(tokenizer_types.PlainTokenizer):
        def piece(self, token):
            return pieces[token]

        def detokenize(self, ids):  # as SentencePiece: without the blank that a text begins with
            texts = ["\ufffd" if token == 2 else pieces[token] for token in ids]
            return "".join(texts).replace("\u2581", " ").removeprefix(" ")

    found = [tokenizer_types.token_bytes(Pieces(), token) for token in pieces]
    assert found == [b" cat", b"\xe7", b"s", "ç".encode(), b"  "]
