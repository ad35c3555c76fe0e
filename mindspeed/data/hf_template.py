"""The Jinja chat template of a Hugging Face tokenizer, with the spans of the answers.

The template is rendered as in transformers (same options, same helper functions), without importing
transformers, in Jinja's sandbox and in a child process with time and memory limits
(:mod:`mindspeed.data.jinja_process`). Jinja does not tell which characters come from the assistant,
so the template runs twice: once with the answers, once with marks in their place. The text around
the marks is the format; removing it from the first rendering leaves the answers, even if a template
strips them or drops the reasoning of earlier turns. What a template writes between the prompt that
it generates from and an answer (gpt-oss: the channel) belongs to the answer: at inference the model
has to write it. In a template with ``{% generation %}`` tags exactly the text between the tags is
trained.

:meth:`JinjaTemplate.render` gives the text of transformers. Samples come from
:meth:`JinjaTemplate.sample`: each answer to train follows the prompt from which the model generates
it, with thinking switched on where it has reasoning and off where it has none, if the template has
such a switch (:mod:`mindspeed.data.reasoning`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from mindspeed.data import reasoning
from mindspeed.data.chat_template import (
    BEGUN,
    CHANGED,
    OTHER_PROMPT,
    ROLES,
    ChangedAnswerError,
    ChatTemplate,
    Message,
    Rendered,
    Span,
    Tools,
    answers_of,
    around,
    end_of_header,
    equal_characters,
    located,
    mark,
    prompted,
    remarks_on,
    switched,
    trained_answers,
    without_prompt,
)
from mindspeed.data.hf_tokenizer import check_config, read_config
from mindspeed.data.jinja_process import JinjaProcess
from mindspeed.data.jinja_renderer import GENERATION
from mindspeed.errors import ConfigError, DataError
from mindspeed.parsing import read_json, read_text

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_GENERATION_MARKS = (
    "\N{OBJECT REPLACEMENT CHARACTER}begin\N{OBJECT REPLACEMENT CHARACTER}",
    "\N{OBJECT REPLACEMENT CHARACTER}end\N{OBJECT REPLACEMENT CHARACTER}",
)
_PARTS_OF_ANSWERS = ("tool_calls", "reasoning_content")
_SWITCHES = ("enable_thinking", "thinking")
"""Variables with which templates switch reasoning on and off."""
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_OURS = ("messages", "tools", "documents", "add_generation_prompt", *_TOKEN_NAMES)


def load(tokenizer: Any, source: Path | None = None) -> JinjaTemplate:
    """The chat template of a tokenizer, or of the ``.jinja`` file ``source`` with its tokens.

    Raises:
        ConfigError: no tokenizer is given.
        DataError: it has no chat template, or one that is not valid Jinja.
    """
    directory = getattr(tokenizer, "directory", tokenizer)
    if directory is None:
        raise ConfigError(
            "--prompt-type hf uses the chat template of a Hugging Face tokenizer: give its "
            "directory with --tokenizer-model"
        )
    directory = Path(directory)
    config = _config(directory)
    if source is not None and source.suffix == ".jinja":
        text = read_text(source, str(source), DataError)
        return JinjaTemplate(str(source), text, config)
    return JinjaTemplate("hf", _template(directory, config), config)


class JinjaTemplate(ChatTemplate):
    """A Jinja chat template with the special tokens of its tokenizer.

    Args:
        name: name in messages.
        source: the Jinja program.
        config: ``tokenizer_config.json``.
    """

    plain = False

    def __init__(self, name: str, source: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self._program, self._source = JinjaProcess(name, source), source
        self._marks_answers = bool(_GENERATION_TAG.search(source))
        self._tokens = {key: _content(config.get(key)) for key in _TOKEN_NAMES}
        self._known = _special_tokens(config)
        self._variables: Mapping[str, Any] = {}
        others = [name for name in ("thinking", "reasoning") if _reads(source, name)]
        known = self._knows("reasoning_content")
        self._reasoning = others[0] if others and not known else ""
        self.special = ()
        self._examine()

    def with_variables(self, variables: Mapping[str, Any]) -> JinjaTemplate:
        if not variables:
            return self
        for name in variables:
            if name in _OURS or not self._knows(name):
                raise ConfigError(f"the chat template {self.name} has no variable {name!r} to set")
        found = copy.copy(self)
        found._variables = {**self._variables, **variables}
        found._examine()
        return found

    def _examine(self) -> None:
        """Find out what the template does with examples."""
        self._example_prompt, self._header = self._generation_prompt()
        self.stop = self._stop()
        self._renders_reasoning = self._shows({"content": "a", "reasoning_content": mark(0)})
        inline = {"content": f"<think>\n{mark(0)}\n</think>\n\na"}
        self._drops_reasoning = not self._renders_reasoning and (
            reasoning.has_marks(self._header) or not self._shows(inline)
        )
        self._thinking: dict[bool, JinjaTemplate] = {}
        for name in _SWITCHES:
            if self._knows(name) and name not in self._variables and not self._thinking:
                ways = {on: self.with_variables({name: on}) for on in (True, False)}
                if ways[True]._example_prompt != ways[False]._example_prompt:
                    self._thinking, self._switch = ways, name

    def _shows(self, answer: Message) -> bool:
        """Whether the first mark is in the text of an answer; so if the example is refused."""
        question = {"role": "user", "content": "a"}
        try:
            (text,) = self._run(False, (), [question, {"role": "assistant", **answer}])
        except DataError:
            return True
        return mark(0) in text

    @property
    def source(self) -> str:
        return self._source

    @property
    def renders_tools(self) -> bool:
        return self._knows("tools")

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Tools = (),
    ) -> Rendered:
        if self._marks_answers:
            return self._render_marked(messages, add_generation_prompt, tools)
        if any(message.get(name) for message in messages for name in _PARTS_OF_ANSWERS):
            return self._render_turns(messages, tools)
        marked = [
            {**message, "content": mark(index)} if message.get("role") == "assistant" else message
            for index, message in enumerate(messages)
        ]
        answers = [index for index, m in enumerate(messages) if m.get("role") == "assistant"]
        text, frame = self._run(add_generation_prompt, tools, messages, marked)
        parts = around(frame, [mark(index) for index in answers])
        contents = [messages[index]["content"] for index in answers]
        ends = [end_of_header(part, self._header) for part in (parts or ())[:-1]]
        spans = located(text, parts, ends, contents)
        if parts is None or spans is None:
            raise DataError(
                f"the chat template {self.name} changes the assistant's messages, so they cannot "
                "be located in the text: choose another --prompt-type, or remove reasoning "
                "(<think>...</think>) from the answers"
            )
        remarks = []
        for (start, end), answer in zip(spans, contents, strict=True):
            remarks += remarks_on(text[start:end], answer)
            if not text.endswith(self._header, 0, start):
                remarks.append(OTHER_PROMPT)
        spans = [(a, b + self._stop_length(text[b:])) for a, b in spans]
        return Rendered(text, tuple(spans), remarks=tuple(remarks))

    def sample(
        self, messages: Sequence[Message], tools: Tools = (), thinking: bool | None = None
    ) -> Rendered:
        if self._renders_reasoning or self._drops_reasoning:
            messages = [reasoning.with_field(message) for message in messages]
        if self._marks_answers:
            return self._sample_marked(messages, tools)
        kinds = {
            bool(messages[index].get("reasoning_content")) for index in trained_answers(messages)
        }
        if not self._thinking or not kinds:
            return self._sample_turns(messages, tools)
        if len(kinds) > 1 and thinking is None:
            raise ChangedAnswerError(
                f"the chat template {self.name} switches thinking on or off for all answers, and "
                "some of the conversation's have no reasoning"
            )
        on = True in kinds if thinking is None else thinking
        found = self._thinking[on]._sample_turns(messages, tools)
        if self._thinking[on]._example_prompt == self._example_prompt:
            return found
        return replace(found, remarks=(*found.remarks, switched(self._switch, on)))

    def _sample_turns(self, messages: Sequence[Message], tools: Tools) -> Rendered:
        """A sample in which answers to train follow the prompts that generate them."""
        if not (
            reasoning.has_marks(self._header)
            or any(message.get(name) for message in messages for name in _PARTS_OF_ANSWERS)
        ):
            return self.render(messages, tools=tools)
        found = self._generated(messages, tools) or self._render_turns(messages, tools)
        remarks, trained = list(found.remarks), trained_answers(messages)
        for index, (start, end) in zip(answers_of(messages), found.spans, strict=True):
            if index in trained:
                remarks += self._check_answer(messages[index], index, found.text[start:end])
        return replace(found, remarks=tuple(remarks))

    def _generated(self, messages: Sequence[Message], tools: Tools) -> Rendered | None:
        """The prompt of the last answer and what the model writes after it.

        None where the template's own text follows the prompts, or cannot be made to.
        """
        trained = trained_answers(messages)
        prompts = self._run(True, tools, *(messages[:i] for i in trained))
        wholes = self._run(False, tools, *(messages[: i + 1] for i in trained))
        for index, prompt, whole in zip(trained, prompts, wholes, strict=True):
            thought = str(messages[index].get("reasoning_content") or "")
            if whole.startswith(prompt) and reasoning.contains(whole[len(prompt) :], thought):
                continue
            # Where the prompt of a question opens a block and this one does not (results of
            # tools), the model's form of reasoning is not known.
            opens = reasoning.has_marks(prompt) or not reasoning.has_marks(self._header)
            if thought and not (self._drops_reasoning and opens):
                continue
            text = reasoning.as_generated(prompt, whole, thought)
            if text is None:
                continue
            if trained != [len(messages) - 1]:
                raise self._changed(index)
            spans = [(0, 0)] * (len(answers_of(messages)) - 1) + [(len(prompt), self._end(text))]
            return Rendered(text, tuple(spans), remarks=tuple(without_prompt(messages)))
        return None

    def _check_answer(self, message: Message, index: int, text: str) -> list[str]:
        """Remarks on the trained text of an answer.

        Raises:
            DataError: it lacks the reasoning.
        """
        thought = str(message.get("reasoning_content") or "")
        if not reasoning.contains(text, thought):
            raise DataError(
                f"message {index + 1}: the chat template {self.name} does not render the reasoning "
                "of this answer: choose another --prompt-type, or remove the reasoning"
            )
        if message.get("tool_calls"):
            return []
        return [one for one in remarks_on(text, message["content"]) if one != BEGUN or not thought]

    def _sample_marked(self, messages: Sequence[Message], tools: Tools) -> Rendered:
        """A sample of a template with ``{% generation %}`` tags, refused if it lacks reasoning."""
        found = self._render_marked(messages, False, tools)
        answers = answers_of(messages)
        spans = found.spans
        if len(spans) != len(answers):
            spans = ((0, len(found.text)),) * len(answers)
        for index, (start, end) in zip(answers, spans, strict=True):
            thought = str(messages[index].get("reasoning_content") or "")
            if messages[index].get("weight") == 0 or not thought:
                continue
            if index != answers[-1] and not reasoning.contains(found.text[start:end], thought):
                raise self._changed(index)
            self._check_answer(messages[index], index, found.text[start:end])
        return found

    def _changed(self, index: int) -> ChangedAnswerError:
        return ChangedAnswerError(
            f"the chat template {self.name} renders message {index + 1} otherwise when others "
            "follow, such as without its reasoning"
        )

    def _render_turns(self, messages: Sequence[Message], tools: Tools) -> Rendered:
        """Spans of answers that are more than their content, each as if it was the last message.

        A span begins where the prompt of the answer ends, and ends with the stop token. What the
        template writes after it is not trained.
        """
        trained = trained_answers(messages)
        known = prompted(messages)
        prompts = self._run(True, tools, *(messages[:i] for i in known))
        text, *wholes = self._run(False, tools, messages, *(messages[: i + 1] for i in known))
        spans: list[Span] = [(0, 0)] * (len(answers_of(messages)) - len(known))
        remarks = without_prompt(messages)
        for index, prompt, whole in zip(known, prompts, wholes, strict=True):
            start = equal_characters(prompt, whole)
            end = self._end(whole)
            if text[:end] == whole[:end] and start <= end:
                stopped = whole[:end].endswith(self._known or ("",))
                spans.append((start, end + (0 if stopped else self._stop_length(text[end:]))))
                if start < len(prompt) and index in trained:
                    remarks.append(OTHER_PROMPT)
            elif index not in trained:
                spans.append(spans[-1][1:] * 2 if spans else (0, 0))
            else:
                raise self._changed(index)
        return Rendered(text, tuple(spans), remarks=tuple(remarks))

    def _end(self, text: str) -> int:
        """The end of a text; that of its special token where only blanks follow one."""
        stripped = text.rstrip()
        return len(stripped) if stripped.endswith(self._known or ("",)) else len(text)

    def _render_marked(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Tools
    ) -> Rendered:
        """Spans of a template with ``{% generation %}`` tags, as in transformers."""
        marks = dict(zip(GENERATION, _GENERATION_MARKS, strict=True))
        (text,) = self._run(add_generation_prompt, tools, messages)
        (marked,) = self._run(add_generation_prompt, tools, messages, **marks)
        begin, end = _GENERATION_MARKS
        spans: list[Span] = []
        before, *blocks = marked.split(begin)
        position = len(before)
        for block in blocks:
            inside, _, after = block.partition(end)
            spans.append((position, position + len(inside)))
            position += len(inside) + len(after)
        if marked.replace(begin, "").replace(end, "") != text:
            raise DataError(
                f"the chat template {self.name} renders different text with and without its "
                "{% generation %} tags: choose another --prompt-type"
            )
        answers = [m["content"] for m in messages if m.get("role") == "assistant"]
        if len(answers) != len(spans):
            return Rendered(text, tuple(spans), remarks=(CHANGED,) * len(answers))
        changed = [remarks_on(text[slice(*s)], a) for s, a in zip(spans, answers, strict=True)]
        return Rendered(text, tuple(spans), remarks=tuple(c for c in chain(*changed) if c != BEGUN))

    def prompt(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        self.check(messages, tools)
        return self._run(True, tools, messages)[0]

    def not_rendered(self, message: Message) -> str | None:
        """A field or role other than the usual ones that does not occur in the Jinja program."""
        known = ("role", "content", "name", "tool_call_id", "weight")
        names = [name for name in self._plain(message) if name not in known]
        role = message.get("role")
        names += [str(role)] if role not in ROLES else []
        if self._drops_reasoning and "reasoning_content" in names:
            names.remove("reasoning_content")
        return next((name for name in names if not self._knows(name)), None)

    def _plain(self, message: Message) -> dict[str, Any]:
        """A message as the program reads it: without weight, with its name of the reasoning."""
        found = {name: value for name, value in message.items() if name != "weight"}
        if self._reasoning and "reasoning_content" in found:
            found[self._reasoning] = found.pop("reasoning_content")
        return found

    def _knows(self, name: str) -> bool:
        """Whether a name occurs in the Jinja program."""
        return bool(re.search(rf"\b{re.escape(name)}\b", self._source))

    def _generation_prompt(self) -> tuple[str, str]:
        """The prompt of a question, and its end, with which an answer is generated.

        Both are empty if the template writes none.
        """
        example = [{"role": "user", "content": "a"}]
        try:
            [before], [prompt] = self._run(False, (), example), self._run(True, (), example)
        except DataError:  # the template does not accept this example
            return "", ""
        return prompt, prompt.removeprefix(before) if prompt.startswith(before) else ""

    def _run(
        self,
        add_generation_prompt: bool,
        tools: Tools,
        *conversations: Sequence[Message],
        **variables: str,
    ) -> list[str]:
        """Render conversations as texts."""
        tokens = {name: token for name, token in self._tokens.items() if token is not None}
        common: dict[str, Any] = {
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._program.render(
            [
                {
                    **common,
                    **tokens,
                    **self._variables,
                    **variables,
                    "messages": [self._plain(m) for m in messages],
                }
                for messages in conversations
            ]
        )

    def _stop(self) -> tuple[str, ...]:
        """The end-of-text token, and the token after an answer if it differs."""
        found = [self._tokens["eos_token"]]
        answer = mark(0)
        example = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
        try:
            rendered = self.render(example)
            for span in rendered.spans[:1]:
                found.insert(0, rendered.text[slice(*span)].partition(answer)[2].strip())
        except DataError:  # the template does not accept this example
            pass
        return tuple(dict.fromkeys(token for token in found if token))

    def _stop_length(self, rest: str) -> int:
        """Length of the special token at the start of ``rest``, with the whitespace before it."""
        blanks = len(rest) - len(rest.lstrip())
        matching = [token for token in self._known if rest.startswith(token, blanks)]
        return blanks + max(map(len, matching)) if matching else 0


def _reads(source: str, name: str) -> bool:
    """Whether a Jinja program reads a field of this name."""
    return bool(re.search(rf"""(?:\.|\[['"]|get\(['"]){name}\b""", source))


def has_template(directory: Path) -> bool:
    """Whether the tokenizer of a directory has a chat template."""
    try:
        _template(directory, _config(directory))
    except DataError:
        return False
    return True


def _template(directory: Path, config: Mapping[str, Any]) -> str:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return read_text(file, str(file), DataError)
    found = config.get("chat_template")
    if isinstance(found, list):  # several named templates
        named = [entry for entry in found if isinstance(entry, dict)]
        found = {entry.get("name"): entry.get("template") for entry in named}.get("default")
    if not isinstance(found, str):
        raise DataError(
            f"the tokenizer in {directory} has no chat template (neither chat_template.jinja nor "
            "an entry in tokenizer_config.json): name one with --prompt-type, for example chatml"
        )
    return found


def _config(directory: Path) -> dict[str, Any]:
    config = read_config(directory)
    file = directory / "tokenizer.json"
    if "added_tokens_decoder" not in config and file.is_file():
        content = read_json(file, str(file), DataError)
        added = content.get("added_tokens") if isinstance(content, dict) else None
        tokens = enumerate(added if isinstance(added, list) else ())
        config["added_tokens_decoder"] = {str(number): token for number, token in tokens}
        check_config(config, str(file))
    return config


def _special_tokens(config: Mapping[str, Any]) -> tuple[str, ...]:
    named = [_content(config.get(name)) for name in _TOKEN_NAMES]
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    named += [_content(token) for token in extra]
    added = config.get("added_tokens_decoder", {}).values()
    named += [token["content"] for token in added if token.get("special")]
    return tuple(dict.fromkeys(token for token in named if token))


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, Mapping) else token
