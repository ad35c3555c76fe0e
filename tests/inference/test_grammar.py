"""Answers by a JSON schema or a regular expression: only what the grammar allows is chosen."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.support.lazy import needs

needs("megatron.core", "fastapi", "openai", "llguidance")

from mindspeed.cli.main import main
from mindspeed.errors import ConfigError
from mindspeed.inference.grammar import Grammars
from mindspeed.inference.sampling import Constraint
from tests.inference import grammar_ranks, tiny_chat, tool_ranks

SETUP = "tests.support.warm"
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dög"]},
        "names": {"type": "array", "items": {"enum": ["é", "b"]}, "minItems": 2, "maxItems": 2},
    },
    "required": ["kind", "names"],
}
EXPRESSION = r"(猫|cat){2} [0-4]{3,5}!"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grammar")
    tiny_chat.write(folder, context=2048)
    return str(folder)


def test_texts_fit_and_depend_on_neither_the_batch_nor_the_layout(ranks, tiny):
    base = {"max_new_tokens": 120, "greedy": True}
    options = [
        {**base, "constraint": ("regex", EXPRESSION)},
        {**base, "constraint": ("json_schema", json.dumps(SCHEMA))},
        {
            **base,
            "greedy": False,
            "num_return_sequences": 2,
            "constraint": ("regex", EXPRESSION),
            "top_k": 4,
        },
        {**base, "num_beams": 2, "constraint": ("regex", "a")},
        {**base, "min_new_tokens": 2, "constraint": ("regex", "a")},
        {**base, "constraint": ("regex", "[(")},
        {**base, "constraint": ("json_schema", '{"type": "nonsense"}')},
    ]
    args = (["the cat", "hello there, how are you", "a"], options)
    one, *two = (
        *ranks(1, grammar_ranks.texts, tiny, 1, *args, setup=SETUP),
        *ranks(2, grammar_ranks.texts, tiny, 2, *args, setup=SETUP),
    )
    assert two == [one, one]
    regex, schema, sampled, *refused = one
    assert all(re.fullmatch(EXPRESSION, text) for group in regex for text in group)
    for [text] in schema:
        value = json.loads(text)
        assert value["kind"] in ("cat", "dög") and set(value["names"]) <= {"é", "b"}
        assert len(value["names"]) == 2
    assert len({text for group in sampled for text in group}) > 1
    assert all(re.fullmatch(EXPRESSION, text) for group in sampled for text in group)
    for group in (regex, schema, sampled):
        assert group[0] == group[-1]  # together with others, and alone
    assert "beam search follows no schema" in refused[0]
    assert "min_tokens 2" in refused[1]
    assert "unclosed character class" in refused[2] and "[(" in refused[2]
    assert "nonsense" in refused[3]


def test_requests_say_what_the_answer_must_be(ranks, tiny):
    user = {"role": "user", "content": "hello"}
    chat = {"messages": [user], "max_tokens": 120}
    parameters = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name in ("f", "g")
    ]
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    named = {"type": "function", "function": {"name": "g"}}
    template = tiny_chat.CHAT_TEMPLATE + "{{ tools }}"
    one = {**chat, "tools": tools, "parallel_tool_calls": False}
    requests = [
        ("", {**chat, "response_format": form}),
        ("", {**chat, "extra_body": {"structured_outputs": {"regex": EXPRESSION}}}),
        ("", {**one, "tool_choice": "required"}),
        ("", {**one, "tool_choice": "required", "stream": True}),
        ("", {**chat, "tools": tools, "tool_choice": named}),
        ("{}", {**chat, "response_format": {"type": "json_object"}}),
        ("", {**chat, "response_format": {"type": "json_schema"}}),
        ("", {**chat, "extra_body": {"structured_outputs": {"regex": "[("}}}),
        ("", {**chat, "response_format": form, "extra_body": {"structured_outputs": {"json": {}}}}),
    ]
    (found,) = ranks(1, tool_ranks.talk, tiny, template, requests, "auto", setup=SETUP)
    schema, regex, required, stream, chosen, empty, *refused = (answer for answer, _ in found)
    messages = [a["choices"][0]["message"] for a in (schema, regex, required, chosen, empty)]
    assert json.loads(messages[0]["content"])["kind"] in ("cat", "dög")
    assert re.fullmatch(EXPRESSION, messages[1]["content"])
    for message, names in ((messages[2], "fg"), (messages[3], "g")):
        [call] = message["tool_calls"]
        assert call["function"]["name"] in names
        assert json.loads(call["function"]["arguments"])["n"] in (1, 2)
    assert required["choices"][0]["finish_reason"] == "tool_calls"
    deltas = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in stream]
    text = "".join(delta[0]["function"]["arguments"] for delta in deltas if delta)
    assert text == messages[2]["tool_calls"][0]["function"]["arguments"]
    assert messages[4]["content"] == "{}"
    for answer, message in zip(
        refused,
        ("json_schema belongs to", "unclosed character class", "give either response_format"),
        strict=True,
    ):
        assert answer.startswith("400") and message in answer


def test_objects_have_only_the_properties_that_a_schema_names(ranks, tiny):
    part = {"type": "object", "properties": {"a": {"const": 1}}}
    schema = {"type": "object", "properties": {"p": {"$ref": "#/$defs/P"},
                                               "l": {"type": "array", "items": part}},
              "required": ["p", "l"], "$defs": {"P": {"anyOf": [part]}}}  # fmt: skip
    options = [{"max_new_tokens": 90, "constraint": ("json_schema", json.dumps(schema)), "seed": n}
               for n in range(4)]  # fmt: skip
    (found,) = ranks(1, grammar_ranks.texts, tiny, 1, ["the cat"], options, setup=SETUP)
    for [text], _ in found:
        value = json.loads(text)
        assert set(value) == {"p", "l"}
        assert all(one in ({}, {"a": 1}) for one in (value["p"], *value["l"]))


def test_without_llguidance_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'mindspeed\[grammar\]'"):
        Grammars().matcher(None, Constraint("regex", "a"), {1})


def test_flags_of_generate(tiny, tmp_path, capsys):
    path = tmp_path / "schema.json"
    path.write_text("{")
    words = ["generate", "--load", "nowhere", "--prompt", "a"]
    assert main([*words, "--json-schema", str(path)]) == 1
    assert "schema.json" in capsys.readouterr().err
    assert main([*words, "--json-schema", str(path), "--regex", "a"]) == 1
    assert "either --json-schema or --regex" in capsys.readouterr().err
    assert main([*words, "--regex", "a", "--num-beams", "2", "--greedy"]) == 1
    assert "beam search follows no" in capsys.readouterr().err
