"""The command lines that bash would start for a page's blocks, without starting them.

    [line.words for line in command_lines("JOB='--bf16 --nproc 2'; mindspeed plan -- $JOB", tmp)]
    [['mindspeed', 'plan', '--', '--bf16', '--nproc', '2']]

bash itself reads the text, so variables, loops, quotes, redirections and continued lines mean what
they mean to a reader. It finds no program: each command that it would start is written down.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

# bash's functions come before programs, builtins and paths. `exec` and `source` would leave bash,
# and `set -e` of a block would hold for the blocks after it.
_PRELUDE = r"""
record() {
    local name text=""
    for name in "$#" "$@"; do text+="$name"$'\x1f'; done
    for name in $(compgen -e); do text+="$name=${!name-}"$'\x1f'; done
    printf '%s\x1e' "$text" >> "$RECORDED"  # one write: both ends of a pipe record
}
command_not_found_handle() { record "$@"; }
mkdir() { /bin/mkdir "$@"; }
exec() { "$@"; }
source() { record source "$@"; }
.() { record source "$@"; }
bash() { record bash "$@"; }
set() { :; }
builtin set -u
PATH=/nowhere
"""
_PATH = re.compile(r"(?<![\w./-])(?:\.?[\w-]+/)+[\w.-]+")
_OF_BASH = {"PWD", "SHLVL", "_", "PATH", "OLDPWD", "LC_CTYPE"}


@dataclass(frozen=True)
class CommandLine:
    """A command as bash would start it.

    Attributes:
        words: program and arguments.
        variables: environment variables that the text sets for it.
    """

    words: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)


class NotUnderstood(Exception):
    """bash ended, or a part of the text failed; the message is bash's."""


def command_lines(
    text: str, directory: Path, arguments: tuple[str, ...] = (), **variables: str
) -> Iterator[CommandLine]:
    """Commands in their order; those within ``bash -c TEXT`` in its place; ``:`` at the end.

    Args:
        text: a script.
        directory: where it is read; files to which it redirects are made there.
        arguments: of the script.
        variables: of its environment.

    Raises:
        NotUnderstood: a part of it does not work.
    """
    log = directory / ".recorded"
    log.write_bytes(b"")
    functions = [f'{word}() {{ record {word} "$@"; }}' for word in sorted({*_PATH.findall(text)})]
    known = {"HOME": str(directory), "USER": "me", "RECORDED": str(log), **variables}
    done = subprocess.run(
        [
            "bash",
            "--norc",
            "-c",
            "\n".join([_PRELUDE, *functions, text, "record :"]),
            "bash",
            *arguments,
        ],
        cwd=directory,
        env=known,
        capture_output=True,
        text=True,
        check=False,
    )
    for message in done.stderr.splitlines():
        if "integer exp" not in message:  # of a number that a program would have printed
            raise NotUnderstood(re.sub(r"^bash: (line \d+: )?", "", message))
    for recorded in log.read_text("utf-8").split("\x1e")[:-1]:
        count, *rest = recorded.split("\x1f")[:-1]
        words = rest[: int(count)]
        pairs = (token.split("=", 1) for token in rest[int(count) :])
        own = {k: v for k, v in pairs if known.get(k) != v and k not in _OF_BASH}
        if "-c" in words and "bash" in words[: words.index("-c")]:
            yield from command_lines(words[words.index("-c") + 1], directory, **known | own)
        else:
            yield CommandLine(words, own)
