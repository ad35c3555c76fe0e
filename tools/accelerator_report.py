"""Measure an accelerator in nine minutes: exactness, operators, a training step, memory, plans.

    tools/accelerator_report.sh                   on the machine with the accelerator
    tools/accelerator_report.sh --dry             anywhere: says what would run and checks it

Each row of ``PARTS`` runs existing benchmarks and tests in turn, the most important first, within a
limit of its own and of the whole. Its files become ``benchmarks/results/DEVICE-PART.*`` when it
ends, also when it is cut off: what it has written until then is kept. ``DEVICE-report.json`` says
at any time which parts ran, were cut, failed or were skipped, and why. An NPU takes the same way:
the device is the one that ``mindspeed.device`` chooses (``MINDSPEED_DEVICE`` overrides).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import psutil

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SECONDS = 525  # of the whole: nine minutes with the start and the installation of wheels
GRACE = 8  # seconds to write what was measured, after the interrupt and before the kill
RANKED = "-m torch.distributed.run --standalone --nproc-per-node {count}"


@dataclass(frozen=True)
class Part:
    """Commands of Python that measure one thing; ``{out}`` is its files without ending."""

    name: str
    what: str
    seconds: int
    commands: tuple[str, ...]
    devices: tuple[str, ...] = ("cuda", "npu")
    least: int = 1  # devices


PARTS = (
    Part(
        "exact",
        "every operator's kernel beside its formula in float64",
        80,
        ("-m mindspeed.ops.verify --device {device}",),
    ),
    Part(
        "tests",
        "attention and offload: tests marked cuda",
        45,
        (
            "-m pytest -q -m cuda -n 0 -p no:cacheprovider tests/memory/test_offload.py "
            "tests/ops/test_attention_cuda.py",
        ),
        devices=("cuda",),
    ),
    Part(
        "ops",
        "operators beside torch and Liger: time, fraction of the memory's bandwidth",
        75,
        (
            "benchmarks/ops.py --device {device} --hidden 4096 --repeats 40 --against eager liger "
            "--out {out}",
        ),
    ),
    Part(
        "trainer-vs-megatron",
        "a step beside Megatron-LM's own loop: tokens/s, model FLOPs utilization",
        110,
        (
            "benchmarks/trainer_vs_megatron.py --megatron {megatron} --accelerator "
            "--cluster {cluster} --iterations 12 --interval 1 --rounds 1 --json {out}.json",
        ),
    ),
    Part(
        "jobs",
        "memory presets and small models: seconds and most bytes, beside the planned ones",
        180,
        (
            "benchmarks/measured_jobs.py measure {out}.json --jobs {jobs}",
            "benchmarks/measured_jobs.py compare {out}.json --cluster {cluster}",
        ),
    ),
    Part(
        "memory",
        "ways to save activation memory: most bytes allocated, seconds of a step",
        45,
        ("benchmarks/memory.py --layers 8 --hidden 1024 --sequence 8192 --batch 2 --out {out}",),
    ),
    Part(
        "attention",
        "context-parallel attention plans, rank by rank",
        45,
        (
            "benchmarks/attention.py --device {device} --tokens 8192 --heads 16 --head-size 128 "
            "--out {out}",
        ),
    ),
    Part(
        "tensor-parallel",
        "products and collectives in parts (CoC) and over symmetric memory",
        60,
        ("benchmarks/tensor_parallel.py --device {device} --out {out}",),
        devices=("cuda",),
        least=2,
    ),
    Part(
        "links",
        "matrix products, copies and collectives, as a cluster of the planner",
        60,
        (RANKED + " -m mindspeed calibrate --base {cluster} --out {out}.json",),
    ),
    Part(
        "training-tests",
        "trainings on the device beside the same on the CPU: tests marked cuda",
        180,
        ("-m pytest -q -m cuda -n 4 -p no:cacheprovider tests/training/test_on_cuda.py",),
        devices=("cuda",),
    ),
)
# Of benchmarks/measured_jobs.py: the memory presets of one model, then other models.
JOBS = ("llama3.2-1b 4096", "qwen3-0.6b", "llama3-8b")


@dataclass(frozen=True)
class Machine:
    """What the commands need to know."""

    device: str
    name: str
    count: int
    cluster: str  # preset of the planner
    megatron: str  # checkout of Megatron-LM, or ""

    @classmethod
    def here(cls, megatron: str) -> Machine:
        """The machine of this process, as mindspeed's device layer sees it."""
        from mindspeed import device

        found = device.current()
        name = found.properties().name
        return cls(found.name, name, found.count(), preset_of(name), megatron)

    @property
    def slug(self) -> str:
        """The start of its files' names."""
        name = re.sub(r"\b(nvidia|amd|instinct|ascend|huawei)\b", "", self.name.lower())
        return re.sub(r"[^a-z0-9]+", "-", name).strip("-") or self.device

    def words(self, command: str, out: str) -> list[str]:
        """The command's arguments for Python."""
        values = {"device": self.device, "count": self.count, "cluster": self.cluster}
        given = {"megatron": self.megatron, "jobs": shlex.join(JOBS), "out": out, **values}
        return shlex.split(command.format_map({k: v or "''" for k, v in given.items()}))

    def lacks(self, part: Part) -> str:
        """Why the part cannot run here; empty if it can."""
        if self.device not in part.devices:
            return f"has no version for {self.device}"
        if self.count < part.least:
            return f"needs {part.least} devices, here is {self.count}"
        needs = " ".join(part.commands)
        if "{megatron}" in needs and not self.megatron:
            return (
                "needs a checkout of Megatron-LM: set MEGATRON_LM_PATH, or carry .whl/Megatron-LM"
            )
        return ""


def preset_of(name: str) -> str:
    """The planner's preset for a device of that name; ``generic`` where there is none."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    folder = ROOT / "mindspeed" / "planner" / "cluster" / "presets"
    fitting = [one.stem for one in folder.glob("*.json") if plain(one.stem) in plain(name)]
    return max(fitting, key=len, default="generic")


@dataclass
class Report:
    """``DEVICE-report.json``, written whenever something changes."""

    machine: Machine
    folder: Path
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{self.machine.slug}-report.json"

    def read(self) -> None:
        """Take over the states of an earlier run, for parts that this one does not repeat."""
        if self.path.is_file():
            self.parts |= json.loads(self.path.read_text(encoding="utf-8"))["parts"]

    def write(self) -> None:
        """Replace the file."""
        import torch

        from mindspeed.files import atomic_write_text

        found = {
            "device": self.machine.name,
            "kind": self.machine.device,
            "count": self.machine.count,
            "cluster": self.machine.cluster,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "day": time.strftime("%Y-%m-%d", time.gmtime()),
            "parts": self.parts,
        }
        atomic_write_text(self.path, json.dumps(found, indent=1) + "\n")

    def set(self, part: Part, state: str, **more: Any) -> None:
        """State of one part: ran, cut, failed, skipped."""
        self.parts[part.name] = {"what": part.what, "state": state, **more}
        self.write()


def measure(report: Report, parts: Sequence[Part], seconds: float) -> None:
    """Run the parts in turn; a part that is running when all ends is one that was cut."""
    end = time.monotonic() + seconds
    for part in parts:
        report.set(part, "skipped", why="not reached")
    for part in parts:
        left = end - time.monotonic()
        if why := report.machine.lacks(part):
            report.set(part, "skipped", why=why)
        elif left < 3 * GRACE:
            report.set(part, "skipped", why="no time was left")
        else:
            print(f"==> {part.name}: {part.what}", flush=True)
            report.set(part, "cut", why="the report ended")
            run(report, part, min(part.seconds, left - GRACE))
        print(f"{part.name:<22}{report.parts[part.name]['state']}", flush=True)


def run(report: Report, part: Part, seconds: float) -> None:
    """Run one part's commands, keep its files, and say how it ended."""
    begin = time.monotonic()
    said: deque[str] = deque(maxlen=12)
    state, more = "ran", {}
    with tempfile.TemporaryDirectory(dir=report.folder, prefix=".accelerator-") as folder:
        out = Path(folder) / f"{report.machine.slug}-{part.name}"
        for command in part.commands:
            words = report.machine.words(command, str(out))
            left = seconds - (time.monotonic() - begin)
            code = call([sys.executable, *words], left, said) if left > 0 else None
            if code is None:
                state, more = "cut", {"why": f"limit of {seconds:.0f} s", "command": command}
            elif code:
                state, more = "failed", {"why": list(said), "command": command}
            if code != 0:
                break
        files = sorted(one for one in Path(folder).iterdir() if one.name.startswith(out.name))
        for file in files:
            os.replace(file, report.folder / file.name)
    last = next((line for line in reversed(said) if line.strip()), "")
    took = round(time.monotonic() - begin, 1)
    report.set(part, state, seconds=took, said=last, files=[one.name for one in files], **more)


def call(words: Sequence[str], seconds: float, said: deque[str]) -> int | None:
    """Run and print; the exit code, or None where it was interrupted after ``seconds``."""
    cut = threading.Event()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def interrupt() -> None:
        cut.set()
        started = children(process)  # launchers give ranks sessions of their own
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        kill(process, started)

    timer = threading.Timer(seconds, interrupt)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            said.append(line.rstrip("\n"))
        code = process.wait()
    finally:
        timer.cancel()
        kill(process, children(process))
        process.wait()
    return None if cut.is_set() else code


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes under this one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def kill(process: subprocess.Popen[str], started: Sequence[psutil.Process]) -> None:
    """End what is left of the process, its session and the processes under it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


class _Parsed(BaseException):
    """The command line was understood."""


def problem_of(words: Sequence[str]) -> str:
    """Why this command would not start: a file is missing, or its arguments are not understood."""
    if words[0] == "-m" and words[1] == "torch.distributed.run":
        return problem_of(words[words.index("-m", 1) :])
    if words[:2] == ["-m", "pytest"]:
        mark = words[words.index("-m", 1) + 1]
        files = [ROOT / word for word in words if word.startswith("tests/")]
        wrong = [one for one in files if not one.is_file() or f"mark.{mark}" not in one.read_text()]
        return f"no tests marked {mark} in {wrong[0]}" if wrong else ""
    module = words[1] if words[0] == "-m" else ""
    script, arguments = (module, words[2:]) if module else (str(ROOT / words[0]), words[1:])
    if not module and not Path(script).is_file():
        return f"there is no {script}"
    try:
        with understood(script, arguments):
            if module:
                runpy.run_module(module, run_name="__main__", alter_sys=False)
            else:
                runpy.run_path(script, run_name="__main__")
    except _Parsed:
        return ""
    except (SystemExit, ImportError) as error:
        return f"{error!r}"
    return "it does not read its arguments"


@contextlib.contextmanager
def understood(script: str, arguments: Sequence[str]) -> Iterator[None]:
    """Raise ``_Parsed`` as soon as argparse has understood the arguments."""
    from mindspeed.ranges import Parser

    def stopping(before: Any) -> Any:
        def parse(self: Any, *given: Any, **named: Any) -> NoReturn:
            before(self, *given, **named)
            raise _Parsed

        return parse

    with contextlib.ExitStack() as stack:
        for kind in (argparse.ArgumentParser, Parser):
            changed = mock.patch.object(kind, "parse_args", stopping(kind.parse_args))
            stack.enter_context(changed)
        stack.enter_context(mock.patch.object(sys, "argv", [script, *arguments]))
        stack.enter_context(mock.patch.object(sys, "path", [str(Path(script).parent), *sys.path]))
        yield


def dry(machines: Sequence[Machine], parts: Sequence[Part]) -> int:
    """Print and check what would run; the exit status."""
    wrong: dict[str, str] = {}
    for machine in machines:
        print(f"{machine.name}, {machine.count} x {machine.device}, plans as {machine.cluster}")
        for part in parts:
            if why := machine.lacks(part):
                print(f"  {part.name:<22}skipped: {why}")
                continue
            print(f"  {part.name:<22}{part.seconds:>4} s  {part.what}")
            for command in part.commands:
                words = machine.words(command, f"{machine.slug}-{part.name}")
                problem = problem_of(words)
                print(f"    python {shlex.join(words)}")
                if problem:
                    wrong[f"{machine.device} {part.name}"] = problem
    for name, problem in wrong.items():
        print(f"{name}: {problem}", file=sys.stderr)
    return int(bool(wrong))


def assumed(megatron: str) -> list[Machine]:
    """Machines to check the commands for where there is no accelerator."""
    megatron = megatron or "MEGATRON-LM"
    return [
        Machine("cuda", "NVIDIA H200", 8, "h200", megatron),
        Machine("npu", "Ascend910B2", 8, "ascend-910b", megatron),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or check what would be measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="check the commands, run nothing")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], help="parts")
    parser.add_argument("--seconds", type=int, default=SECONDS, help=f"default: {SECONDS}")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the files")
    options = parser.parse_args(arguments)
    parts = [part for part in PARTS if part.name in (options.only or [part.name])]
    carried = ROOT / ".whl" / "Megatron-LM"
    megatron = os.environ.get("MEGATRON_LM_PATH", str(carried) if carried.is_dir() else "")
    machine = Machine.here(megatron)
    if options.dry:
        return dry(assumed(megatron) if machine.device == "cpu" else [machine], parts)
    if machine.device == "cpu":
        parser.error("no GPU or NPU is visible here; --dry checks the commands without one")
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = Report(machine, options.out)
    if options.only:
        report.read()
    try:
        measure(report, parts, options.seconds)
    except KeyboardInterrupt:
        return 130
    return int(any(report.parts[part.name]["state"] == "failed" for part in parts))


if __name__ == "__main__":
    sys.exit(main())
