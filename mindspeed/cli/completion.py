"""Completion of commands, flags and their values in a shell.

    mindspeed completion bash > ~/.local/share/bash-completion/completions/mindspeed
    mindspeed completion zsh > ~/.zfunc/_mindspeed       # a folder of fpath
    mindspeed completion fish > ~/.config/fish/completions/mindspeed.fish

Prints a script made from the parsers of all commands of this version: what a shell completes starts
no Python. Print it again after an update.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

from mindspeed.ranges import Parser

HELP = "print a script that completes commands, flags and values in a shell"


@dataclass(frozen=True)
class Words:
    """What completes one command.

    Attributes:
        flags: its flags.
        places: words that a position takes.
        values: flag -> the values that it takes, where they are few.
    """

    flags: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __or__(self, other: Words) -> Words:
        flags = tuple(sorted({*self.flags, *other.flags}))
        return Words(flags, self.places + other.places, {**self.values, **other.values})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=sorted(SCRIPTS), help="the shell that is to complete")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from mindspeed.cli.main import COMMANDS

    print(SCRIPTS[args.shell]({name: words_of_command(name) for name in COMMANDS}), end="")
    return 0


def words_of_command(command: str) -> Words:
    """What completes a command: its own flags, and those of training where it takes them."""
    words = Words(("--debug", "--help"))
    if (parser := own_parser(command)) is not None:
        words |= words_of(parser)
    return words | _training() if takes_training_flags(command) else words


def own_parser(command: str) -> Parser | None:
    """The parser of a command's own flags; None where it has none but those of training."""
    module = _module(command)
    if not hasattr(module, "add_arguments"):
        return None
    parser = Parser(f"mindspeed {command}", description=module.__doc__, add_help=False)
    module.add_arguments(parser)
    return parser


def takes_training_flags(command: str) -> bool:
    """Whether a command takes the flags of ``mindspeed pretrain``."""
    return getattr(_module(command), "PASS_THROUGH", False)


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"mindspeed.cli.{command.replace('-', '_')}")


@cache
def _training() -> Words:
    import mindspeed.megatron_adaptor  # noqa: F401  (before anything of Megatron)
    from mindspeed.training.arguments import build_parser

    return words_of(build_parser())


def words_of(parser: argparse.ArgumentParser) -> Words:
    """What completes the command line of a parser; flags that its help hides are left out."""
    words = Words()
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            flags = tuple(name for name in action.option_strings if name.startswith("--"))
            choices = tuple(map(str, action.choices or ()))
            words |= Words(
                flags,
                () if action.option_strings else choices,
                dict.fromkeys(flags, choices) if choices else {},
            )
    return words


def bash(words: Mapping[str, Words]) -> str:
    """The script for bash."""
    return f"""\
# Completion of mindspeed for bash; written by: mindspeed completion bash
_mindspeed() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
  if ((COMP_CWORD == 1)); then
    words="{" ".join(words)}"
  else
    case "${{COMP_WORDS[1]}} $before" in
{_of_values(words, '      {}) words="{}" ;;')}
    esac
    if [[ -z $words && $word == -* ]]; then
      case "${{COMP_WORDS[1]}}" in
{_of_flags(words, '        {}) words="{}" ;;')}
      esac
    elif [[ -z $words ]]; then
      case "${{COMP_WORDS[1]}}" in
{_of_places(words, '        {}) words="{}" ;;')}
      esac
    fi
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _mindspeed mindspeed
"""


def zsh(words: Mapping[str, Words]) -> str:
    """The script for zsh."""
    return f"""\
#compdef mindspeed
# Completion of mindspeed for zsh; written by: mindspeed completion zsh
_mindspeed() {{
  local -a found
  if ((CURRENT == 2)); then
    compadd -- {" ".join(words)}
    return
  fi
  case "$words[2] $words[CURRENT-1]" in
{_of_values(words, "    {}) found=({}) ;;")}
  esac
  if (($#found)); then
    compadd -- $found
  elif [[ $PREFIX == -* ]]; then
    case "$words[2]" in
{_of_flags(words, "      {}) found=({}) ;;")}
    esac
    compadd -- $found
  else
    case "$words[2]" in
{_of_places(words, "      {}) found=({}) ;;")}
    esac
    compadd -- $found
    _files
  fi
}}
if [[ $funcstack[1] == _mindspeed ]]; then  # the first completion, by a file of fpath
  _mindspeed
else
  compdef _mindspeed mindspeed
fi
"""


def fish(words: Mapping[str, Words]) -> str:
    """The script for fish."""
    lines = ["# Completion of mindspeed for fish; written by: mindspeed completion fish"]
    lines.append(f"complete -c mindspeed -n __fish_use_subcommand -f -a '{' '.join(words)}'")
    of_flags: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for command, one in words.items():
        if one.places:
            lines.append(f"{_behind([command])} -a '{' '.join(one.places)}'")
        for flag in one.flags:
            of_flags.setdefault((flag, one.values.get(flag, ())), []).append(command)
    for (flag, choices), commands in of_flags.items():
        values = f" -x -a '{' '.join(choices)}'" if choices else ""
        lines.append(f"{_behind(commands)} -l {flag[2:]}{values}")
    return "\n".join(lines) + "\n"


def _behind(commands: Iterable[str]) -> str:
    """The start of a line of fish: only after one of ``commands``."""
    return f"complete -c mindspeed -n '__fish_seen_subcommand_from {' '.join(commands)}'"


def _of_values(words: Mapping[str, Words], form: str) -> str:
    """Branches by command and the flag before the cursor."""
    pairs = {
        f'"{command} {flag}"': choices
        for command, one in words.items()
        for flag, choices in one.values.items()
    }
    return _branches(pairs, form)


def _of_flags(words: Mapping[str, Words], form: str) -> str:
    """Branches by command: its flags."""
    return _branches({command: one.flags for command, one in words.items()}, form)


def _of_places(words: Mapping[str, Words], form: str) -> str:
    """Branches by command: what its positions take."""
    return _branches({command: one.places for command, one in words.items() if one.places}, form)


def _branches(words: Mapping[str, tuple[str, ...]], form: str) -> str:
    """Branches of a ``case``; patterns that have the same words share one."""
    patterns: dict[tuple[str, ...], list[str]] = {}
    for pattern, one in words.items():
        patterns.setdefault(one, []).append(pattern)
    return "\n".join(form.format("|".join(names), " ".join(w)) for w, names in patterns.items())


SCRIPTS: dict[str, Callable[[Mapping[str, Words]], str]] = {"bash": bash, "fish": fish, "zsh": zsh}
