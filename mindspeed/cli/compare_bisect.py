"""``mindspeed compare --bisect DIR -- COMMAND A -- COMMAND B``: the flags that make B differ.

Records A twice (does it repeat itself?), three times with noise, and B; then B's flags in groups;
then A and A with the guilty flags, with the operators of the module that differs first.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed.compare.bisect import FlagChange, changed, changes, smallest
from mindspeed.errors import ConfigError, DataError, MindSpeedError
from mindspeed.files import make_dirs, secure_open

if TYPE_CHECKING:
    from mindspeed.compare.operator_walk import OperatorFinding
    from mindspeed.compare.recording import Recording
    from mindspeed.compare.walk import Result

NOISE = (1, 2, 3)


def commands_of(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The two commands after ``--``.

    Raises:
        ConfigError: there are not two.
    """
    if words.count("--") != 1 or "--" in (words[0], words[-1]):
        raise ConfigError("give two commands: mindspeed compare --bisect DIR -- COMMAND -- COMMAND")
    at = words.index("--")
    return list(words[:at]), list(words[at + 1 :])


class Bisection:
    """Runs commands and compares their recordings with A's.

    Args:
        folder: For recordings and logs.
        a: A's command.
        b: B's.
    """

    def __init__(self, folder: Path, a: Sequence[str], b: Sequence[str]) -> None:
        self._folder, self._a, self._b = make_dirs(folder), list(a), list(b)
        self._runs = 0

    def run(self) -> tuple[Result, Recording, Recording, list[FlagChange]]:
        """A and B compared, and the smallest set of flags; empty where they are equal.

        Raises:
            MindSpeedError: A or B cannot be recorded.
        """
        from mindspeed.compare.walk import compare

        found = changes(self._a, self._b)
        print(
            f"{len(found)} flags differ; 8 runs, then at most {max(0, len(found) ** 2)}, often "
            f"{2 * len(found)}",
            flush=True,
        )
        a = self._needed("a", self._a, "A")
        again = self._needed("a-again", self._a, "A again")
        self._say_whether_equal(a, again)
        noise = [
            self._needed(f"a/noise-{n}", [*self._a, "--record-noise", str(n)], f"A, noise {n}")
            for n in NOISE
        ]
        b = self._needed("b", self._b, "B")
        result = compare(a, b, noise)
        first = result.first
        if first is None:
            return result, a, b, []

        def bad(subset: tuple[FlagChange, ...]) -> bool:
            title = ", ".join(map(str, subset))
            run = self._record(f"run-{self._runs}", changed(self._a, subset), title)
            if run is None:
                print("  refused or failed", flush=True)
                return False
            other = compare(a, run, noise).first
            print(f"  {'equal' if other is None else f'differs: {other.name}'}", flush=True)
            return other is not None and other.name[2:4] == first.name[2:4]

        flags = smallest(found, bad)
        result.operator = self._operator(result, a, changed(self._a, flags) if flags else self._b)
        return result, a, b, flags

    def _operator(self, result: Result, a: Recording, b: Sequence[str]) -> OperatorFinding | None:
        """The first operator that differs where the first tensor does: two or four more runs."""
        from mindspeed.compare.megatron_modules import MODEL
        from mindspeed.compare.megatron_operators import module_of
        from mindspeed.compare.names import layer_of

        assert result.first is not None
        layers = 1 + max(layer_of(name.module) or 0 for name in a.tensors)
        module = module_of(result.first.name, layers)
        if module is None:
            return None
        found = self._operator_in(module, "operators", result, b, ["--record-level", "full"])
        enters = found is not None and found.a is not None and found.a.name == "input"
        if enters and module != MODEL:  # what differs is made elsewhere
            return self._operator_in(MODEL, "model", result, b, []) or found
        return found

    def _operator_in(
        self, module: str, name: str, result: Result, b: Sequence[str], more: list[str]
    ) -> OperatorFinding | None:
        from mindspeed.compare import operator_walk
        from mindspeed.compare.walk import entering

        assert result.first is not None
        first = result.first.name
        recorded = ["--record-operators", module, "--record-what", "loss", *more]
        recorded += ["--record-micro-batches", str(first.micro_batch)]
        here, there = (
            self._needed(f"{name}-{run.lower()}", [*command, *recorded], f"{run}, {name}")
            for run, command in (("A", self._a), ("B", b))
        )
        ours, theirs = operator_walk.read(here.directory), operator_walk.read(there.directory)
        return operator_walk.first_difference(ours, theirs, first, entering(result))

    def _needed(self, name: str, command: list[str], title: str) -> Recording:
        run = self._record(name, command, title)
        if run is None:
            log = (self._folder / f"{name}.log").read_text("utf-8", errors="replace")
            raise MindSpeedError(f"{title}: {shlex.join(command)} failed:\n{log[-1500:]}")
        return run

    def _record(self, name: str, command: list[str], title: str) -> Recording | None:
        """Run a command with ``--record``; None if it fails."""
        from mindspeed.compare.recording import read

        self._runs += 1
        print(f"run {self._runs}: {title}", flush=True)
        path = self._folder / name
        if path.exists() and any(path.glob("step-*")):
            raise ConfigError(f"{path} has a recording: give an empty directory")
        log = make_dirs(path.parent) / f"{path.name}.log"
        with secure_open(log, "wb") as file:
            done = subprocess.run(
                [*command, "--record", str(path)], stdout=file, stderr=subprocess.STDOUT
            )
        if done.returncode:
            return None
        try:
            return read(path)
        except DataError:
            return None

    def _say_whether_equal(self, a: Recording, again: Recording) -> None:
        other = [
            name
            for name, tensor in a.tensors.items()
            if name not in again.tensors or not again.tensors[name].digest.equal(tensor.digest)
        ]
        if other:
            print(
                f"  A does not repeat itself: {len(other)} of {len(a.tensors)} tensors differ, "
                f"first {other[0]}; --npu-deterministic helps"
            )
        else:
            print("  A repeats itself in every bit")
