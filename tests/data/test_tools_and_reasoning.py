"""Tools and reasoning reach the text that transformers renders, and answers alone are trained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mindspeed.data import handlers, hf_template, templates
from mindspeed.data.file_formats import RecordBlock
from mindspeed.data.loss_mask import IGNORED
from mindspeed.data.preprocess import make_encoder
from mindspeed.data.preprocess_options import PreprocessOptions
from mindspeed.data.record_encoders import SEVERAL_SAMPLES
from mindspeed.data.tokenizer_types import TokenizerOptions
from mindspeed.errors import DataError

# Reasoning is kept in the answers to the last question only.
SOURCE = """\
{%- set ns = namespace(question=0) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.question = ns.question + 1 -%}{%- endfor -%}
{%- set asked = ns.question -%}{%- set ns.question = 0 -%}
{%- if tools -%}<|im_start|>system
{% for one in tools %}{{ one | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.question = ns.question + 1 -%}{%- endif -%}
<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.reasoning_content and ns.question == asked %}<think>{{ m.reasoning_content }}</think>
{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
WEATHER = {"name": "weather", "parameters": {"type": "object"}}
DEFINED = {"type": "function", "function": WEATHER}
CALLED = {"name": "weather", "arguments": {"city": "Delft", "days": [1, 2]}}
OPENAI = {
    "tools": [DEFINED],
    "messages": [
        {"role": "user", "content": "rain?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "look",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": CALLED | {"arguments": json.dumps(CALLED["arguments"])},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "dry"},
        {"role": "assistant", "content": "No."},
    ],
}
SHAREGPT = {
    "tools": json.dumps([WEATHER]),
    "conversations": [
        {"from": "human", "value": "rain?"},
        {"from": "function_call", "value": json.dumps(CALLED)},
        {"from": "observation", "value": "dry"},
        {"from": "gpt", "value": "No."},
    ],
}
GLAIVE = {
    "system": (
        "SYSTEM: You are a helpful assistant with access to the following functions. Use them if "
        f"required -\n{json.dumps(WEATHER, indent=4)}\n\n"
    ),
    "chat": (
        "USER: rain?\n\n\nASSISTANT: <functioncall> "
        '{"name": "weather", "arguments": \'' + json.dumps(CALLED["arguments"]) + "'} "
        "<|endoftext|>\n\n\nFUNCTION RESPONSE: dry\n\n\nASSISTANT: No. <|endoftext|>\n\n\n"
    ),
}
CALL = "<tool_call>" + json.dumps(CALLED) + "</tool_call><|im_end|>"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A tokenizer of one token a byte with the template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    tokens.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(SOURCE)
    return tmp_path


def read(record: dict) -> tuple[list[dict], list[dict]]:
    """Messages and tools of a record."""
    name, keys = handlers.of_record(record)
    handler = handlers.find(name)
    fields = handlers.RecordFields(record, handler.with_keys(keys))
    (messages,) = handler.conversations(fields)
    fields.check_rest()
    assert not fields.remarks
    return messages, fields.tools


def said(rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.spans]


def of_transformers(messages: list[dict], tools: list[dict]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template([messages], chat_template=SOURCE, tools=tools or None)
    return text


def encoded(folder: Path, record: dict, **options) -> tuple[list[str], dict[str, int]]:
    """What is trained of each sample of a record, and the remarks."""
    tokenizer = TokenizerOptions(tokenizer_model=str(folder))
    name, keys = handlers.of_record(record)
    chosen = PreprocessOptions(
        (), Path("x"), tokenizer, handler=name, map_keys=keys, prompt_type="hf", **options
    )
    encoder = make_encoder(chosen)
    found = encoder(RecordBlock("file", 1, [record], 1))
    assert not found.counts.broken, found.counts.broken
    ends = np.cumsum(found.lengths[2])[:-1]
    return [
        "".join(
            encoder.tokenizer.detokenize([one]) or encoder.tokenizer.piece(one)
            for one in part[part != IGNORED].tolist()
        )
        for part in np.split(found.tokens[2], ends)
    ], found.counts.remarks


def test_three_forms_of_a_call_are_one_conversation():
    messages, tools = read(OPENAI)
    assert tools == [DEFINED] == read(SHAREGPT)[1]
    plain = [{k: v for k, v in m.items() if k != "reasoning_content"} for m in messages]
    del plain[1]["tool_calls"][0]["id"], plain[2]["tool_call_id"]
    assert plain == read(SHAREGPT)[0]
    (system, *others), defined = read(GLAIVE)
    assert others == plain and defined == tools
    assert system == {"role": "system", "content": "You are a helpful assistant."}
    assert plain[1]["tool_calls"][0]["function"] == CALLED  # arguments as an object


@pytest.mark.parametrize("record", [OPENAI, SHAREGPT], ids=["OpenAI", "ShareGPT"])
def test_the_text_is_that_of_transformers_and_each_answer_has_its_span(folder, record):
    messages, tools = read(record)
    rendered = hf_template.load(folder).render(messages, tools=tools)
    assert rendered.text == of_transformers(messages, tools)
    assert json.dumps(DEFINED) in rendered.text
    reasoning = "<think>look</think>\n" if record is OPENAI else ""
    assert said(rendered) == [f"{reasoning}{CALL}", "No.<|im_end|>"]
    assert rendered.remarks == ()


def test_calls_and_answers_are_trained_and_results_are_not(folder):
    (trained,), remarks = encoded(folder, OPENAI)
    assert trained == f"<think>look</think>\n{CALL}No.<|im_end|>"
    assert not remarks
    assert encoded(folder, OPENAI, train_on="last")[0] == ["No.<|im_end|>"]
    weighted = {
        **OPENAI,
        "messages": [*OPENAI["messages"][:3], OPENAI["messages"][3] | {"weight": 0}],
    }
    assert encoded(folder, weighted)[0] == [f"<think>look</think>\n{CALL}"]


def test_reasoning_to_each_question_is_trained_as_the_model_will_write_it(folder):
    """An earlier answer loses its reasoning, so each question becomes a sample of its own."""
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "r1"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "thinking": "r2"},
    ]
    trained, remarks = encoded(folder, {"messages": turns})
    assert trained == ["<think>r1</think>\nb<|im_end|>", "<think>r2</think>\nd<|im_end|>"]
    assert remarks[SEVERAL_SAMPLES] == 1
    # The last sample is the text that transformers renders of the whole conversation.
    messages, tools = read({"messages": turns})
    messages[1]["weight"] = 0
    rendered = hf_template.load(folder).render(messages, tools=tools)
    assert rendered.text == of_transformers(read({"messages": turns})[0], tools)
    assert [one for one in said(rendered) if one] == ["<think>r2</think>\nd<|im_end|>"]
    # Without reasoning before, nothing changes and one sample is enough.
    del turns[1]["reasoning_content"]
    trained, remarks = encoded(folder, {"messages": turns})
    assert trained == ["b<|im_end|><think>r2</think>\nd<|im_end|>"] and not remarks


# In the manner of DeepSeek-R1: the prompt opens a block, answers are rendered without it.
OPENED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def test_inline_reasoning_that_the_template_drops_is_trained(folder):
    """Each answer follows the prompt with an opened block, so each is a sample."""
    (folder / "chat_template.jinja").write_text(OPENED)
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>r1</think>b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "r2"},
    ]
    trained, remarks = encoded(folder, {"messages": turns})
    assert trained == ["r1\n</think>\n\nb<|im_end|>", "r2\n</think>\n\nd<|im_end|>"]
    assert remarks == {SEVERAL_SAMPLES: 1}
    assert encoded(folder, {"messages": turns}, train_on="last")[0] == trained[1:]


def test_both_answers_of_a_pair_follow_the_prompt_of_thinking(folder):
    """One of them has reasoning; the other one follows the same prompt with an empty block."""
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}"
    source = OPENED.replace("<think>\n{%", f"{switch}<think>\n{{% endif %}}{{%")
    (folder / "chat_template.jinja").write_text(source)
    question = {"role": "user", "content": "a"}
    thought = {"role": "assistant", "content": "<think>r</think>b"}
    plain = {"role": "assistant", "content": "c"}
    records = [
        {"prompt": [question], "chosen": [thought], "rejected": [plain]},
        {"prompt": [question], "chosen": [plain], "rejected": [{**plain, "content": "d"}]},
    ]
    tokenizer = TokenizerOptions(tokenizer_model=str(folder))
    chosen = PreprocessOptions(
        (), Path("x"), tokenizer, handler="PreferenceHandler", prompt_type="hf"
    )
    encoder = make_encoder(chosen)
    found = encoder(RecordBlock("file", 1, records, 1))
    assert not found.counts.broken
    cuts = np.cumsum(found.lengths[2])[:-1]
    prompts, said = [], []
    samples = zip(*(np.split(found.tokens[at], cuts) for at in (0, 2)), strict=True)
    for ids, labels in samples:
        trained = labels != IGNORED
        prompts.append(ids[: np.flatnonzero(trained)[0]].tolist())
        said.append(encoder.tokenizer.detokenize(labels[trained].tolist()))
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3]
    assert [text.replace("<|im_end|>", "") for text in said] == [
        *("r\n</think>\n\nb", "\n</think>\n\nc"),
        *("c", "d"),
    ]


def test_a_shortened_conversation_has_no_result_without_its_call(folder):
    turns = SHAREGPT["conversations"]
    whole = {**SHAREGPT, "conversations": [*turns, *turns]}
    rendered = [
        hf_template.load(folder).render(read(record)[0], tools=[DEFINED]).text
        for record in (SHAREGPT, whole)
    ]
    lengths = [len(re.sub(r"<\|im_\w+\|>", "x", text)) for text in rendered]  # in tokens
    (trained,), _ = encoded(folder, whole, seq_length=sum(lengths) // 2)
    assert trained == f"{CALL}No.<|im_end|>"
    (trained,), _ = encoded(folder, whole)
    assert trained == 2 * f"{CALL}No.<|im_end|>"


def test_what_a_template_does_not_render_is_refused(folder):
    messages, tools = read(OPENAI)
    chatml = templates.load("chatml")
    with pytest.raises(DataError, match="chatml does not render tools"):
        chatml.check([], tools)
    with pytest.raises(DataError, match="message 2: the chat template chatml does not render"):
        chatml.check(messages)
    source = SOURCE.replace("reasoning_content", "nothing")
    (folder / "chat_template.jinja").write_text(source)
    with pytest.raises(DataError, match=r"message 2: .* hf does not render reasoning_content"):
        hf_template.load(folder).check(messages, tools)
    (folder / "chat_template.jinja").write_text(SOURCE.replace("tools", "nothing"))
    with pytest.raises(DataError, match="hf does not render tools"):
        hf_template.load(folder).check(messages, tools)


def test_records_that_the_template_does_not_render_whole_are_not_trained(folder):
    tokenizer = TokenizerOptions(tokenizer_model=str(folder))
    handler = "OpenAIInstructionHandler"
    for name, reason in (("chatml", "message 2: "), ("llama2", "message 2: ")):
        chosen = PreprocessOptions((), Path("x"), tokenizer, handler=handler, prompt_type=name)
        found = make_encoder(chosen)(RecordBlock("file", 1, [OPENAI], 1))
        assert found.counts.documents == 0
        assert f"{reason}the chat template {name} does not render" in str(found.counts.broken[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"system": GLAIVE["system"] + "{broken"}, "no definition of a function: '{broken'"),
        ({"chat": "Hello.\nUSER: a"}, "text before the first turn is not trained: 'Hello.'"),
        (
            {"chat": "USER: a\nASSISTANT: <functioncall> weather"},
            "no call of a function: 'weather'",
        ),
        ({"chat": "USER: a\nASSISTANT: b\nFUNCTION RESPONSE: c"}, "the result of a call that"),
    ],
    ids=["definition", "beginning", "call", "result"],
)
def test_glaives_records_that_cannot_be_read_are_refused(change, said):
    handler = handlers.find("GlaiveHandler")
    with pytest.raises(ValueError, match=said):
        handler.conversations(handlers.RecordFields(GLAIVE | change, handler.keys))


# In the manner of Qwen3: an answer without reasoning has an empty block of it where it is last.
EMPTY_BLOCK = SOURCE.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and loop.last and not m.reasoning_content %}<think></think>"
    "{% endif %}{{ m.content }}",
)


def test_an_answer_that_others_change_is_the_last_of_a_sample(folder):
    """Calls without reasoning: each answer is trained as the model has to write it."""
    (folder / "chat_template.jinja").write_text(EMPTY_BLOCK)
    trained, remarks = encoded(folder, SHAREGPT)
    assert trained == [f"<think></think>{CALL}", "<think></think>No.<|im_end|>"]
    assert remarks[SEVERAL_SAMPLES] == 1
    weighted = {"tools": OPENAI["tools"], "messages": read(SHAREGPT)[0]}
    weighted["messages"][1]["weight"] = 0
    assert encoded(folder, weighted)[0] == ["<think></think>No.<|im_end|>"]


@pytest.mark.parametrize("name", ["thinking", "reasoning"])
def test_reasoning_has_the_name_that_the_template_reads(folder, name):
    source = SOURCE.replace("m.reasoning_content", f"m['{name}']")
    (folder / "chat_template.jinja").write_text(source)
    (trained,), _ = encoded(folder, OPENAI)
    assert trained == f"<think>look</think>\n{CALL}No.<|im_end|>"
    (folder / "chat_template.jinja").write_text(
        source.replace(f"m['{name}']", "m.other") + f"{{# {name} #}}"
    )
    with pytest.raises(DataError, match="does not render reasoning_content"):
        hf_template.load(folder).check(read(OPENAI)[0])
