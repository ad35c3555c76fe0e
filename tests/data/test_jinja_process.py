"""Chat templates that use up time or memory, or raise, give one error message."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from mindspeed.data import jinja_process, templates
from mindspeed.data.hf_template import JinjaTemplate
from mindspeed.data.jinja_process import JinjaProcess
from mindspeed.errors import ConfigError, DataError, MindSpeedError

USER = [{"role": "user", "content": "hello"}]
MEMORY, TIME = "needs more than 1024 MiB of memory", "needs more than 0.5 seconds of CPU time"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
)
RECURSION = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
GREEDY = {
    "a constant": ("{{ 'a' * 10**10 }}", MEMORY),
    "a repeated text": ("{{ messages[0].content * 10**10 }}", MEMORY),
    "a filter": ("{{ messages[0].content | center(10**10) }}", MEMORY),
    "a method": ("{{ messages[0].content.ljust(10**10) }}", MEMORY),
    "a format": ("{{ '{:>10000000000}'.format(messages[0].content) }}", MEMORY),
    "doubling": (DOUBLING, f"({MEMORY}|{TIME})"),
    "a long text": (
        "{{ messages[0].content * 10**7 }}",
        "makes a text of more than 16 Mi characters",
    ),
    "nested loops": (LOOP, TIME),
    "a power": ("{{ (2 + messages | length) ** (10 ** 8) }}", TIME),
    "a long loop": ("{% for a in range(10**9) %}{% endfor %}", "fails: OverflowError: Range too"),
    "recursion": (RECURSION, "fails: RecursionError: maximum recursion depth"),
    "deep parentheses": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "fails: RecursionError"),
    "include": ("{% include 'x' %}", "fails: TypeError: no loader for this environment"),
    "import": ("{% import 'x' as x %}", "fails: TypeError: no loader for this environment"),
    "extends": ("{% extends 'x' %}", "fails: TypeError: no loader for this environment"),
    "division": ("{{ 1 / (messages | length - 1) }}", "fails: ZeroDivisionError"),
    "wrong types": ("{{ messages + 1 }}", "fails: TypeError: can only concatenate list"),
    "wrong date": ("{{ strftime_now(1) }}", "fails: TypeError"),
    "the interpreter": ("{{ ''.__class__.__mro__ }}", "refuses .* '__class__' .* is unsafe"),
    "its own refusal": ("{{ raise_exception('not so') }}", "refuses the conversation: not so"),
    "no Jinja": ("{% for %}", "is not valid Jinja: "),
}


@pytest.fixture(autouse=True)
def _half_a_second(monkeypatch):
    monkeypatch.setattr(jinja_process, "SECONDS", 0.5)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("case", GREEDY)
def test_an_excessive_or_invalid_template_is_one_error_message(case):
    source, said = GREEDY[case]
    with pytest.raises(MindSpeedError, match=f"^the chat template t {said}") as caught:
        JinjaTemplate("t", source, {}).render(USER)
    assert isinstance(caught.value, ConfigError) == ("more than" in str(caught.value))


def test_rendering_continues_after_a_conversation_exceeded_the_limits():
    source = "{% for m in messages %}{% for n in range(m.n) %}{% for k in range(m.n) %}"
    process = JinjaProcess("t", source + "{% endfor %}{% endfor %}{{ m.n }}{% endfor %}")
    for _ in range(2):
        assert process.render([{"messages": [{"n": 3}]}] * 2) == ["3", "3"]
        with pytest.raises(ConfigError, match="CPU time: choose another --prompt-type"):
            process.render([{"messages": [{"n": 99999}]}])
    with pytest.raises(DataError, match="refuses the conversation: 'm' is undefined"):
        JinjaProcess("t", "{{ m.n }}").render([{}])


def test_a_killed_process_is_reported_and_restarted():
    process = JinjaProcess("t", "{{ a }}")
    os.kill(process._child._process.pid, signal.SIGKILL)
    with pytest.raises(ConfigError, match="the chat template t ended its process: status -9"):
        process.render([{"a": 1}])
    assert process.render([{"a": 1}]) == ["1"]


def test_non_json_values_are_refused_and_any_text_is_accepted():
    process = JinjaProcess("t", "{{ a }}")
    with pytest.raises(DataError, match=r"takes text, numbers, lists and mappings: .*object"):
        process.render([{"a": object()}])
    for text in ("\ud800 alone", "中文 🙂", "\0\r\n", ""):
        assert process.render([{"a": text}]) == [text]


def _rendered(queue, process):
    queue.put([process.render([{"a": number}])[0] for number in range(50)])


def test_a_forked_process_starts_its_own_renderer():
    process = JinjaProcess("t", "{{ a }}")
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_rendered, args=(queue, process))
    child.start()
    assert [process.render([{"a": n}])[0] for n in range(50)] == queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert process.render([{"a": "still"}]) == ["still"]


def test_the_child_ends_with_its_template():
    process = JinjaProcess("t", "{{ a }}")
    child = process._child._process
    del process
    assert child.poll() == 0


def test_helpers_and_options_are_those_of_transformers():
    """Every keyword of ``tojson``, whitespace control, loop controls, dates."""
    from transformers.utils.chat_template_utils import render_jinja_template

    conversation = [{"role": "user", "content": "<é'\n>", "b": [1, None], "a": {"z": 1.5}}]
    for source in (
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}",
        "{{ messages | tojson(separators=(',', ':'), sort_keys=True, ensure_ascii=True) }}",
        "{% for m in messages %}\n  {% if m.a %}\n  {{ m.content }}\n  {% break %}\n{% endif %}"
        "{% endfor %}\n",
        "{{ strftime_now('%Y') }}{{ messages[0].missing }}{{ tools is none }}",
        "{%- generation %} {{ messages[0].content }}\n{% endgeneration %} end",
    ):
        theirs = render_jinja_template([conversation], chat_template=source)[0]
        ours = JinjaProcess("t", source).render(
            [{"messages": conversation, "tools": None, "documents": None}]
        )
        assert ours == theirs, source


def test_an_excessive_template_file_is_refused_before_work_starts(tmp_path):
    (tmp_path / "greedy.jinja").write_text("{{ 'a' * 10**10 }}")
    with pytest.raises(ConfigError, match=r"greedy\.jinja needs more than 1024 MiB of memory"):
        templates.load(tmp_path / "greedy.jinja", tmp_path)


def test_a_conversation_that_exceeds_the_limits_ends_preprocessing(tmp_path):
    """Records that a template refuses are skipped; five seconds a record would be hours."""
    source = "{% for a in range(100) %}{% for b in range(messages[0].content | length) %}"
    source += "{% for c in range(999) %}{% endfor %}{% endfor %}{% endfor %}"
    template = JinjaTemplate("t", source, {})
    with pytest.raises(ConfigError, match="CPU time"):
        template.render([{"role": "user", "content": "a" * 999}])
