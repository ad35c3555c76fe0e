"""Chat templates: the text, and which characters of it the assistant says."""

from __future__ import annotations

import json

import pytest
import yaml

from mindspeed.data import hf_template, templates
from mindspeed.data.chat_template import BEGUN, CHANGED, OTHER_PROMPT
from mindspeed.errors import ConfigError, DataError

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Add 1 and {content}"},
    {"role": "assistant", "content": "  x = 1\n"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Welcome"},
]
# Jinja programs written for these tests in the manner of each family's own.
JINJA = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}"
    "<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "llama2": "{% if messages[0].role == 'system' %}{% set sys = messages[0].content %}"
    "{% set turns = messages[1:] %}{% else %}{% set sys = '' %}{% set turns = messages %}"
    "{% endif %}"
    "{% for m in turns %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' }}{% if loop.first and "
    "sys %}{{ '<<SYS>>\n' + sys + '\n<</SYS>>\n\n' }}{% endif %}{{ m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
}
TOKENS = {
    "chatml": {"eos_token": "<|im_end|>"},
    "llama3": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    "llama2": {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}},
}


@pytest.fixture
def directory(tmp_path, request):
    config = TOKENS[request.param] | {"chat_template": JINJA[request.param]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def said(rendered: templates.Rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.spans]


@pytest.mark.parametrize("name", templates.names())
def test_spans_are_the_answers_and_their_stop_token(name):
    template = templates.load(name)
    rendered = template.render(CONVERSATION)
    answers = [m["content"] for m in CONVERSATION if m["role"] == "assistant"]
    assert len(rendered.spans) == 2
    for answer, span in zip(answers, said(rendered), strict=True):
        assert span.startswith(answer)
    last = said(rendered)[-1].removeprefix(answers[-1]).strip()
    assert last in (*template.stop, "")
    prompt = template.render(CONVERSATION[:-1], add_generation_prompt=True).text
    assert rendered.text.startswith(prompt)
    assert rendered.spans[-1][0] - len(prompt) == (name in ("llama2", "mistral"))  # one blank


@pytest.mark.parametrize("name", templates.names())
def test_default_system_prompt_is_used_if_none_is_given(name):
    template = templates.load(name)
    without = template.render(CONVERSATION[1:]).text
    empty = template.render([{"role": "system", "content": ""}, *CONVERSATION[1:]]).text
    assert (without != empty) == bool(template.default_system)
    assert template.default_system in without


@pytest.mark.parametrize("directory", JINJA, indirect=True)
def test_the_tokenizers_chat_template_equals_the_named_one(directory, request):
    name = request.node.callspec.params["directory"]
    named, own = templates.load(name), templates.load("hf", directory)
    for end in (None, 2):
        assert own.render(CONVERSATION[:end], end == 2).text == (
            named.render(CONVERSATION[:end], end == 2).text
        )
    assert said(own.render(CONVERSATION)) == said(named.render(CONVERSATION))
    assert own.stop[0] == named.stop[0]


def test_rendering_equals_transformers(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    source = (
        "{%- if tools is none %}\n  {{- bos_token }}\n{%- endif %}\n{% for m in messages %}\n"
        "    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "    {{ m | tojson }}\n{%- generation %}{{ m.content | trim }}{% endgeneration %}\n"
        "{% endfor %}\n"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0}, unk_token="<s>")), bos_token="<s>"
    )
    tokenizer.chat_template = source
    tokenizer.save_pretrained(tmp_path)
    ours = templates.load("hf", tmp_path)
    theirs = tokenizer.apply_chat_template(CONVERSATION[:2], tokenize=False)
    assert ours.render(CONVERSATION[:2]).text == theirs


def test_a_template_that_trims_or_shortens_answers_still_shows_them(tmp_path):
    file = tmp_path / "short.jinja"
    file.write_text(
        "{% for m in messages %}<{{ m.role }}>"
        "{{ m.content.split('</think>')[-1] | trim }}</{{ m.role }}>{% endfor %}"
    )
    template = templates.load(file, tmp_path)
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>why</think> because "},
    ]
    assert said(template.render(messages)) == ["because"]
    messages[1]["content"] = " because "
    assert said(template.render(messages)) == ["because"]


def test_a_template_that_drops_the_answers_is_refused(tmp_path):
    file = tmp_path / "none.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(DataError, match="changes the assistant's messages"):
        templates.load(file, tmp_path).render(CONVERSATION)


def test_template_from_a_yaml_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"user": "U:{content}\n", "assistant": "A:{content}$"}))
    template = templates.load(file)
    assert template.render(CONVERSATION[3:]).text == "U:Thanks\nA:Welcome$"
    with pytest.raises(DataError, match="mine does not support a system message"):
        template.render(CONVERSATION)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"role": "bot", "content": "x"}], "message 1: role 'bot' is unknown; allowed are system"),
        ([{"role": "user", "content": 3}], r"message 1 \(user\): content is int"),
        (["x"], "message 1: role None is unknown"),
        ([CONVERSATION[1], CONVERSATION[0]], "system message must be the first"),
    ],
)
def test_wrong_messages_are_named(messages, said):
    with pytest.raises(DataError, match=said):
        templates.load("llama3").render(messages)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("user: 'x'\nassistant: '{content}'", r"the field user must hold \{content\}"),
        ("usr: x", "unknown field 'usr'; allowed: "),
        ("- a", "fields such as user"),
        ("a: [", "no valid YAML"),
    ],
)
def test_wrong_template_files_are_named(tmp_path, content, said):
    file = tmp_path / "wrong.yaml"
    file.write_text(content)
    with pytest.raises(DataError, match=said):
        templates.load(file)


def test_unknown_names_and_missing_files(tmp_path):
    with pytest.raises(ConfigError, match="--prompt-type lama is unknown; allowed are alpaca, "):
        templates.load("lama")
    with pytest.raises(ConfigError, match="give its directory with --tokenizer-model"):
        templates.load("hf")
    with pytest.raises(DataError, match="has no chat template"):
        templates.load("hf", tmp_path)
    with pytest.raises(DataError, match="there is no such file"):
        templates.load(tmp_path / "no.yaml")


MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}thought {% generation %}{{ m.content }}{% endgeneration %}"
    "<|im_end|>{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize("inside", [False, True])
def test_generation_tags_decide_what_is_trained(tmp_path, inside):
    """The same characters as ``return_assistant_tokens_mask`` of transformers."""
    source = MARKED
    if inside:
        source = source.replace("{% endgeneration %}<|im_end|>", "<|im_end|>{% endgeneration %}")
    tokens = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": source}))
    conversation = [*CONVERSATION, {"role": "assistant", "content": ""}]
    rendered = hf_template.load(tmp_path).render(conversation)
    end = "<|im_end|>" if inside else ""
    answers = [m["content"] for m in conversation if m["role"] == "assistant"]
    assert said(rendered) == [answer + end for answer in answers]
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        [conversation], chat_template=source, return_assistant_tokens_mask=True, **tokens
    )
    assert [rendered.text] == list(texts)
    assert [span for span in rendered.spans if span[0] < span[1]] == [
        tuple(span) for span in spans[0] if span[0] < span[1]
    ]


def test_a_template_that_marks_no_answer_trains_nothing(tmp_path):
    source = "{% for m in messages %}{% if false %}{% generation %}x{% endgeneration %}{% endif %}"
    source += "{{ m.content }}{% endfor %}"
    config = {"eos_token": "</s>", "chat_template": source}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert hf_template.load(tmp_path).render(CONVERSATION).spans == ()


@pytest.mark.parametrize("name", templates.names())
def test_an_empty_answer_keeps_its_end(name):
    template = templates.load(name)
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    full = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (empty,), (whole,) = (said(template.render(c)) for c in (conversation, full))
    assert empty == whole.replace("yes", "") and empty


# In the manner of Qwen3: earlier turns lose their reasoning, the last answer always has some.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% if loop.last %}<think>\n"
    "{{ parts[0].removeprefix('<think>').strip() if parts | length > 1 else '' }}\n</think>\n\n"
    "{% endif %}{{ parts[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace(".removeprefix('<think>')", ".replace('<think>', '')")


@pytest.mark.parametrize(
    ("answers", "trained", "remarks"),
    [
        (["a"], ["<think>\n\n</think>\n\na<|im_end|>"], (BEGUN,)),
        (["<think>\nr\n</think>\n\na"], ["<think>\nr\n</think>\n\na<|im_end|>"], ()),
        (
            ["<think>r</think>a", "<think>r</think>b"],
            ["a<|im_end|>", "<think>\nr\n</think>\n\nb<|im_end|>"],
            (CHANGED,),
        ),
    ],
)
def test_an_answer_is_all_that_the_model_has_to_write_after_its_prompt(
    tmp_path, answers, trained, remarks
):
    config = TOKENS["chatml"] | {"chat_template": REASONING}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = hf_template.load(tmp_path)
    turns = [
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": a}] for a in answers
    ]
    messages = [message for turn in turns for message in turn]
    rendered = template.render(messages)
    assert said(rendered) == trained and rendered.remarks == remarks
    prompt = template.render(messages[:1], add_generation_prompt=True).text
    assert rendered.text.startswith(prompt) and rendered.spans[0][0] == len(prompt)
    assert template.stop == ("<|im_end|>",)


def test_a_prompt_that_generation_does_not_write_is_said(tmp_path):
    """In the manner of DeepSeek-R1: generation begins with reasoning, the history has none."""
    source = JINJA["chatml"].replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    config = TOKENS["chatml"] | {"chat_template": source}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    rendered = hf_template.load(tmp_path).render(CONVERSATION)
    assert rendered.remarks == (OTHER_PROMPT, OTHER_PROMPT)
    assert templates.load("chatml").render(CONVERSATION).remarks == ()


SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


def test_variables_of_a_template_are_set_and_unknown_ones_refused(tmp_path):
    config = {"eos_token": "<|im_end|>", "chat_template": SWITCHED}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    template = hf_template.load(tmp_path)
    assert template.with_variables({}) is template
    quiet = template.with_variables({"enable_thinking": False})
    user = CONVERSATION[:1]
    assert quiet.prompt(user) == template.prompt(user) + "<think></think>"
    assert quiet.with_variables({"enable_thinking": True}).prompt(user) == template.prompt(user)
    assert quiet.stop == template.stop == ("<|im_end|>",)
    for name in ("enable_thought", "messages", "add_generation_prompt"):
        with pytest.raises(ConfigError, match=f"hf has no variable '{name}'"):
            template.with_variables({name: False})
    with pytest.raises(ConfigError, match="chatml has no variable 'enable_thinking'"):
        templates.load("chatml").with_variables({"enable_thinking": False})
