"""Reasoning in samples: an answer follows the prompt from which inference generates it."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed.data.chat_template import BEGUN, NO_PROMPT, OTHER_PROMPT, ChangedAnswerError
from mindspeed.errors import DataError
from tests.data.test_trl_templates import FOLDER, TOKENS, answer, loaded, user
from tests.support.lazy import needs

needs("trl", "transformers")

DEEPSEEK_END = "<\uff5cend\u2581of\u2581sentence\uff5c>"
# In the manner of DeepSeek-V3.1: a switch opens or closes the block in the prompt, and answers are
# rendered after a closed one, without their reasoning.
DEEPSEEK_V3_1 = (
    "{% if thinking is not defined %}{% set thinking = false %}{% endif %}{{ bos_token }}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<\uff5cAssistant\uff5c></think>' + m['content'].split('</think>')[-1] + END }}"
    "{% else %}{{ '<\uff5cUser\uff5c>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<\uff5cAssistant\uff5c>"
    "{% if thinking %}<think>{% else %}</think>{% endif %}{% endif %}"
).replace("END", f"'{DEEPSEEK_END}'")
# DeepSeek-R1's first template: the model opens the block itself.
R1_OPENS = DEEPSEEK_V3_1.partition("{% if thinking %}<think>")[0].replace("</think>'", "'", 1)
R1_OPENS += "{% endif %}"

SWITCH, DEEPSEEK_SWITCH = "enable_thinking", "thinking"
QWEN = ("why\n</think>\n\nhello<|im_end|>", "hello<|im_end|>", SWITCH)
R1 = (f"why\n</think>\n\nhello{DEEPSEEK_END}", f"\n</think>\n\nhello{DEEPSEEK_END}", "")
NEMOTRON = ("why\n</think>\nhello<|im_end|>", "hello<|im_end|>", SWITCH)
NEMOTRON_NEW = ("why</think>hello<|im_end|>", "hello<|im_end|>", SWITCH)
HARMONY = "<|channel|>final<|message|>hello<|return|>"
GENERATED: dict[str, tuple[str, str, str]] = {
    "qwen3": ("<think>\nwhy\n</think>\n\nhello<|im_end|>", "hello<|im_end|>", SWITCH),
    "qwen3_5_think": QWEN,
    "qwen3_5_nothink": QWEN,
    "qwen3_6": QWEN,
    "qwen3_8": QWEN,
    "glm4moe": ("\n<think>why</think>\nhello", "\nhello", SWITCH),
    "nemotron_3_nano": NEMOTRON,
    "nemotron_3_super": NEMOTRON,
    "nemotron_3_ultra": NEMOTRON_NEW,
    "nemotron_3_5_lightning": NEMOTRON_NEW,
    "gptoss": (
        f"<|channel|>analysis<|message|>why<|end|><|start|>assistant{HARMONY}",
        *(HARMONY, ""),
    ),
    "gemma4_v5": ("<|channel>thought\nwhy\n<channel|>hello<turn|>", "hello<turn|>", SWITCH),
    "deepseek_r1_distill": R1,
    "deepseekv3": R1,
    "DeepSeek-V3.1": (f"why</think>hello{DEEPSEEK_END}", f"hello{DEEPSEEK_END}", DEEPSEEK_SWITCH),
    "R1 opens": (f"<think>\nwhy\n</think>\n\nhello{DEEPSEEK_END}", f"hello{DEEPSEEK_END}", ""),
}
"""What a model writes after its prompt: with reasoning, without, and the switch of thinking."""
DROPS = ("deepseek_r1_distill", "deepseekv3", "DeepSeek-V3.1", "R1 opens")
"""Templates that render no reasoning, so that their own text is no oracle of it."""
ANSWERS = {
    "field": answer("hello", reasoning_content="why"),
    "inline": answer("<think>\nwhy\n</think>\n\nhello"),
    "none": answer("hello"),
    "empty block": answer("<think>\n\n</think>\n\nhello"),
}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    "first": [user("hi")],
    "later": [user("a"), answer("b", weight=0), user("hi")],
}


def source_of(name: str) -> str:
    ours = {"DeepSeek-V3.1": DEEPSEEK_V3_1, "R1 opens": R1_OPENS}
    return ours.get(name) or (FOLDER / "chat_templates" / f"{name}.jinja").read_text()


def of_transformers(source: str, messages: list[dict[str, Any]], prompt: bool, **more: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = [{k: v for k, v in m.items() if k != "weight"} for m in messages]
    return render_jinja_template(
        [plain], chat_template=source, add_generation_prompt=prompt, **TOKENS, **more
    )[0][0]


@pytest.mark.parametrize("name", GENERATED)
def test_a_sample_is_the_prompt_of_inference_and_what_the_model_writes(name, tmp_path):
    source = source_of(name)
    template = loaded(source, tmp_path)
    *both, switch = GENERATED[name]
    for form, said in ANSWERS.items():
        reasons = form in ("field", "inline")
        variables = {switch: reasons} if switch else {}
        for history in HISTORIES.values():
            messages = [*history, said]
            template.check(messages)
            found = template.sample(messages)
            prompt = of_transformers(source, history, prompt=True, **variables)
            generated = both[0] if reasons else both[1]
            start, end = found.spans[-1]
            assert found.text[:start] == prompt, form
            assert found.text[start:end] == generated, form
            assert not found.text[end:].strip(), form
            assert OTHER_PROMPT not in found.remarks
            assert not (reasons and BEGUN in found.remarks)
            if not (reasons and name in DROPS) and both[1][:1] != "\n":
                name_of = "thinking" if name == "gptoss" else "reasoning_content"
                whole = [*history, {**answer("hello"), **({name_of: "why"} if reasons else {})}]
                assert of_transformers(source, whole, False, **variables) == found.text, form


@pytest.mark.parametrize("name", ["deepseek_r1_distill", "qwen3", "qwen3_5_nothink"])
def test_an_answer_that_follows_another_prompt_is_a_sample_of_its_own(name, tmp_path):
    template = loaded(source_of(name), tmp_path)
    thought = answer("b", reasoning_content="r")
    for conversation in (
        [user("a"), thought, user("c"), thought],
        [user("a"), answer("b"), user("c"), answer("d")],
        [user("a"), thought, user("c"), answer("d")],
        [user("a"), answer("b"), user("c"), thought],
    ):
        with pytest.raises(ChangedAnswerError):
            template.sample(conversation)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "nemotron_3_nano", "deepseek_r1_distill"])
@pytest.mark.parametrize("weight", [{}, {"weight": 0}])
def test_an_answer_before_the_first_question_is_not_trained(name, weight, tmp_path):
    """A greeting: templates refuse to write a prompt for it, and so does inference."""
    template = loaded(source_of(name), tmp_path)
    found = template.sample([answer("yo", **weight), user("hi"), answer("hello")])
    assert found.spans[0] == (0, 0) and "yo" in found.text
    assert found.text[slice(*found.spans[1])] == GENERATED[name][1]
    assert (NO_PROMPT in found.remarks) is (not weight)


def test_an_empty_answer_of_a_template_without_an_end_is_a_sample(tmp_path):
    template = loaded(source_of("glm4moe"), tmp_path)
    assert template.sample([user("hi"), answer("")]).spans[0][1] > 0


def test_the_answers_of_a_pair_follow_one_prompt(tmp_path):
    template = loaded(source_of("qwen3_6"), tmp_path)
    thought, plain = (
        template.sample([user("hi"), one], thinking=True)
        for one in (ANSWERS["inline"], ANSWERS["none"])
    )
    (first, _), (second, end) = thought.spans[0], plain.spans[0]
    assert thought.text[:first] == plain.text[:second]
    assert plain.text[second:end] == "\n</think>\n\nhello<|im_end|>"


def test_variables_that_are_given_stay(tmp_path):
    template = loaded(source_of("qwen3_6"), tmp_path).with_variables({SWITCH: True})
    found = template.sample([user("hi"), answer("hello")])
    assert found.text[slice(*found.spans[0])] == "\n</think>\n\nhello<|im_end|>"
    assert found.remarks == (BEGUN,)
    off = template.with_variables({SWITCH: False})
    assert off.sample([user("hi"), ANSWERS["field"]]).remarks == (OTHER_PROMPT,)


def test_a_turn_ends_with_the_mark_of_the_next_where_it_has_none_of_its_own(tmp_path):
    template = loaded(source_of("glm4moe"), tmp_path)
    found = template.sample([user("a"), answer("b"), user("c"), answer("d")])
    assert [found.text[slice(*span)] for span in found.spans] == ["\nb<|user|>", "\nd"]


def test_the_prompt_that_generates_so_is_said(tmp_path):
    template = loaded(source_of("qwen3"), tmp_path)
    (remark,) = template.sample([user("hi"), answer("hello")]).remarks
    assert "without reasoning" in remark and '{"enable_thinking": false}' in remark
    assert template.sample([user("hi"), ANSWERS["field"]]).remarks == ()


@pytest.mark.parametrize("name", ["gemma4", "gemma4_v3", "deepseek_r1_distill_training"])
def test_reasoning_that_a_template_leaves_out_is_refused(name, tmp_path):
    template = loaded(source_of(name), tmp_path)
    with pytest.raises(DataError, match=r"message 2: .* render the reasoning|render reasoning"):
        messages = [user("hi"), ANSWERS["field"]]
        template.check(messages)
        template.sample(messages)


def test_reasoning_after_a_result_is_refused_where_the_prompt_opens_none(tmp_path):
    template = loaded(source_of("deepseekv3"), tmp_path)
    call = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    before = [user("hi"), answer("", tool_calls=call, weight=0), {"role": "tool", "content": "1"}]
    found = template.sample([*before, answer("one")])
    assert found.text[slice(*found.spans[-1])] == f"one{DEEPSEEK_END}"
    with pytest.raises(DataError, match=r"message 4: .* does not render the reasoning"):
        template.sample([*before, answer("one", reasoning_content="why")])


def test_earlier_reasoning_is_not_lost_in_a_template_that_marks_answers(tmp_path):
    template = loaded(source_of("lfm2_2_5"), tmp_path)
    thought = answer("b", reasoning_content="why")
    with pytest.raises(ChangedAnswerError):
        template.sample([user("a"), thought, user("c"), thought])
    found = template.sample([user("a"), {**thought, "weight": 0}, user("c"), thought])
    assert found.text[slice(*found.spans[-1])] == "<think>why</think>b<|im_end|>\n"


def test_answers_of_a_text_format_keep_their_inline_reasoning(tmp_path):
    """A model without reasoning of its own is taught it as a part of the content."""
    template = loaded(source_of("llama3"), tmp_path)
    found = template.sample([user("hi"), ANSWERS["inline"]])
    assert "<think>\nwhy\n</think>\n\nhello" in found.text[slice(*found.spans[0])]
