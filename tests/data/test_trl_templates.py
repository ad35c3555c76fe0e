"""The chat templates that trl ships: the text is transformers', and answers are trl's masks."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mindspeed.data import hf_template
from mindspeed.data.chat_template import ChangedAnswerError, Rendered
from mindspeed.errors import DataError
from tests.support.lazy import needs

needs("trl", "transformers")

FOLDER = Path(next(iter(importlib.util.find_spec("trl").submodule_search_locations or ())))
TEMPLATES = sorted((FOLDER / "chat_templates").glob("*.jinja"))
TOKENS = {name: f"<{name}>" for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
SPECIAL = re.compile(r"<\|[^|<>\s]+\|>|<\uff5c[^<>]+\uff5c>|<end_of_turn>|<turn\|>|</s>")
IMAGES = ("idefics3", "smolvlm", "llava_next", "llava_next_training")
"""Their templates want the parts of a content."""
OPENS_RESULTS = "diffusion_gemma"
"""Its template writes the beginning of a result behind a call, and no prompt behind a result."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Delft"}}}]
RESULT = {"role": "tool", "name": "weather", "content": "dry"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [user("hi"), answer("hello")],
    "two": [user("hi"), answer("hello"), user("more"), answer("ok then")],
    "system": [{"role": "system", "content": "be brief"}, user("hi"), answer("hello")],
    "empty": [user("hi"), answer("")],
    "reasoning": [user("hi"), answer("hello", reasoning_content="think")],
    "reasoning twice": [
        *(user("hi"), answer("hello", reasoning_content="think")),
        *(user("more"), answer("ok then", reasoning_content="again")),
    ],
    "call": [user("rain?"), answer("", tool_calls=CALL), RESULT, answer("No.")],
    "call with reasoning": [
        user("rain?"),
        *(answer("", reasoning_content="look", tool_calls=CALL), RESULT),
        answer("No.", reasoning_content="so"),
    ],
}


def loaded(source: str, folder: Path) -> hf_template.JinjaTemplate:
    added = {
        str(number): {"content": text, "special": True}
        for number, text in enumerate(sorted({*SPECIAL.findall(source)}))
    }
    config = {**TOKENS, "chat_template": source, "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return hf_template.load(folder)


def rendered(template: hf_template.JinjaTemplate, name: str) -> Rendered | None:
    """Our text and spans; None where a record would be refused, or split into samples."""
    tools = TOOLS if name.startswith("call") else []
    try:
        template.check(CONVERSATIONS[name], tools)
        return template.render(CONVERSATIONS[name], tools=tools)
    except (DataError, ChangedAnswerError):
        return None


def of_transformers(source: str, name: str) -> tuple[str, list[tuple[int, int]]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        [CONVERSATIONS[name]],
        chat_template=source,
        tools=TOOLS if name.startswith("call") else None,
        return_assistant_tokens_mask="generation" in source,
        **TOKENS,
    )
    return texts[0], [tuple(span) for span in spans[0]] if spans else []


def marked(spans: Any, length: int) -> list[bool]:
    found = [False] * length
    for start, end in spans:
        found[start:end] = [True] * (end - start)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_texts_and_masks_are_those_of_transformers_and_trl(path, tmp_path):
    source = path.read_text()
    template = loaded(source, tmp_path)
    twin = path.with_name(f"{path.stem}_training.jinja")
    compared = 0
    for name in CONVERSATIONS:
        ours = rendered(template, name)
        if ours is None:
            continue
        text, spans = of_transformers(source, name)
        assert ours.text == text, name
        compared += 1
        if path.stem.endswith("_training"):
            assert marked(ours.spans, len(text)) == marked(spans, len(text)), name
        elif twin.exists() and path.stem != OPENS_RESULTS:
            theirs, spans = of_transformers(twin.read_text(), name)
            _check_twin(ours, theirs, spans, name)
    assert compared >= 3 or path.stem in IMAGES


def _check_twin(ours: Rendered, text: str, spans: list[tuple[int, int]], name: str) -> None:
    """trl's template for training marks what ours trains, and what the prompt has or blanks."""
    if text != ours.text:  # trl has changed it, to keep the reasoning of earlier answers
        return
    both = zip(marked(ours.spans, len(text)), marked(spans, len(text)), text, strict=True)
    more = "".join(letter for mine, other, letter in both if mine and not other)
    assert not more.strip(), (name, more)
