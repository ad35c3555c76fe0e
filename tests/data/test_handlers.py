"""Records of every kind become the conversations their data sets mean."""

from __future__ import annotations

import json

import pytest

from mindspeed.data import handlers, templates
from mindspeed.data.messages import remarks_on
from mindspeed.errors import ConfigError

MOSS = {
    "turn_1": {"Human": "<|Human|>: hi<eoh>\n", "MOSS": "<|MOSS|>: hello<eom>\n"},
    "turn_2": {"Human": "<|Human|>: more<eoh>\n", "MOSS": "<|MOSS|>: ok<eom>\n"},
    "turn_3": None,
}
CASES = {
    "GeneralInstructionHandler": (
        {"instruction": "Do", "input": "", "output": "Done"},
        [["Do\n", "Done"]],
    ),
    "AlpacaStyleInstructionHandler": (
        {"instruction": "Do", "input": "it", "output": "Done", "history": [["a", "b"]]},
        [["a", "b", "Do\nit", "Done"]],
    ),
    "BelleMultiTurnInstructionHandler": (
        {"instruction": "Human: a Human: b\nAssistant:c\nd\nHuman:e\nAssistant:", "output": "f"},
        [["a Human: b", "c\nd", "e", "f"]],
    ),
    "MOSSInstructionHandler": (
        {"chat": MOSS},
        [["hi", "hello"], ["hi", "hello", "more", "ok"]],
    ),
    "UltraChatHandler": ({"data": ["a", "b", "c", "d"]}, [["a", "b", "c", "d"]]),
    "GlaiveHandler": (
        {
            "system": "",
            "chat": "USER: a: b\n\n\nASSISTANT: c\nd <|endoftext|>\n\n\nUSER: e\n\n\nASSISTANT: f",
        },
        [["a: b", "c\nd", "e", "f"]],
    ),
    "MOSSMultiTurnHandler": ({"chat": json.dumps(MOSS)}, [["hi", "hello", "more", "ok"]]),
    "LeetcodePythonInstructionHandler": (
        {
            "code_with_problem": "Sum two.\n```python\nx\n```",
            "code_only": "a+b",
            "explanation_only": "adds",
        },
        [["Sum two.", "a+b\nadds"]],
    ),
    "SharegptStyleInstructionHandler": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a"},
                {"from": "user", "value": "q2"},
                {"from": "assistant", "value": "a2"},
            ]
        },
        [["q", "a", "q2", "a2"]],
    ),
    "OpenAIInstructionHandler": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "q"}]},
                {"role": "assistant", "content": "a"},
            ]
        },
        [["q", "a"]],
    ),
}


def conversations(name: str, record: dict, **keys: str) -> list:
    handler = handlers.find(name)
    return handler.conversations(handlers.RecordFields(record, handler.with_keys(keys)))


@pytest.mark.parametrize("name", CASES)
def test_a_record_becomes_its_conversations(name):
    record, expected = CASES[name]
    found = conversations(name, record)
    assert [[message["content"] for message in messages] for messages in found] == expected
    for messages in found:
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)


def test_every_handler_is_tested():
    texts = {name for name, handler in handlers.HANDLERS.items() if not handler.conversations}
    preferences = {name for name in texts if handlers.HANDLERS[name].preferences}
    assert preferences == {"PreferenceHandler", "UnpairedPreferenceHandler"}  # test_preferences
    texts -= preferences
    assert texts == {
        "GeneralPretrainHandler",
        "AlpacaPretrainHandler",
        "StackOverflowPythonPretrainHandler",
    }
    assert set(handlers.HANDLERS) - texts - preferences == set(CASES)


def test_system_messages():
    record = CASES["AlpacaStyleInstructionHandler"][0] | {"system": "S"}
    assert conversations("AlpacaStyleInstructionHandler", record)[0][0] == {
        "role": "system",
        "content": "S",
    }
    record = CASES["SharegptStyleInstructionHandler"][0] | {"system": "S"}
    assert conversations("SharegptStyleInstructionHandler", record)[0][0]["content"] == "S"


def test_pretraining_texts():
    alpaca = handlers.find("AlpacaPretrainHandler")
    fields = handlers.RecordFields({"instruction": "Do", "output": "Done"}, alpaca.keys)
    assert alpaca.text(fields, templates.load("alpaca")).endswith(
        "### Instruction:\nDo\n\n### Response:\nDone\n"
    )
    stack = handlers.find("StackOverflowPythonPretrainHandler")
    record = {"title": "T", "question": "Q?", "answer": "A."}
    text = stack.text(handlers.RecordFields(record, stack.keys), templates.load("alpaca"))
    assert text == "T\n\nQuestion: Q?\nAnswer: A."


def test_other_columns_by_map_keys():
    record = {"question": "q", "answer": "a"}
    found = conversations("GeneralInstructionHandler", record, prompt="question", response="answer")
    assert [m["content"] for m in found[0]] == ["q\n", "a"]
    handler = handlers.find("SharegptStyleInstructionHandler")
    keys = handler.with_keys({"messages": "m", "tags": {"role_tag": "r", "content_tag": "c"}})
    record = {"m": [{"r": "human", "c": "q"}, {"r": "gpt", "c": "a"}]}
    assert len(handler.conversations(handlers.RecordFields(record, keys))[0]) == 2
    with pytest.raises(ConfigError, match="'question' is not one of prompt, query, response"):
        handlers.find("GeneralInstructionHandler").with_keys({"question": "q"})


def test_unknown_handlers_are_listed():
    with pytest.raises(ConfigError, match="Alpaca is unknown; allowed are GeneralPretrainHandler,"):
        handlers.find("Alpaca")


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        ("GeneralInstructionHandler", {"a": 1}, r"no column 'instruction' .*; the record has 'a'"),
        ("GeneralInstructionHandler", {"instruction": 1}, "'instruction' is int"),
        ("MOSSInstructionHandler", {"chat": []}, "an object of turns"),
        ("MOSSInstructionHandler", {"chat": {"turn_1": {"Human": ""}}}, "turn_1 .* no 'MOSS'"),
        ("SharegptStyleInstructionHandler", {"conversations": "x"}, "a list is expected"),
        ("SharegptStyleInstructionHandler", {"conversations": [{}]}, "message 1 has no 'from'"),
        (
            "SharegptStyleInstructionHandler",
            {"conversations": [{"from": "bystander", "value": ""}]},
            "message 1 has the role 'bystander'; allowed are ",
        ),
        (
            "OpenAIInstructionHandler",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "only parts of type text",
        ),
        (
            "AlpacaStyleInstructionHandler",
            {"instruction": "", "output": "", "history": ["a"]},
            r"a list of \[question, answer\]",
        ),
    ],
)
def test_wrong_records_are_named(name, record, said):
    with pytest.raises(ValueError, match=said):
        conversations(name, record)


U = {"role": "user", "content": "q"}
A = {"role": "assistant", "content": "a"}
CALL = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
PAIR = {"messages": [U, A], "chosen": [A], "rejected": [A]}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"messages": [U, A], "tools": [{"type": "function"}]}, "a definition has no name"),
        ({"messages": [U, A], "tools": "[{"}, "'tools' is no JSON"),
        ({"messages": [U, A], "tools": {"name": "f"}}, "'tools' is not a list"),
        ({"messages": [U, A], "function_call": {"name": "f"}}, "'function_call' is not read"),
        (PAIR, "'chosen' is not read: a preference pair"),
        ({"messages": [U, A], "label": False}, "an undesired answer"),
        ({"messages": [U | {"tool_calls": CALL}, A]}, "'tool_calls': only answers call tools"),
        ({"messages": [U, A | {"tool_calls": [{"name": 1}]}]}, "has a name and arguments"),
        ({"messages": [U, A | {"tool_calls": [{"name": "f", "arguments": "x"}]}]}, "is no JSON"),
        ({"messages": [U, A | {"tool_calls": [{"name": "f", "arguments": "3"}]}]}, "not an object"),
        ({"messages": [U, A | {"function_call": {"name": "f"}}]}, "has 'function_call'"),
        ({"messages": [U | {"reasoning": "x"}, A]}, "'reasoning': a message of the user has none"),
        ({"messages": [U, A | {"tool_call_id": "1"}]}, "a message of the assistant has none"),
        ({"messages": [U, A | {"loss": False}]}, "with weight 0"),
        ({"messages": [U, A | {"weight": 0.5}]}, "weight 0.5: allowed are 0 and 1"),
        ({"messages": [U, A, {"role": "tool", "content": "7"}]}, "the result of a call that"),
        (
            {
                "messages": [
                    *(U, A | {"tool_calls": CALL}),
                    {"role": "tool", "content": "7", "tool_call_id": "2"},
                ]
            },
            "the result of a call '2' that",
        ),
        ({"messages": [U, A | {"content": None}]}, r"messages\[2\]' has no content \(null\)"),
        ({"messages": [{"role": "system", "content": "s"}, U, A], "system": "t"}, "two system"),
    ],
)
def test_fields_that_change_the_answer_are_refused(record, said):
    fields = handlers.RecordFields(record, handlers.find("OpenAIInstructionHandler").keys)
    with pytest.raises(ValueError, match=said):
        handlers.find("OpenAIInstructionHandler").conversations(fields)
        fields.check_rest()


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        (
            "BelleMultiTurnInstructionHandler",
            {"instruction": "Context.\nHuman:a\nAssistant:", "output": "b"},
            "text before the first turn is not trained: 'Context.'",
        ),
        (
            "BelleMultiTurnInstructionHandler",
            {"instruction": "Human:a\nAssistant:lost", "output": "b"},
            "an answer before the column of the answer: 'lost'",
        ),
    ],
)
def test_text_that_a_handler_would_drop_is_refused(name, record, said):
    with pytest.raises(ValueError, match=said):
        conversations(name, record)


def test_fields_without_effect_are_counted():
    empty = {"tools": "[]", "tool_calls": None, "label": True}
    messages = [U | {"name": "Eve"}, A | {"tool_calls": None, "weight": 1, "name": "Bob"}]
    records = {
        "OpenAIInstructionHandler": {"messages": messages, "id": 7, **empty},
        "MOSSMultiTurnHandler": {
            "chat": {"turn_1": MOSS["turn_1"] | {"Inner Thoughts": "<|Inner Thoughts|>: x<eot>"}},
            "category": "",
        },
        "GeneralInstructionHandler": {"instruction": "i", "chosen": "c", "rejected": "r"},
    }
    keys = {"GeneralInstructionHandler": {"response": "chosen"}}
    found = {}
    for name, record in records.items():
        handler = handlers.find(name)
        fields = handlers.RecordFields(record, handler.with_keys(keys.get(name, {})))
        handler.conversations(fields)
        fields.check_rest()
        found[name] = dict(fields.remarks)
    assert found == {
        "OpenAIInstructionHandler": {
            "messages have a key 'name' that is not used": 2,
            "records have a column 'id' that is not used": 1,
            "records have a column 'label' that is not used": 1,
        },
        "MOSSMultiTurnHandler": {"turns have a part 'Inner Thoughts' that is not used": 1},
        "GeneralInstructionHandler": {"records have a column 'rejected' that is not used": 1},
    }


@pytest.mark.parametrize("name", [n for n, h in handlers.HANDLERS.items() if h.conversations])
def test_every_handler_counts_a_column_that_it_does_not_know(name):
    record = CASES[name][0] | {"unknown": "x"}
    handler = handlers.find(name)
    fields = handlers.RecordFields(record, handler.keys)
    handler.conversations(fields)
    fields.check_rest()
    assert dict(fields.remarks) == {"records have a column 'unknown' that is not used": 1}


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"messages": [{"role": "user", "content": "a"}], "id": 1}, "OpenAIInstructionHandler"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "SharegptStyleInstructionHandler"),
        ({"conversations": [{"role": "user", "content": "a"}]}, "OpenAIInstructionHandler"),
        ({"chat": {"turn_1": {}}}, "MOSSMultiTurnHandler"),
        ({"chat": "USER: a", "system": ""}, "GlaiveHandler"),
        ({"data": ["a", "b"]}, "UltraChatHandler"),
        (
            {"instruction": "Human: a\nAssistant:", "output": "b"},
            "BelleMultiTurnInstructionHandler",
        ),
        ({"instruction": "a", "input": "", "output": "b"}, "AlpacaStyleInstructionHandler"),
        ({"question": "a", "answer": "b"}, "AlpacaStyleInstructionHandler"),
    ],
    ids=str,
)
def test_the_columns_of_a_record_name_its_handler(record, name):
    found, keys = handlers.of_record(record)
    assert found == name
    # And it reads them: a handler that asks for other columns raises.
    one = handlers.find(found)
    if found not in ("MOSSMultiTurnHandler",):
        assert one.conversations(handlers.RecordFields(record, one.with_keys(keys)))


@pytest.mark.parametrize("record", [{}, {"text": "a"}, {"messages": "a"}, {"messages": []}])
def test_columns_that_no_handler_reads_are_refused_by_name(record):
    with pytest.raises(
        ValueError,
        match=f"the first record has {next(iter(record), 'nothing')!r}"
        if record
        else "the first record has nothing",
    ):
        handlers.of_record(record)


ORDERS = {
    "user assistant": [],
    "system user assistant user assistant": [],
    "user call tool tool assistant": [],
    "assistant user assistant": ["conversations begin with an answer"],
    "user user assistant": ["conversations have two questions, or two answers, in a row"],
    "user assistant assistant": ["conversations have two questions, or two answers, in a row"],
    "user system assistant": ["conversations have a system message that is not the first one"],
    "user empty": ["answers are empty: their end alone is trained"],
    "user empty user empty": ["answers are empty: their end alone is trained"] * 2,
    "user thought": [],
    "system": [],
    "": [],
}


@pytest.mark.parametrize("order", ORDERS)
def test_unusual_conversations_are_counted(order):
    kinds = {
        "call": {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
        "empty": {"role": "assistant", "content": ""},
        "thought": {"role": "assistant", "content": "", "reasoning_content": "so"},
    }
    messages = [kinds.get(kind, {"role": kind, "content": "x"}) for kind in order.split()]
    assert list(remarks_on(messages)) == ORDERS[order]
