"""A conversation at the keyboard, or from a pipe.

Rank 0 reads lines and prints; every line is agreed upon by all ranks before anything happens, so
that commands, errors and the end of the input are the same everywhere.
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
from mindspeed.inference.control import Control
from mindspeed.inference.conversation import Conversation
from mindspeed.inference.generator import Generator
from mindspeed.inference.sampling import SamplingOptions

HELP = """\
q, quit, exit       leave
clear, new          forget the conversation
/save FILE          write the conversation as JSON
/params             show how tokens are chosen
/params NAME=VALUE  change it, for example: /params temperature=0.5 top_p=0.9
/help               this text"""

_LEAVE = ("q", "quit", "exit", "/quit", "/exit")
_FORGET = ("clear", "new", "/clear", "/new")
_SHOWN = ("greedy", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens", "seed")


class Chat:
    """Lines in, text out.

    Args:
        generator: The model.
        conversation: What it is told.
        options: How tokens are chosen; stop strings of the template are part of it.
        control: The ranks.
        lines: What the user says, on rank 0.
        out: Where answers go, on rank 0.
        interactive: Print prompts for a person.
    """

    def __init__(
        self,
        generator: Generator,
        conversation: Conversation,
        options: SamplingOptions,
        control: Control,
        lines: Iterator[str],
        out: TextIO,
        interactive: bool = False,
    ) -> None:
        self._generator, self._conversation = generator, conversation
        self._options, self._control = options, control
        self._lines, self._out, self._interactive = lines, out, interactive

    def run(self) -> None:
        """Talk until the user leaves or the input ends. Collective."""
        while (line := self._control.agree(self._next_line())) is not None:
            line = line.strip()
            if line in _LEAVE:
                return
            try:
                if line:
                    self._obey(line)
            except (MindSpeedError, OSError) as error:
                self._print(f"{error}\n")

    def _next_line(self) -> str | None:
        if not self._control.leads:
            return None
        if self._interactive:
            self._print("You >> ")
        return next(self._lines, None)

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        if line in _FORGET:
            self._conversation.clear()
        elif line == "/help":
            self._print(HELP + "\n")
        elif command == "/save":
            self._save(rest.strip())
        elif command == "/params":
            self._parameters(rest.split())
        elif command.startswith("/"):
            self._print(f"{command} is unknown; /help lists the commands\n")
        else:
            self._answer(line)

    def _answer(self, question: str) -> None:
        options = replace(self._options, seed=self._options.seed + len(self._conversation.history))
        tokens = self._conversation.ask(question, options)
        if self._interactive:
            self._print("Model >> ")
        text = ""
        for piece in self._generator.pieces([tokens], options):
            self._print(piece.text)
            text += piece.text
        self._print("\n")
        self._conversation.answered(text.strip())

    def _save(self, path: str) -> None:
        if not path:
            self._print("/save needs the name of a file\n")
        elif self._control.leads:
            content = {"messages": self._conversation.messages}
            atomic_write_text(path, json.dumps(content, ensure_ascii=False, indent=2) + "\n")
            self._print(f"saved {path}\n")

    def _parameters(self, changes: list[str]) -> None:
        values: dict[str, Any] = {}
        for change in changes:
            name, _, value = change.partition("=")
            name = name.replace("-", "_")
            if name not in _SHOWN:
                self._print(f"{name} is unknown; there are {', '.join(_SHOWN)}\n")
                return
            try:
                values[name] = _READERS[type(before := getattr(self._options, name))](value)
            except (ValueError, KeyError):
                self._print(f"{name}={value}: a value like {before} is needed\n")
                return
        self._options = replace(self._options, **values)
        for name in _SHOWN:
            self._print(f"{name}={getattr(self._options, name)}\n")

    def _print(self, text: str) -> None:
        if self._control.leads and text:
            self._out.write(text)
            self._out.flush()


_READERS: dict[type, Callable[[str], object]] = {
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: int,
    float: float,
}


def lines_of(stream: TextIO) -> Iterator[str]:
    """Lines as they come; a terminal gets line editing where Python has it."""
    if stream.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        while True:
            try:
                yield input()
            except EOFError:
                return
    yield from stream


def talk(generator: Generator, conversation: Conversation, options: SamplingOptions) -> None:
    """Chat through this process's standard input and output. Collective."""
    Chat(
        generator,
        conversation,
        options,
        Control(),
        lines_of(sys.stdin),
        sys.stdout,
        interactive=sys.stdin.isatty() and sys.stdout.isatty(),
    ).run()
