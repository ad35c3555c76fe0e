"""Records of preferences: every form is one pair; what cannot be compared is refused by line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mindspeed.data import handlers
from mindspeed.data.file_formats import RecordBlock
from mindspeed.data.loss_mask import IGNORED
from mindspeed.data.preprocess import make_encoder
from mindspeed.data.preprocess_options import PreprocessOptions
from mindspeed.data.tokenizer_types import TokenizerOptions
from tests.support.lazy import Lazy

fitted = Lazy("mindspeed.data.preference_dataset", "fitted")


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def bot(text: str) -> dict:
    return {"role": "assistant", "content": text}


def read(record: dict, name: str = "PreferenceHandler", **keys: str) -> list:
    handler = handlers.find(name)
    fields = handlers.RecordFields(record, handler.with_keys(keys))
    found = handler.preferences(fields)
    fields.check_rest()
    return found


ASKED, GOOD, BAD = [user("why?")], [bot("because")], [bot("no")]
FORMS = {
    "texts": {"prompt": "why?", "chosen": "because", "rejected": "no"},
    "messages": {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
    "conversations": {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},
    "conversations and a prompt": {
        "prompt": "why?",
        "chosen": ASKED + GOOD,
        "rejected": ASKED + BAD,
    },
    "Human and Assistant": {
        "chosen": "\n\nHuman: why?\n\nAssistant: because",
        "rejected": "\n\nHuman: why?\n\nAssistant: no",
    },
    "OpenAI": {
        "input": {"messages": ASKED, "tools": [], "parallel_tool_calls": True},
        "preferred_output": GOOD,
        "non_preferred_output": BAD,
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "why?"}],
        "chosen": {"from": "gpt", "value": "because"},
        "rejected": {"from": "gpt", "value": "no"},
    },
    "Alpaca": {"instruction": "why?", "input": "", "chosen": "because", "rejected": "no"},
    "question": {"question": "why?", "chosen": "because", "rejected": "no"},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_a_pair(form):
    (found,) = read(FORMS[form])
    assert (found.prompt, *found.answers) == (ASKED, GOOD, BAD)
    assert found.value == 0
    both = read(FORMS[form], "UnpairedPreferenceHandler")
    assert [(one.prompt, one.answers, one.value) for one in both] == [
        (ASKED, (GOOD,), 1),
        (ASKED, (BAD,), 0),
    ]


def test_system_margin_tools_and_other_names():
    record = {
        "system": "S",
        "ask": "why?",
        "chosen": "because",
        "rejected": "no",
        "margin": 2,
        "tools": [{"name": "f"}],
    }
    (found,) = read(record, prompt="ask")
    assert found.prompt == [{"role": "system", "content": "S"}, *ASKED]
    assert found.value == 2 and found.tools == [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("label", [True, 0])
def test_a_judged_answer(label):
    record = {"prompt": ASKED, "completion": "because", "label": label}
    (found,) = read(record, "UnpairedPreferenceHandler")
    assert (found.prompt, found.answers, found.value) == (ASKED, (GOOD,), float(label))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rejected": None}, "no column 'chosen'|'rejected' is NoneType"),
        ({"rejected": "because"}, "'rejected' is equal to 'chosen'"),
        ({"chosen": "  "}, "'chosen' is empty"),
        ({"prompt": [*ASKED, bot("x")]}, "the prompt ends with assistant"),
        ({"prompt": None}, "there is no prompt"),
        ({"rejected": [user("x")]}, "'rejected' has the roles user"),
        ({"chosen": [*GOOD, user("x")]}, "'chosen' has the roles assistant, user"),
        ({"chosen": [{"role": "judge", "content": "x"}]}, "has the role 'judge'"),
        ({"margin": "2"}, "'margin' is str, a number is expected"),
        ({"chosen": 3}, "'chosen' is int"),
        ({"prompt": "x", "chosen": ASKED + GOOD, "rejected": ASKED + BAD}, "not a part of the"),
    ],
    ids=str,
)
def test_what_cannot_be_compared_is_refused(changes, message):
    record = {name: v for name, v in (FORMS["texts"] | changes).items() if v is not None}
    if changes == {"rejected": None}:
        message = "no column 'rejected'"
    with pytest.raises(ValueError, match=message):
        read(record)


def test_a_label_is_true_or_false():
    with pytest.raises(ValueError, match="'label' is 'good': true or false is expected"):
        read({"prompt": "a", "completion": "b", "label": "good"}, "UnpairedPreferenceHandler")
    with pytest.raises(ValueError, match="no column 'completion'"):
        read({"prompt": "a", "label": True}, "UnpairedPreferenceHandler")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from tests.training.raw_data_job import write_model

    path = tmp_path_factory.mktemp("tokenizer")
    write_model(str(path))
    return path


def encoded(folder: Path, records: list[dict], name: str = "PreferenceHandler", **options):
    chosen = PreprocessOptions(
        (),
        Path("x"),
        TokenizerOptions(tokenizer_model=str(folder)),
        handler=name,
        prompt_type="hf",
        **options,
    )
    encoder = make_encoder(chosen)
    lines = [json.dumps(record).encode() for record in records]
    found = encoder(RecordBlock("pairs.jsonl", 1, lines, 1))
    ends = np.cumsum(found.lengths[0])[:-1]
    texts = []
    for ids, labels in zip(
        np.split(found.tokens[0], ends), np.split(found.tokens[2], ends), strict=True
    ):
        kept = (labels != IGNORED).tolist()
        first = kept.index(True) if True in kept else len(kept)
        assert not any(kept[:first])
        texts.append(encoder.tokenizer.detokenize(labels[labels != IGNORED].tolist()))
        assert (ids[labels != IGNORED] == labels[labels != IGNORED]).all()
    return found, texts


def test_answers_alone_are_trained_and_bad_lines_are_named(folder):
    records = [FORMS["texts"] | {"margin": 0.1}, {"prompt": "x"}, FORMS["messages"]]
    found, texts = encoded(folder, records)
    assert texts == ["because", "no"] * 2
    assert found.documents[0].tolist() == [2, 2] and found.documents[3].tolist() == [1, 1]
    assert found.tokens[3].view(np.float32).tolist() == pytest.approx([0.1, 0])
    (broken,) = found.counts.broken
    assert str(broken).startswith("pairs.jsonl:2: no column 'chosen'")


def test_answers_of_the_prompt_are_not_trained(folder):
    turns = [user("a"), bot("b"), user("c")]
    _, texts = encoded(folder, [FORMS["messages"] | {"prompt": turns}])
    assert texts == ["because", "no"]


def test_a_judged_answer_is_followed_by_that_to_another_prompt(folder):
    records = [
        {"prompt": name, "completion": name * 3, "label": name != "b"} for name in ("a", "b", "c")
    ]
    found, texts = encoded(folder, records, "UnpairedPreferenceHandler")
    assert texts == ["aaa", "ccc", "bbb", "aaa", "ccc", "bbb"]
    assert found.tokens[3].view(np.float32).tolist() == [1, 0, 1]


def test_long_answers_lose_their_end_and_long_prompts_their_pair(folder):
    whole = encoded(folder, [FORMS["texts"]])[0].lengths[0]
    found, texts = encoded(folder, [FORMS["texts"]], seq_length=int(whole[0]) - 4)
    assert texts[1] == "no" and "because".startswith(texts[0]) and texts[0] != "because"
    assert found.counts.shortened == 1 and found.counts.lost == 2
    found, _ = encoded(folder, [FORMS["texts"]], seq_length=8)
    assert not len(found.tokens[0]) and found.counts.untrained == 1


def test_a_packed_pair_shares_its_sequence():
    lengths = np.array([[30, 10], [60, 20], [60, 60], [20, 60]])
    assert fitted(lengths, 64).tolist() == [[30, 10], [44, 20], [32, 32], [20, 44]]
