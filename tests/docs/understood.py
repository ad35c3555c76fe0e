"""Why a command of a page would not start, found by the parsers that it would meet.

:func:`problem` calls the real program up to where its work begins: all flags are known, their
values are valid, and together they are a job that can start. Data and weights are those that
:func:`make_files` writes. What is not here to be asked stands in :data:`NOT_ASKED`, with the
reason.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from packaging.requirements import InvalidRequirement, Requirement

from mindspeed.errors import ConfigError
from tests.docs.shell import CommandLine, command_lines

ROOT = Path(__file__).resolve().parents[2]
SETUP = "tests.support.warm"

NOT_ASKED = {
    "git": "fetches from the network",
    "kubectl": "needs a cluster",
    "scontrol": "needs a cluster",
    "megatron": "ms-swift's command: tools/frameworks.py trains with it",
    "source": "an environment that the lines before have made",
    "find": "of the system",
    "cat": "of the system",
    "head": "of the system",
    "mktemp": "of the system",
    "tools/accelerator_wheels.sh": "fetches from the network; takes versions of Python",
    ".ci/run": "runs all targets of make; its arguments are theirs",
    "tools/frameworks/tiny_models.py": "takes a directory",
    "tools/frameworks/ms_swift.py": "ms-swift's flags: tools/frameworks.py trains with it",
    "tools/frameworks/verl_cpu.py": "verl's settings: tools/frameworks.py trains with it",
    "torch.distributed.launch": "torch's earlier torchrun; named in a sentence",
    "verl.trainer.sft_trainer": "verl's settings: tools/frameworks.py trains with it",
    "tests.fuzz.run_bad_inputs": "takes three words, as its test gives them",
    "tests.planner.oracle": "takes no words",
    "guilty/replay.py": "written by compare --bisect; tests/compare runs it",
}
"""Why the words of a program cannot be checked here."""

SCRIPTS_OF_MEGATRON = ("pretrain_gpt.py", "pretrain_llama.py", "train.py")
"""Take the flags of a training. They are user's, and ours in the root."""
MODEL = """
    --num-layers 16 --hidden-size 256 --num-attention-heads 16 --disable-bias-linear --swiglu
    --normalization RMSNorm --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer
"""
REST_OF_A_JOB = {
    "--seq-length": "2048",
    "--micro-batch-size": "2",
    "--global-batch-size": "128",
    "--lr": "1e-3",
    "--train-iters": "4",
}
REST = {"FLAGS", "..."}
"""Words that stand for all that the reader's job has beside."""
WHOLE = ("--model", "--config", "--num-layers", "--load")
"""Name the sizes of a model."""


_PART = re.compile(r"expected (one|at least one) argument|arguments are required: |'--")


def problem(line: CommandLine, directory: Path, part: bool = False) -> str:
    """Why the command would not start in a directory; empty if it would.

    Args:
        line: as bash would start it.
        directory: with the files of :func:`make_files`.
        part: more words would follow; only those that are there must be right.
    """
    program, *rest = line.words
    if part and program == "mindspeed":
        rest = [*rest, "..."] if rest[0] in (*TRAININGS, *PLANNERS) else rest
    with mock.patch.dict(os.environ, line.variables), contextlib.chdir(directory):
        try:
            return unknown_variable(line.variables) or _ask(program, rest)
        except SystemExit as error:
            return f"it ends with {error.code}" if error.code else ""
        except Exception as error:
            if part and isinstance(error, (ConfigError, ValueError)) and _PART.search(str(error)):
                return ""
            return f"{type(error).__name__}: {error}"


def _ask(program: str, words: list[str]) -> str:
    if program == ":":  # the end of a text, for its variables
        return ""
    if program in NOT_ASKED:
        return _of_the_file(program)
    if program.startswith("--"):
        return training("pretrain", [program, *words, "..."])
    if program.startswith("benchmarks/"):
        return python([program, *words])
    asked: Mapping[str, Callable[[list[str]], str]] = {
        "mindspeed": mindspeed,
        "torchrun": torchrun,
        "python": python,
        "python3": python,
        "python3.11": python,
        "make": make,
        "pip": pip,
        "bash": script,
        "curl": request,
        "lm_eval": lm_eval,
        "srun": lambda rest: unwrapped(rest, "torchrun"),
        ".venv/bin/pytest": tests,
        "tools/accelerator_report.sh": lambda rest: python(["tools/accelerator_report.py", *rest]),
    }
    if program not in asked:
        return f"{program} is not known: tests/docs/understood.py has to ask it"
    return asked[program](words)


def _of_the_file(name: str) -> str:
    """A file of ours must at least be there."""
    ours = name.startswith(("tools/", ".ci/"))
    return f"there is no {name}" if ours and not (ROOT / name).is_file() else ""


TRAININGS = ("pretrain", "finetune", "dpo", "reward")
PLANNERS = ("plan", "explain", "check", "profile")


def mindspeed(words: list[str], ranks: int | None = None) -> str:
    """A command of ours."""
    from mindspeed.cli import main

    if not words or words[0] in ("--help", "--version", "..."):
        return ""
    command, rest = words[0], words[1:]
    if command not in main.COMMANDS:
        return f"there is no command {command}"
    if {"--help", "--help-all"} & {*rest}:
        return ""
    module = importlib.import_module(f"mindspeed.cli.{command.replace('-', '_')}")
    if command in TRAININGS:
        return training(command, rest, ranks)
    if command in PLANNERS:
        return planned(command, rest)
    with mock.patch.object(module, "run") as run:
        main.dispatch(command, rest)
    flags = run.call_args[0][0].flags
    if command == "compare" and flags:
        middle = flags.index("--")
        return commands(flags[:middle], flags[middle + 1 :])
    if command == "features" and flags and not flags[0].startswith("-") and flags[0] != "FLAGS":
        return commands(flags)
    return training("pretrain", flags, ranks) if flags else ""


def commands(*lines: list[str]) -> str:
    """Commands within a command."""
    return next(
        filter(None, (_ask(line[0], line[1:]) for line in lines if line != ["COMMAND"])), ""
    )


def training(command: str, words: Sequence[str], ranks: int | None = None) -> str:
    """Flags of a training; it would be told to start."""
    from mindspeed.cli import pretrain
    from mindspeed.compare import forced
    from mindspeed.features import registry
    from mindspeed.features.compatibility import auto_tuning, type_check
    from mindspeed.training import initialize

    module = importlib.import_module(f"mindspeed.cli.{command}")
    defaults = {} if command == "pretrain" else module.DEFAULTS
    with (
        mock.patch.object(initialize, "check_files"),
        mock.patch.object(forced, "check_recording"),
        mock.patch.object(registry, "_device_problems", return_value=[]),
        mock.patch.object(auto_tuning, "run_with_signals", return_value=(0, b"")),
        mock.patch.object(type_check, "run_with_signals", return_value=(0, b"")),
        mock.patch.object(initialize, "load_tokenizer", _any_tokenizer(initialize.load_tokenizer)),
        quiet(),
    ):
        given = whole(words, _DATA[command])
        ranks = ranks or (ranks_of(given) if len(given) > len(words) else None)
        pretrain._prepare([*given, "--dry-run"], ranks, command, defaults)
    return ""


def ranks_of(words: Sequence[str]) -> int | None:
    """The least number of ranks for which parallel sizes are right; None: the command knows."""
    sizes = dict(pairwise(words))
    if "--nproc" in sizes:
        return None
    tensor, pipeline, context, expert = (
        int(sizes.get(f"--{name}-parallel-size", 1))
        for name in ("tensor-model", "pipeline-model", "context", "expert-model")
    )
    dense, experts = (
        tensor * context,
        expert * int(sizes.get("--expert-tensor-parallel-size", tensor)),
    )
    return pipeline * math.lcm(dense, experts)


_DATA = {
    "pretrain": ("--mock-data",),
    "finetune": ("--data", "FILE.jsonl"),
    "dpo": ("--data", "pairs.jsonl"),
    "reward": ("--data", "pairs.jsonl"),
}


def _any_tokenizer(load: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def loaded(args: Any) -> Any:
        model = args.tokenizer_model or getattr(args, "tokenizer_name_or_path", None)
        if model and not Path(model).exists():
            raise FileNotFoundError(f"make_files() does not write the tokenizer {model}")
        return load(args)

    return loaded


def whole(words: Sequence[str], data: Sequence[str] = _DATA["pretrain"]) -> list[str]:
    """A job's words, with those of a small one in the place of :data:`REST`."""
    given = [word for word in words if word not in REST]
    flags = {word.partition("=")[0] for word in given}
    if len(given) == len(words) or "--config" in flags:
        return given
    values = dict(pairwise(given))
    named = flags & {"--model", "--num-layers"} or values.get("--load", "").startswith("hf:")
    missing = [] if named else MODEL.split()
    if flags & {"--expert-model-parallel-size", "--moe-record-routing"} and not named:
        missing += [] if "--num-experts" in flags else ["--num-experts", "64"]
    if "--data" not in flags or data == _DATA["pretrain"]:
        pairs = (pair for pair in REST_OF_A_JOB.items() if pair[0] not in flags)
        missing += [word for pair in pairs for word in pair]
        missing += () if flags & {"--data", "--data-path", "--mock-data"} else data
    return [*missing, *given]


def planned(command: str, words: list[str]) -> str:
    """A command that reads a job, up to the final values of its flags."""
    from mindspeed.cli import check, explain, plan, profile
    from mindspeed.planner.question import PURPOSES, job_words, named_model
    from mindspeed.planner.scripts import job_of

    if command == "profile":
        with mock.patch.object(explain, "run") as run, quiet():
            profile.run(words)
        return planned("explain", run.call_args[0][0])
    module = {"plan": plan, "explain": explain, "check": check}[command]
    parser = plan.job_parser(command, None)
    module.add_arguments(parser)
    model = words[0] if words and not words[0].startswith(("-", "...")) else None
    own, flags = plan.read(parser, words[1:] if model else words)
    if command != "check":
        plan.use_machine(own)
    devices = own.on[1] if getattr(own, "on", None) else own.devices
    devices = devices[0] if isinstance(devices, tuple) else devices
    if flags and flags[0].endswith(".py"):
        flags = flags[1:]
    if model is None:
        job_of(whole(flags)).settings(None, devices)
        return ""
    flags = [word for word in flags if word not in REST]
    name, sizes = named_model(model)
    for purpose in own.purposes or PURPOSES:
        _, job = job_words(PURPOSES[purpose], name, sizes, flags, devices)
        job_of(job).settings(None, devices)
    return ""


def torchrun(words: list[str]) -> str:
    """A job: the launcher's words, then those of a rank."""
    from torch.distributed.run import get_args_parser

    if words[0] == "...":
        return torchrun(words[1:]) if words[1:] else ""
    with errors_as_exceptions():
        args = get_args_parser().parse_args(words)
    nodes = int(str(args.nnodes).rpartition(":")[2])
    ranks = nodes * int(args.nproc_per_node)
    name, rest = args.training_script, args.training_script_args
    if name in NOT_ASKED:
        return _of_the_file(name)
    if args.module:
        return mindspeed(rest, ranks) if name == "mindspeed" else python(["-m", name, *rest])
    if Path(name).name in SCRIPTS_OF_MEGATRON:
        rest = rest or ["..."]  # of a sentence, or the script has them
        return training("pretrain", rest, ranks)
    return python([str(Path(name)), *rest])


def python(words: list[str]) -> str:
    """A script or a module that reads its words with argparse."""
    if words[:2] == ["-m", "venv"]:
        return ""
    if words[:2] == ["-m", "mindspeed"]:
        return mindspeed(words[2:])
    if words[:2] == ["-m", "tests.npu_emulator"]:
        return commands(words[2:]) if words[2:] else ""
    name = words[1] if words[0] == "-m" else words[0]
    if name in NOT_ASKED:
        return _of_the_file(name)
    if len(words) == 1 and (ROOT / name).is_file() and "parse_args" not in read(name):
        return ""  # takes no words
    if name.startswith("tasks/"):
        return task(words)
    with quiet(), errors_as_exceptions():
        return accelerator_report().problem_of(words)


def task(words: Sequence[str]) -> str:
    """A script of the original suite's tasks, up to the model that it loads."""
    from mindspeed.cli import evaluate, task_scripts

    with (
        mock.patch.object(evaluate, "run", return_value=0),
        mock.patch.object(task_scripts, "run_model", return_value=0),
        mock.patch.object(sys, "argv", list(words)),
        quiet(),
    ):
        try:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except SystemExit as error:
            return f"it ends with {error.code}" if error.code else ""
    return "it does not read its words"


def read(name: str) -> str:
    """The text of a file of ours."""
    return (ROOT / name).read_text("utf-8")


@cache
def accelerator_report() -> Any:
    """tools/accelerator_report.py, which checks commands of its own."""
    with mock.patch.object(sys, "path", [str(ROOT / "tools"), *sys.path]):
        return importlib.import_module("accelerator_report")


def make(words: list[str]) -> str:
    """Targets of the Makefile, and its settings."""
    makefile = read("Makefile")
    for word in words:
        name, setting, _ = word.partition("=")
        if not re.search(rf"^{name} \?=" if setting else rf"^{name}:", makefile, re.M):
            return f"the Makefile has no {name}"
    done = subprocess.run(
        ["make", "--dry-run", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stderr.strip()


def pip(words: list[str]) -> str:
    """Files of requirements, requirements, and extras of ours."""
    import tomllib

    if words[0] != "install":
        return f"pip {words[0]}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    rest = iter(words[1:])
    for word in rest:
        if word in ("-r", "-c"):
            if not (ROOT / (file := next(rest))).is_file():
                return f"there is no {file}"
        elif word in ("-e", "--index-url"):
            text = next(rest)
            if word == "-e" and (wrong := _unknown_extras(f"mindspeed{text[1:]}", project)):
                return wrong
        elif word not in ("--no-deps",):
            try:
                if wrong := _unknown_extras(word, project):
                    return wrong
            except InvalidRequirement as error:
                return str(error)
    return ""


def _unknown_extras(text: str, project: Mapping[str, Any]) -> str:
    one = Requirement(text)
    wrong = one.extras - set(project["optional-dependencies"]) if one.name == "mindspeed" else ()
    return f"there is no extra {sorted(wrong)[0]}" if wrong else ""


def script(words: list[str]) -> str:
    """A shell script of ours: the commands that it would start."""
    path = ROOT / words[0]
    if not path.is_file():
        return f"there is no {words[0]}"
    own = {name: os.environ[name] for name in _set_by_the_reader(path.read_text("utf-8"))}
    text = re.sub("^ROOT=.*", "ROOT=.", path.read_text("utf-8"), flags=re.M)
    lines = command_lines(text, Path.cwd(), tuple(words[1:]), **own)
    return next(filter(None, (_ask(line.words[0], line.words[1:]) for line in lines)), "")


def _set_by_the_reader(text: str) -> Iterator[str]:
    return (name for name in re.findall(r"^([A-Z_]+)=\$\{\1:", text, re.M) if name in os.environ)


def request(words: list[str]) -> str:
    """A request to ``mindspeed serve``: its path and its body."""
    from mindspeed.inference.server import protocol

    kinds = {
        "/v1/chat/completions": protocol.ChatRequest,
        "/v1/completions": protocol.CompletionRequest,
    }
    path = re.sub(r"^http://[^/]+", "", words[0])
    if path not in kinds:
        return f"the server has no {path}"
    kinds[path](**json.loads(words[words.index("-d") + 1]))
    return ""


def lm_eval(words: list[str]) -> str:
    """The command of lm-evaluation-harness."""
    from lm_eval._cli import HarnessCLI

    with errors_as_exceptions(), mock.patch.object(sys, "argv", ["lm_eval", *words]):
        HarnessCLI().parse_args()
    return ""


def tests(words: list[str]) -> str:
    """Files of tests."""
    missing = [word for word in words if not word.startswith("-") and not list(ROOT.glob(word))]
    return f"there is no {missing[0]}" if missing else ""


def unwrapped(words: list[str], program: str) -> str:
    """The program that another one starts."""
    return _ask(program, words[words.index(program) + 1 :])


@contextlib.contextmanager
def errors_as_exceptions() -> Iterator[None]:
    """argparse's message instead of its exit."""
    import argparse

    def error(self: Any, message: str) -> None:
        raise ValueError(message)

    with mock.patch.object(argparse.ArgumentParser, "error", error):
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is printed."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@cache
def source() -> str:
    """All text that reads variables of the environment."""
    folders = ("mindspeed", "tools", "examples", "tests/npu_emulator", "docs/frameworks.md")
    found: Iterable[Path] = (file for name in folders for file in [*(ROOT / name).rglob("*")])
    kept = [one for one in found if one.suffix in (".py", ".sh", ".yaml") and one.is_file()]
    return "\n".join(one.read_text("utf-8") for one in kept)


NAMES_OF_OTHERS = {"HF_HOME", "NPROC_PER_NODE", "VERL_ENGINE_DEVICE", "HF_HUB_OFFLINE"}


def unknown_variable(variables: Mapping[str, str]) -> str:
    """A variable of the environment that nobody reads."""
    for name in variables:
        if name not in NAMES_OF_OTHERS and not re.search(rf"\b{name}\b", source()):
            return f"nothing reads the variable {name}"
    return ""


RECIPE = """
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4}
data: {seq_length: 64, tokenizer_type: HuggingFaceTokenizer, tokenizer_model: tokenizer}
training: {micro_batch_size: 1, global_batch_size: 64, train_iters: 4}
optimizer: {lr: 0.001}
"""

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
CONVERSATION = json.dumps({"messages": TURNS}) + "\n"
FILES = {
    "slots.json": '{"experts": 64, "ranks": 8, "layers": {}}',
    "plan.yaml": "all: {mlp: recompute}\n",
    "FILE.jsonl": CONVERSATION,
    "chat.jsonl": CONVERSATION,
    "pairs.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "c"}\n',
}
TEXTS = ["def f(x):\n    return x\n"] * 20


def make_files(lines: Sequence[CommandLine], directory: Path) -> None:
    """What a reader has: models of Hugging Face, recipes, conversations, a tokenizer."""
    import pyarrow
    from pyarrow.parquet import write_table

    from mindspeed.data.tokenizer import save_tokenizer, train_bpe
    from mindspeed.models.presets import presets

    words = {word for line in lines for word in line.words}
    words |= {value for line in lines for value in line.variables.values()}
    tokenizer = train_bpe(TEXTS, 300)
    hf = {word.removeprefix("hf:") for word in words if word.startswith("hf:")}
    for folder in hf | {"tokenizer", *(word for word in words if word.endswith("-hf"))}:
        save_tokenizer(tokenizer, directory / folder)
        name = Path(folder).name.lower()
        config = presets().get(name, presets()["qwen3-0.6b"]).config
        (directory / folder / "config.json").write_text(json.dumps(dict(config)))
    for word in words:
        if re.fullmatch(r"[\w/-]+\.yaml", word):
            (directory / word).parent.mkdir(parents=True, exist_ok=True)
            (directory / word).write_text(FILES.get(word, RECIPE))
        if re.fullmatch(r"\w+\.parquet", word):
            write_table(pyarrow.table({"text": TEXTS}), directory / word)
    for name, text in FILES.items():
        (directory / name).write_text(text)
