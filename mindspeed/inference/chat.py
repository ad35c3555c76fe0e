"""Interactive chat on a terminal, or with lines from a pipe.

Rank 0 reads lines and prints; every line is broadcast to all ranks first, so that commands, errors
and the end of the input are the same on all of them.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TextIO

from mindspeed.errors import MindSpeedError
from mindspeed.files import atomic_write_text
from mindspeed.inference.answers.parts import AnswerPart, message_of
from mindspeed.inference.answers.question import with_ends
from mindspeed.inference.conversation import Conversation
from mindspeed.inference.parallel_groups import Rank0Broadcast
from mindspeed.inference.sampling import SamplingOptions
from mindspeed.inference.text_generator import TextGenerator

HELP = """\
q, quit, exit       leave
clear, new          start a new conversation
/save FILE          write the conversation as JSON
/params             show the sampling parameters
/params NAME=VALUE  change them, for example: /params temperature=0.5 top_p=0.9
/help               show this text"""

_DIM, _BRIGHT = "\x1b[2m", "\x1b[22m"
_QUIT = ("q", "quit", "exit", "/quit", "/exit")
_CLEAR = ("clear", "new", "/clear", "/new")
_SHOWN = ("greedy", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens", "seed")


class _Page:
    """Prints one answer: its reasoning, an empty line, its content.

    Args:
        write: Prints a text.
        dims: Reasoning is dimmed, on a terminal.
        reasoning: It is printed.
    """

    def __init__(self, write: Callable[[str], None], dims: bool, reasoning: bool) -> None:
        self._write, self._dims, self._reasoning = write, dims, reasoning
        self._kind = ""

    def show(self, part: AnswerPart) -> None:
        """Print a part."""
        thought = part.kind == "reasoning"
        if thought and not self._reasoning:
            return
        if part.kind != self._kind:
            self.end()
            self._write("\n\n" if self._kind else "")
            self._write(_DIM if thought and self._dims else "")
            self._kind = part.kind
        self._write(part.text)

    def end(self) -> None:
        """The answer, or its part of this kind, has ended."""
        self._write(_BRIGHT if self._kind == "reasoning" and self._dims else "")


class Chat:
    """The chat loop.

    Args:
        generator: The model.
        conversation: The history.
        options: Sampling options.
        control: Broadcasts lines from rank 0.
        lines: User input, on rank 0.
        out: Output, on rank 0.
        interactive: Print ``You >>`` and ``Model >>``, and reasoning dimmed.
        reasoning: Print reasoning.
    """

    def __init__(
        self,
        generator: TextGenerator,
        conversation: Conversation,
        options: SamplingOptions,
        control: Rank0Broadcast,
        lines: Iterator[str],
        out: TextIO,
        interactive: bool = False,
        reasoning: bool = True,
    ) -> None:
        self._generator, self._conversation = generator, conversation
        self._options, self._control = options, control
        self._lines, self._out, self._interactive = lines, out, interactive
        self._reasoning = reasoning

    def run(self) -> None:
        """Chat until the user quits or the input ends. Collective."""
        while (line := self._control.broadcast(self._next_line())) is not None:
            line = line.strip()
            if line in _QUIT:
                return
            try:
                if line:
                    self._handle(line)
            except (MindSpeedError, OSError) as error:
                self._print(f"{error}\n")

    def _next_line(self) -> str | None:
        if not self._control.is_source:
            return None
        if self._interactive:
            self._print("You >> ")
        return next(self._lines, None)

    def _handle(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if line in _CLEAR:
            self._conversation.clear()
        elif line == "/help":
            self._print(HELP + "\n")
        elif command == "/save":
            self._save(rest.strip())
        elif command == "/params":
            self._set_parameters(rest.split())
        elif command.startswith("/"):
            self._print(f"{command} is unknown; /help lists the commands\n")
        else:
            self._answer(line)

    def _answer(self, question: str) -> None:
        options = replace(self._options, seed=self._options.seed + len(self._conversation.history))
        tokens, asked = self._conversation.add_user_message(question, options)
        if self._interactive:
            self._print("Model >> ")
        parser, parts = asked.parser(), list[AnswerPart]()
        page = _Page(self._print, self._interactive, self._reasoning)
        for chunk in self._generator.stream([tokens], with_ends(options, [asked])):
            found = parser.push(chunk.text) + (parser.finish() if chunk.finish else [])
            for part in found:
                page.show(part)
            parts += found
        page.end()
        self._print("\n")
        self._conversation.add_answer(message_of(parts))

    def _save(self, path: str) -> None:
        if not path:
            self._print("/save needs a file name\n")
        elif self._control.is_source:
            content = {"messages": self._conversation.messages}
            atomic_write_text(path, json.dumps(content, ensure_ascii=False, indent=2) + "\n")
            self._print(f"saved {path}\n")

    def _set_parameters(self, changes: list[str]) -> None:
        values: dict[str, Any] = {}
        for change in changes:
            name, _, value = change.partition("=")
            name = name.replace("-", "_")
            if name not in _SHOWN:
                self._print(f"{name} is unknown; there are {', '.join(_SHOWN)}\n")
                return
            try:
                values[name] = _PARSERS[type(before := getattr(self._options, name))](value)
            except (ValueError, KeyError):
                self._print(f"{name}={value} is invalid; an example is {before}\n")
                return
        self._options = replace(self._options, **values)
        for name in _SHOWN:
            self._print(f"{name}={getattr(self._options, name)}\n")

    def _print(self, text: str) -> None:
        if self._control.is_source and text:
            self._out.write(text)
            self._out.flush()


_PARSERS: dict[type, Callable[[str], object]] = {
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: int,
    float: float,
}


def lines_of(stream: TextIO) -> Iterator[str]:
    """Lines as they arrive, with line editing on a terminal if Python has readline."""
    if stream.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        while True:
            try:
                yield input()
            except EOFError:
                return
    yield from stream


def run_chat(
    generator: TextGenerator,
    conversation: Conversation,
    options: SamplingOptions,
    reasoning: bool = True,
) -> None:
    """Chat on standard input and output; ``reasoning``: print it. Collective."""
    Chat(
        generator,
        conversation,
        options,
        Rank0Broadcast(),
        lines_of(sys.stdin),
        sys.stdout,
        interactive=sys.stdin.isatty() and sys.stdout.isatty(),
        reasoning=reasoning,
    ).run()
