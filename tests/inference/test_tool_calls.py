"""Calls of tools: read in every format, at every cut, and by OpenAI's own client."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

from tests.support.lazy import Lazy, needs

needs("megatron.core", "fastapi", "openai")

from mindspeed.data import hf_template
from mindspeed.errors import DataError
from mindspeed.inference.answers.call_formats import FORMATS, REASONING, format_of, reasoning_of
from mindspeed.inference.answers.parser import AnswerParser
from mindspeed.inference.answers.question import Question
from tests.inference import tiny_chat, tool_ranks

load = Lazy("mindspeed.inference.load")
responses = Lazy("mindspeed.inference.server.responses")

SETUP = "tests.support.warm"
ARGUMENTS = '{"a": "x}\\"{ é", "b": [1, {"c": null}]}'
F, G = f'{{"name": "f", "arguments": {ARGUMENTS}}}', '{"name": "g", "parameters": {}}'
BEGIN, CALL, SEP, END, ALL = FORMATS[3].shown
BOTH = [("f", ARGUMENTS), ("g", "{}")]
ANSWERS = {
    ("hermes", f"Sure.\n\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>"): (
        "Sure.",
        BOTH,
    ),
    ("hermes", '<tool_call>{"arguments": {"z": 1}, "name": "h"}'): (None, [("h", '{"z": 1}')]),
    ("hermes", '<tool_call>{"name": "h", "arguments": "{\\"z\\": 1}"}</tool_call>'): (
        None,
        [("h", '{"z": 1}')],
    ),
    ("llama3_json", f"{F}; {G}"): (None, BOTH),
    ("llama3_json", f"<|python_tag|>{F}"): (None, BOTH[:1]),
    ("mistral", f"[TOOL_CALLS] [{F}, {G}]"): (None, BOTH),
    ("mistral", f"Hi[TOOL_CALLS]f{ARGUMENTS}[TOOL_CALLS]g[ARGS]{{}}"): ("Hi", BOTH),
    ("mistral", f"[TOOL_CALLS]f[CALL_ID]abc[ARGS]{ARGUMENTS}"): (None, BOTH[:1]),
    (
        "deepseek_v3",
        f"So: {BEGIN}{CALL}function{SEP}f\n```json\n{ARGUMENTS}\n```{END}\n"
        f"{CALL}function{SEP}g\n```json\n{{}}\n```{END}{ALL}",
    ): ("So:", BOTH),
    (
        "qwen3_coder",
        'So:\n\n<tool_call>\n<function=f>\n<parameter=a>\nx}"{ é\n</parameter>\n<parameter=b>\n'
        '[1, {"c": null}]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n'
        "</function>\n",
    ): ("So:", BOTH),
    (
        "glm45",
        '<tool_call>f<arg_key>a</arg_key><arg_value>x}"{ é</arg_value><arg_key>b</arg_key>\n'
        '<arg_value>[1, {"c": null}]</arg_value></tool_call>\n<tool_call>g\n</tool_call>\n',
    ): (None, BOTH),
    ("deepseek_v31", f"{BEGIN}{CALL}f{SEP}{ARGUMENTS}{END}{CALL}g{SEP}{{}}{END}{ALL}"): (
        None,
        BOTH,
    ),
}
NO_CALLS = {
    "hermes": [
        "<tool_call>oh {no} { </tool_call>",
        "a < b, <tool",
        "<tool_call>\n",
        f"<tool_call>{F[:-9]}",  # cut off
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": nul}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    ],
    "llama3_json": ['{"name": "Bob"}', "  hello {x}", "  ", '{"name": "f", "arguments": "{"}'],
    "mistral": ["[TOOL_CALLS] f", "[TOOL_CALLS] {}", "[TOOL_CALL"],
    "deepseek_v3": [f"{BEGIN}{CALL}f{SEP}{{}}{END}{ALL}"],
    "deepseek_v31": [f"{BEGIN}f{{}}"],
    "qwen3_coder": [
        "<tool_call>{} {</tool_call>",
        "<tool_call>\n<function=f>\nno",
        "<tool_call>\n<function=f>\n<parameter=a>\nx",  # cut off
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n",
        "a <tool_cal",
    ],
    "glm45": [
        "<tool_call> </tool_call>",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n",
        "<tool_call>f",
    ],
}


def trl_templates():
    """Published chat templates, as trl ships them."""
    found = importlib.util.find_spec("trl")
    if found is None:
        pytest.skip("trl is not installed")
    return Path(found.origin).parent / "chat_templates"


def read(text, size, *of):
    choice = responses.Choice(parser=AnswerParser(*of))
    deltas = []
    for at in range(0, len(text), size):
        deltas += choice.read(text[at : at + size], None)
    deltas += choice.read("", "stop")
    return choice, deltas


def called(message):
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]


@pytest.mark.parametrize("thought", ["", "<think>\nwhy\n\nnot\n</think>\n\n"])
@pytest.mark.parametrize(("name", "text"), ANSWERS)
def test_calls_of_every_format_are_read_at_every_cut(name, text, thought):
    content, calls = ANSWERS[name, text]
    for size in (1, 2, 7, 1000):
        choice, deltas = read(thought + text, size, format_of("", name), REASONING[0])
        message = choice.message
        assert (message["content"], called(message)) == (content, calls)
        assert message.get("reasoning_content") == ("why\n\nnot" if thought else None)
        assert choice.finish == "tool_calls"
        assert len({call["id"] for call in message["tool_calls"]}) == len(calls)
        kinds = [part.kind for part in deltas if part.call == 0 and part.kind[0] in "na"]
        assert kinds[0] == "name" and set(kinds[1:]) == {"arguments"}
    names = [call["id"] for call in message["tool_calls"]]
    assert all(len(name) == 9 and name.isalnum() for name in names) or name != "mistral"


@pytest.mark.parametrize("name", NO_CALLS)
def test_what_is_no_call_is_content(name):
    for text in NO_CALLS[name]:
        for size in (1, 3, 1000):
            choice, _ = read(text, size, format_of("", name))
            assert choice.message == {"role": "assistant", "content": text}
            assert choice.finish == "stop"


def test_reasoning_that_the_prompt_began_and_that_never_ends():
    choice, _ = read("why\n</think>\n\nSo.\n", 1, None, REASONING[0], True)
    assert choice.message["reasoning_content"] == "why"
    assert choice.message["content"] == "So.\n"
    choice, _ = read("why </thi", 1, None, REASONING[0], True)
    assert choice.message["content"] is None
    assert choice.message["reasoning_content"] == "why </thi"
    choice, _ = read(" <thought> so </think>", 1, None, REASONING[0])
    assert choice.message == {"role": "assistant", "content": " <thought> so </think>"}


PUBLISHED = {  # template: the format, and whether it renders several calls
    "qwen3": ("hermes", True),
    "qwen3_6": ("qwen3_coder", True),
    "nemotron_3_nano": ("qwen3_coder", True),
    "glm4moe": ("glm45", True),
    "gptoss": ("gpt_oss", False),
}
VALUES = {
    "code": 'if a < b:\n    print("x")\n\n',
    "digits": "5",
    "count": 3,
    "yes": True,
    "parts": [1, {"c": None}],
    "either": "7",
    "other": "é{",
}
TYPES = {"type": "object", "properties": {
    "code": {"type": "string"},
    "digits": {"type": "string"},
    "count": {"type": "integer"},
    "yes": {"type": "boolean"},
    "either": {"anyOf": [{"type": "string"}, {"type": "array"}]},
}}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("why", ["", "I think\n\nso"])
def test_what_a_published_template_writes_is_read(name, why):
    """The text of an answer behind its prompt, by the model's own template."""
    expected, several = PUBLISHED[name]
    source = (trl_templates() / f"{name}.jinja").read_text("utf-8")
    template = hf_template.JinjaTemplate(name, source, {"bos_token": "", "eos_token": ""})
    form = format_of(source)
    assert form.name == expected
    tools = [tool("f", TYPES), tool("g")]
    calls = [("f", VALUES), ("g", {})][: 2 if several else 1]
    answer = {
        "role": "assistant",
        "content": "Sure." if name != "gptoss" or not why else "",
        "tool_calls": [{"type": "function", "function": {"name": n, "arguments": a}}
                       for n, a in calls],
    }  # fmt: skip
    answers = [{**answer, "reasoning_content": why}]
    answers.append({"role": "assistant", "content": "It rains.\n", "reasoning_content": why})
    for answer in answers:
        answer = {name: value for name, value in answer.items() if value}
        prompt = template.prompt([USER], tools)
        text = template.render([USER, answer], tools=tools).text
        pairs = enumerate(zip(prompt, text, strict=False))
        shared = next((at for at, (a, b) in pairs if a != b), len(prompt))  # perhaps no <think>
        text = text[shared:]
        for stop in ("<|im_end|>", "<|call|>", "<|return|>"):
            text = text.partition(stop)[0]
        question = Question(prompt[:shared], False, form, reasoning_of(source), tools, ())
        for size in (1, 2, 7, 1000):
            choice = responses.Choice(parser=question.parser())
            for at in range(0, len(text), size):
                choice.read(text[at : at + size], None)
            choice.read("", "stop")
            message = choice.message
            assert message.get("reasoning_content", "") == (
                why or ("Sure." if name == "gptoss" and "tool_calls" in answer else "")
            )
            if "tool_calls" not in answer:
                assert message["content"].strip() == "It rains." and choice.finish == "stop"
                continue
            assert (message["content"] or "") == ("" if name == "gptoss" else "Sure.")
            assert [(n, json.loads(a)) for n, a in called(message)] == calls
            assert choice.finish == "tool_calls"


def read_channels(text, size, offered=True):
    question = Question("", False, format_of("", "gpt_oss"), None, [1][:offered], ())
    choice = responses.Choice(parser=question.parser())
    for at in range(0, len(text), size):
        choice.read(text[at : at + size], None)
    choice.read("", "stop")
    return choice


ANALYSIS = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
CHANNELS = {
    # as the model writes calls, with a word to the user first
    ANALYSIS + "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>':
        ("why", "Wait.", [("f", '{"a": 1}')]),
    ANALYSIS + "<|channel|>final<|message|>So.": ("why", "So.", []),
    ANALYSIS * 2 + "<|channel|>final<|message|>So.\n<|return|>": ("why\nwhy", "So.\n", []),
    # cut off, not an object, not in this form
    ANALYSIS + ' to=functions.f<|channel|>commentary json<|message|>{"a": ': ("why", '{"a": ', []),
    " to=functions.f<|channel|>commentary json<|message|>[1]<|call|>": (None, "[1]", []),
    ANALYSIS + "<|chan": ("why", None, []),
    "Hello <b>": (None, "Hello <b>", []),
}  # fmt: skip


@pytest.mark.parametrize("text", CHANNELS)
def test_channels_are_read_at_every_cut(text):
    reasoning, content, calls = CHANNELS[text]
    for size in (1, 3, 1000):
        choice = read_channels(text, size)
        message = choice.message
        assert message.get("reasoning_content") == reasoning
        assert (message["content"] or None) == content and called(message) == calls
        assert choice.finish == ("tool_calls" if calls else "stop")
        message = read_channels(text, size, offered=False).message
        assert "tool_calls" not in message and message.get("reasoning_content") == reasoning


OWN_ANSWERS = {
    "qwen3_6": "why\n</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\nPa\nris\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm4moe": "\n<think>why</think>\n<tool_call>f\n<arg_key>a</arg_key>\n"
    "<arg_value>Pa\nris</arg_value>\n</tool_call>",
    "gptoss": ANALYSIS + "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    '{"a": "Pa\\nris"}<|call|>',
}  # fmt: skip


@pytest.fixture(scope="module")
def own_answers(rank_pool, tiny):
    """Of each of these templates two answers with their prompts, whole and streamed."""
    string = {"type": "object", "properties": {"a": {"type": "string"}}}
    body = {"messages": [USER], "tools": [tool("f", string), tool("g")]}
    jobs = []
    for name, answer in OWN_ANSWERS.items():
        template = (trl_templates() / f"{name}.jinja").read_text("utf-8")
        jobs.append((tiny, template, [(answer, body), (answer, {**body, "stream": True})], "auto"))
    options = {"setup": SETUP, "backend": None, "timeout": 120}
    (found,) = rank_pool.run(1, tool_ranks.talks, jobs, **options)
    return dict(zip(OWN_ANSWERS, found, strict=True))


@pytest.mark.parametrize("name", OWN_ANSWERS)
def test_openais_client_gets_calls_of_each_models_own_template(own_answers, name):
    ((whole, prompt), (stream, _)) = own_answers[name]
    (choice,) = whole["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["reasoning_content"] == "why"
    assert called(message) == [("f", '{"a": "Pa\\nris"}')] and message["content"] is None
    assert "of a test" in prompt
    deltas = [chunk["choices"][0]["delta"] for chunk in stream]
    calls = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    pieces = [call["arguments"] for call in calls]
    assert calls[0]["name"] == "f" and "".join(pieces) == '{"a": "Pa\\nris"}'
    assert sum(map(bool, pieces)) > 3  # a string is sent while it is written
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why"
    assert stream[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_format_follows_from_the_chat_template():
    folder = trl_templates()
    found = {
        name: getattr(format_of((folder / f"{name}.jinja").read_text("utf-8")), "name", None)
        for name in (
            "qwen2_5",
            "qwen3",
            "llama3_1",
            "deepseekv3",
            "qwen3_6",
            "glm4moe",
            "gptoss",
            "nemotron_3_nano",
            "gemma3",
        )
    }
    assert found == {
        "qwen2_5": "hermes",
        "qwen3": "hermes",
        "llama3_1": "llama3_json",
        "deepseekv3": "deepseek_v3",
        "qwen3_6": "qwen3_coder",
        "glm4moe": "glm45",
        "gptoss": "gpt_oss",
        "nemotron_3_nano": "qwen3_coder",
        "gemma3": None,
    }
    assert format_of("{{ '[TOOL_CALLS]' }}").name == "mistral"
    assert reasoning_of((folder / "qwen3.jinja").read_text("utf-8")) == REASONING[0]
    assert reasoning_of((folder / "qwen2_5.jinja").read_text("utf-8")) is None


SPECIAL = (
    "[TOOL_CALLS]",
    "<|im_start|>",
    "<|im_end|>",
    "<arg_key>",
    *FORMATS[-1].shown,
    "<|call|>",
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    tiny_chat.write(folder, len(SPECIAL), 2048)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    first = len(content["model"]["vocab"])
    kind = {key: False for key in ("single_word", "lstrip", "rstrip", "normalized")}
    content["added_tokens"] += [
        {"id": first + index, "content": text, "special": True, **kind}
        for index, text in enumerate(SPECIAL)
    ]
    path.write_text(json.dumps(content))
    return str(folder)


def tool(name, parameters=None):
    parameters = parameters or {"type": "object"}
    function = {"name": name, "description": "of a test", "parameters": parameters}
    return {"type": "function", "function": function}


USER = {"role": "user", "content": "hello"}
TOOLS = {"messages": [USER], "tools": [tool("f"), tool("g")]}


def test_openais_client_gets_calls_whole_and_streamed(ranks, tiny):
    template = (trl_templates() / "qwen3.jinja").read_text("utf-8")
    answer = f"<think>\nwhy\n</think>\n\nSure.\n<tool_call>\n{F}\n</tool_call>"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
    history = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "result"},
    ]
    stranger = {**history[2], "tool_call_id": "2"}
    named = {"type": "function", "function": {"name": "h"}}
    quiet = {"extra_body": {"enable_thinking": False}}
    both = f"<tool_call>{F}</tool_call><tool_call>{G}</tool_call>"
    requests = [
        (answer, TOOLS),
        (answer, {**TOOLS, "stream": True}),
        (both, {**TOOLS, "parallel_tool_calls": False}),
        (answer, {**TOOLS, "tool_choice": "none"}),
        ("So.", {**TOOLS, "messages": history}),
        ("So.", {"messages": [USER], **quiet}),
        ("", {**TOOLS, "messages": [USER, *history[2:]]}),
        ("", {**TOOLS, "messages": [*history[:2], stranger]}),
        ("", {**TOOLS, "tool_choice": named}),
        ("", {"messages": [USER], "tool_choice": "required"}),
        ("", {"messages": [USER], "tools": [{"type": "function", "function": {}}]}),
        ("<tool_call>{", TOOLS),
    ]
    (found,) = ranks(1, tool_ranks.talk, tiny, template, requests, "auto", setup=SETUP)
    whole, stream, one, none, after, still, *refused, broken = found
    (choice,) = whole[0]["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Sure." and called(choice["message"]) == BOTH[:1]
    assert choice["message"]["reasoning_content"] == "why"
    assert '"name": "g"' in whole[1]  # the definitions are in the prompt

    deltas = [chunk["choices"][0]["delta"] for chunk in stream[0]]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"] == {"name": "f", "arguments": ""} and calls[0]["type"] == "function"
    pieces = [call["function"]["arguments"] for call in calls[1:]]
    assert "".join(pieces) == ARGUMENTS and len(pieces) > 5
    assert "".join(delta.get("content") or "" for delta in deltas) == "Sure."
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "why"
    assert stream[0][-1]["choices"][0]["finish_reason"] == "tool_calls"

    assert called(one[0]["choices"][0]["message"]) == BOTH[:1]
    message = none[0]["choices"][0]["message"]
    assert "<tool_call>" in message["content"] and '"name": "g"' not in none[1]
    assert after[0]["choices"][0]["message"] == {"role": "assistant", "content": "So."}
    assert '"name": "f", "arguments": {"a"' in after[1] and "result" in after[1]
    assert still[0]["choices"][0]["message"]["content"] == "So."
    assert still[1].rstrip().endswith("</think>")
    for (answer, _), message in zip(
        refused,
        (
            "the result of a call '1' that the answer before lacks",
            "the result of a call '2' that the answer before lacks",
            "there is no tool h",
            "'required' needs tools",
            "a definition has no name",
        ),
        strict=True,
    ):
        assert answer.startswith("400") and message in answer
    assert broken[0]["choices"][0]["message"]["content"] == "<tool_call>{"
    assert broken[0]["choices"][0]["finish_reason"] == "stop"


MISTRAL = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{{ '[TOOL_CALLS]' if m.tool_calls }}"
    "{% endfor %}"
)


def test_special_tokens_of_a_format_are_read_and_unknown_formats_refused(ranks, tiny):
    text = f"[TOOL_CALLS]f{ARGUMENTS}"
    unknown = MISTRAL.replace("[TOOL_CALLS]", "")
    jobs = [
        (tiny, MISTRAL, [(text, TOOLS), (text, {"messages": [USER]})], "auto"),
        (tiny, unknown, [("", TOOLS)], "auto"),
        (tiny, None, [("", TOOLS)], "hermes"),
    ]
    ((read, undetected, without),) = ranks(1, tool_ranks.talks, jobs, setup=SETUP, backend=None)
    assert called(read[0][0]["choices"][0]["message"]) == BOTH[:1]
    assert read[1][0]["choices"][0]["message"]["content"] == text.removeprefix("[TOOL_CALLS]")
    assert "start the server with --tool-call-parser" in undetected[0][0]
    assert "does not render tools" in without[0][0]


def test_fields_that_a_request_leaves_out_are_those_of_generation_config(ranks, tiny, tmp_path):
    folder = tmp_path / "tiny"
    shutil.copytree(tiny, folder)
    path = folder / "generation_config.json"
    given = {"temperature": 0.9, "top_k": 1, "do_sample": True, "min_p": None, "eos_token_id": 0}
    path.write_text(json.dumps(given))
    user = {"messages": [USER], "max_tokens": 8}
    requests = [("", {**user, "seed": seed, "temperature": None}) for seed in (1, 2)]
    requests += [("", user), ("", {**requests[0][1], "extra_body": {"top_k": 0}})]
    args = (tool_ranks.talk, str(folder), None, requests, "auto")
    (found,) = ranks(1, *args, setup=SETUP)
    one, two, greedy, wide = (answer["choices"][0]["message"]["content"] for answer, _ in found)
    assert one == two == greedy != wide  # top_k 1 leaves one token; a request's own value wins
    path.write_text(json.dumps({**given, "top_p": 1.5}))
    with pytest.raises(DataError, match=r"top_p is 1\.5"):
        load.sampling_defaults(folder)
    assert load.sampling_defaults(tmp_path) == {}


def thought_and_said(name, why, text):
    if name == "gptoss":
        start = "<|start|>assistant<|channel|>final<|message|>"
        return f"<|channel|>analysis<|message|>{why}<|end|>{start}{text}<|return|>"
    return f"<think>\n{why}\n</think>\n\n{text}"


@pytest.mark.parametrize("name", ["gptoss", "qwen3"])
def test_a_chat_prints_and_remembers_reasoning_as_such(ranks, tiny, name):
    template = (trl_templates() / f"{name}.jinja").read_text("utf-8")
    answers = [thought_and_said(name, "the cat", "on the mat"), thought_and_said(name, "b", "c")]
    args = (tool_ranks.chat, tiny, template)
    out, messages, prompts = ranks(1, *args, answers, True, False, setup=SETUP)[0]
    assert out == "the cat\n\non the mat\nb\n\nc\n"
    assert messages[1] == {
        "role": "assistant",
        "content": "on the mat",
        "reasoning_content": "the cat",
    }
    assert "on the mat" in prompts[1] and "the cat" not in prompts[1]  # as both templates want
    out = ranks(1, *args, answers[:1], True, True, setup=SETUP)[0][0]
    assert out == "You >> Model >> \x1b[2mthe cat\x1b[22m\n\non the mat\nYou >> "
    out, messages, _ = ranks(1, *args, answers[:1], False, False, setup=SETUP)[0]
    assert out == "on the mat\n" and messages[1]["reasoning_content"] == "the cat"


def test_reasoning_that_a_template_does_not_know_is_left_out(ranks, tiny):
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
    )
    args = (tool_ranks.chat, tiny, template, ["why\n</think>\n\nso", "x"], True, False)
    out, messages, prompts = ranks(1, *args, setup=SETUP)[0]
    assert out == "why\n\nso\nx\n" and messages[1]["reasoning_content"] == "why"
    assert prompts[1].startswith("user: hello\nassistant: so\nuser: hello\nassistant: ")


def test_conversations_of_a_file_are_answered(ranks, tiny, tmp_path):
    template = (trl_templates() / "qwen3.jinja").read_text("utf-8")
    answer = f"<think>\nwhy\n</think>\n\nSure.\n<tool_call>\n{F}\n</tool_call>"
    lines = [{**TOOLS, "id": 7}, {"messages": [USER], "chat_template_kwargs": QUIET}]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n\n".join(map(json.dumps, lines)))
    args = (tool_ranks.answers_of, tiny, template, str(file), answer)
    (((first,), (second,)), prompts) = ranks(1, *args, setup=SETUP)[0]
    assert first["reasoning_content"] == second["reasoning_content"] == "why"
    assert first["content"] == "Sure." and first["finish_reason"] == "tool_calls"
    assert called(first) == BOTH[:1]
    assert second["content"].startswith("Sure.") and "tool_calls" not in second  # none are offered
    assert second["finish_reason"] == "stop"
    asked = sorted(prompts, key=len)
    assert asked[0].endswith("</think>\n\n") and not asked[1].endswith("</think>\n\n")
    assert "of a test" in asked[1] and "of a test" not in asked[0]


QUIET = {"enable_thinking": False}
