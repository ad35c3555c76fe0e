"""Chat templates: a conversation is rendered as one text with the spans of the assistant.

    load("llama3").render([{"role": "user", "content": "Hi"}, {"role": "assistant", ...}])
        .text   <|begin_of_text|><|start_header_id|>user<|end_header_id|>\\n\\nHi<|eot_id|>...
        .spans  ((start, end), ...)  character ranges of the answers with their stop tokens

Training tokenizes ``text`` once and trains the tokens that overlap a span; generation renders with
``add_generation_prompt=True`` and ends at one of ``stop``. Formats are data (``templates.yaml``),
and your own format is a YAML file with the same fields:

================== ==============================================================================
``prefix``         start of the text (bos)
``system``         the system message as a separate block, or
``system_in_user`` the system message within the first user message (``{system}``, ``{content}``)
``default_system`` the system message of a conversation without one
``user``           a user message; ``{content}`` is its text
``assistant``      an answer: up to ``{content}`` not trained, ``{content}`` and the rest trained
``separator``      follows an answer, not trained
``end``            follows the last answer, trained
``end_replaces``   the mark after an earlier answer whose label becomes ``end``
``generation``     start of an answer (default: ``assistant`` up to ``{content}``)
``stop``           strings at which generation ends
``special``        strings that must be single tokens of the tokenizer
``plain``          the tokenizer adds its bos, because the text contains none
================== ==============================================================================

The name ``hf`` selects the tokenizer's chat template (:mod:`mindspeed.data.hf_template`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from mindspeed.data.chat_template import (
    ChatTemplate,
    Message,
    Rendered,
    Span,
    Tools,
    checked,
)
from mindspeed.errors import ConfigError, DataError
from mindspeed.parsing import read_yaml

_SUFFIXES = (".yaml", ".yml", ".jinja")


@dataclass(frozen=True)
class TextTemplate(ChatTemplate):
    """A format described by strings; the fields are those of the table above."""

    name: str
    user: str
    assistant: str
    description: str = ""
    prefix: str = ""
    system: str = ""
    system_in_user: str = ""
    default_system: str = ""
    separator: str = ""
    end: str = ""
    end_replaces: str = ""
    generation: str | None = None
    stop: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    plain: bool = False

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Tools = (),
    ) -> Rendered:
        system, turns = self._system_and_turns(messages)
        text = self.prefix
        if system and self.system:
            text += self.system.replace("{content}", system)
        spans: list[Span] = []
        replaced = []
        for index, (role, content) in enumerate(turns):
            if role == "user":
                if spans and self.end_replaces and turns[index - 1][0] == "assistant":
                    at = len(text) + self.user.index(self.end_replaces)
                    replaced.append((at, at + len(self.end_replaces), self.end))
                if system and self.system_in_user:
                    first, _, second = self.system_in_user.partition("{system}")
                    content = first + system + second.replace("{content}", content)
                    system = ""
                before, _, after = self.user.partition("{content}")
                text += before + content + after
                continue
            before, _, after = self.assistant.partition("{content}")
            if index == len(turns) - 1:
                after += self.end
            start = len(text) + len(before)
            text += before + content + after
            spans.append((start, len(text)))
            text += self.separator
        if add_generation_prompt:
            before = self.assistant.partition("{content}")[0]
            text += before if self.generation is None else self.generation
        return Rendered(text, tuple(spans), tuple(replaced))

    def _system_and_turns(self, messages: Sequence[Message]) -> tuple[str, list[tuple[str, str]]]:
        turns = [checked(message, index) for index, message in enumerate(messages)]
        system = self.default_system
        if turns and turns[0][0] == "system":
            system = turns.pop(0)[1]
        if any(role == "system" for role, _ in turns):
            raise DataError("a system message must be the first message of a conversation")
        if system and not (self.system or self.system_in_user):
            raise DataError(f"the chat template {self.name} does not support a system message")
        return system, turns


def load(name_or_path: str | Path, tokenizer: Any = None) -> ChatTemplate:
    """Load a chat template by name or from a file.

    Args:
        name_or_path: a name of :func:`names`, ``hf``, a YAML file with the fields of one template,
            a ``.jinja`` file, or a tokenizer directory (with its chat template).
        tokenizer: for ``hf`` and ``.jinja``: a tokenizer of :mod:`mindspeed.data.tokenizer` or a
            directory with its files.

    Raises:
        ConfigError: unknown name (the message lists the names); ``hf`` without a tokenizer.
        DataError: a file is missing or invalid, or the tokenizer has no chat template.
    """
    name, path = str(name_or_path), Path(name_or_path)
    if name in names():
        return builtin()[name]
    if name == "hf" or path.suffix == ".jinja" or path.is_dir():
        from mindspeed.data import hf_template

        if name == "hf":
            return hf_template.load(tokenizer)
        return hf_template.load(path if path.is_dir() else tokenizer, source=path)
    if path.suffix in _SUFFIXES:
        if not path.is_file():
            raise DataError(f"--prompt-type {path}: there is no such file")
        return _from_mapping(path.stem, _read(path), str(path))
    raise ConfigError(
        f"--prompt-type {name} is unknown; allowed are {', '.join(names())}, hf (the tokenizer's "
        "own chat template) or a .yaml or .jinja file"
    )


def names() -> tuple[str, ...]:
    """The templates that come with the library."""
    return tuple(builtin())


@cache
def builtin() -> dict[str, TextTemplate]:
    """All templates of ``templates.yaml`` by name."""
    path = Path(__file__).with_name("templates.yaml")
    return {name: _from_mapping(name, entry, str(path)) for name, entry in _read(path).items()}


def _read(path: Path) -> dict[str, Any]:
    content = read_yaml(path, str(path), DataError)
    if not isinstance(content, dict):
        raise DataError(f"{path}: fields such as user: and assistant: are expected")
    return content


def _from_mapping(name: str, entry: Mapping[str, Any], source: str) -> TextTemplate:
    allowed = [field.name for field in fields(TextTemplate) if field.name != "name"]
    for key in entry:
        if key not in allowed:
            raise DataError(f"{source}: {name}: unknown field {key!r}; allowed: {allowed}")
        texts = entry[key] if isinstance(entry[key], list) else [entry[key]]
        if not all(isinstance(text, str | bool | None) for text in texts):
            raise DataError(f"{source}: {name}: the field {key} must be a text")
    for key in ("user", "assistant"):
        if "{content}" not in str(entry.get(key, "")):
            raise DataError(f"{source}: {name}: the field {key} must hold {{content}}")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    return TextTemplate(name, **values)
