"""Keep the table of docs/frameworks.md: what trains inside frameworks that users have.

python tools/frameworks.py                       write the table from docs/frameworks.toml
python tools/frameworks.py --check               fail where it is out of date
python tools/frameworks.py --measure ms-swift    build the framework's environment from
                                                 tools/frameworks/ms-swift.txt, train in it, keep
                                                 what comes out
python tools/frameworks.py --measure verl --device npu --only actor-tensor

Each job runs on two ranks and on one CPU rank, a few steps of a tiny model that the framework's
transformers has saved, and is ``equal`` when losses and gradient norms are, within the tolerances
of the job. The two ranks are on CPUs, or on the emulated NPUs of tests/npu_emulator, where the
framework's own start for Ascend imports this library. ms-swift's jobs are its own commands in fp32.
verl's are updates by its training worker in fp32, which must equal the same updates in plain torch,
too, and its command for fine-tuning, which knows half precision only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from feature_table import ROOT, update
from megatron_release import Data, load, store

from mindspeed.processes import free_port

PAGE = ROOT / "docs" / "frameworks.md"
DATA = ROOT / "docs" / "frameworks.toml"
FILES = ROOT / "tools" / "frameworks"
_HEAD = "# What trains inside frameworks; written by tools/frameworks.py --measure.\n"
EQUAL = "equal"
LIMIT = 600
"""Seconds of a training, which needs about one minute."""
DEVICES = {"cpu": "two CPU ranks", "npu": "two emulated NPUs"}
REPORT = "MINDSPEED_FEATURES_LIVE"


class TrainingError(Exception):
    """A command failed; the message says why, in one line."""


@dataclass(frozen=True)
class Job:
    """A training on two ranks that must equal that of one.

    Attributes:
        shown: in words.
        command: of the framework; of ``verl_updates.py`` the role.
        layout: flags of two ranks.
        model: of tiny_models.py.
        flags: also those of the one rank.
        options: of this library on the two ranks.
        reached: features that must have run there.
        adapters: starts with adapters that one rank has trained for a step; those that the
            framework draws differ between layouts.
        loss: relative tolerance.
        norm: the same of gradient norms.
        plain: equals the same in plain torch, too.
    """

    shown: str
    command: str
    layout: str
    model: str = "dense"
    flags: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    reached: frozenset[str] = frozenset()
    adapters: bool = False
    loss: float = 1e-6
    norm: float = 1e-5
    plain: bool = False


@dataclass(frozen=True)
class Numbers:
    """What a training computed, by step, where it is saved, and what it printed."""

    losses: Sequence[float]
    norms: Sequence[float]
    folder: Path
    log: str = ""


class Framework(ABC):
    """Trainings with a framework.

    Args:
        python: interpreter of its environment.
        scratch: folder of models, checkpoints and logs.

    Attributes:
        versions: packages that the table names, its own first.
        environment: variables of its processes.
        environment_of: the framework whose Python environment has it, if that is another.
    """

    versions: ClassVar[tuple[str, ...]]
    jobs: ClassVar[Mapping[str, Job]]
    environment: ClassVar[Mapping[str, str]] = {}
    environment_of: ClassVar[str] = ""

    def __init__(self, python: Path, scratch: Path) -> None:
        self._python = python
        self.scratch = scratch
        self._one_ranks: dict[tuple[str, str, str], Numbers] = {}
        self.run([str(FILES / "tiny_models.py"), str(scratch)])

    @abstractmethod
    def train(self, job: Job, ranks: int, layout: str, device: str) -> Numbers:
        """Train on so many ranks of CPUs or NPUs."""

    def plain(self, job: Job) -> Numbers:
        """The same in plain torch."""
        raise NotImplementedError

    def verdict(self, job: Job, device: str = "cpu") -> str:
        """``equal``, or what is wrong, on two ranks of a device."""
        try:
            expected, found = self._one_rank(job), self.train(job, 2, job.layout, device)
            plain = self.plain(job) if job.plain else expected
        except TrainingError as error:
            return f"failed: {error}"
        if never := job.reached - reached(found.log):
            return f"never reached: {', '.join(sorted(never))}"
        for where, other in (("on one rank", expected), ("in plain torch", plain)):
            for what, within in (("loss", job.loss), ("gradient norm", job.norm)):
                name = "losses" if what == "loss" else "norms"
                pairs = zip(getattr(found, name), getattr(other, name), strict=True)
                for step, (ours, theirs) in enumerate(pairs, 1):
                    if not math.isclose(ours, theirs, rel_tol=within):
                        return f"differs: step {step}: {what} {ours}, {where} {theirs}"
        return EQUAL

    def _one_rank(self, job: Job) -> Numbers:
        key = (job.command, job.model, job.flags)
        if key not in self._one_ranks:
            self._one_ranks[key] = self.train(job, 1, "", "cpu")
        return self._one_ranks[key]

    def run(
        self, arguments: Sequence[str], ranks: int = 0, device: str = "cpu", **more: str
    ) -> str:
        """Run a program in the environment, on ranks of torchrun if there are any.

        Args:
            arguments: after ``python``.
            ranks: 0: the program starts them, if it does.
            device: that it sees.
            more: environment variables.

        Returns:
            What it printed.

        Raises:
            TrainingError: it failed.
        """
        python = str(self._python)
        launcher = f"-m torch.distributed.run --standalone --nproc_per_node {ranks}".split()
        command = [python, *(launcher if ranks else []), *arguments]
        if device == "npu":
            command = [python, "-m", "tests.npu_emulator", *command]
        own = {"MINDSPEED_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        own |= {"PYTHONPATH": str(ROOT), REPORT: "1"}
        try:
            return subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                env=os.environ | own | self.environment | more,
                cwd=self.scratch,
                timeout=LIMIT,
            ).stdout
        except subprocess.TimeoutExpired:
            raise TrainingError(f"no end within {LIMIT} seconds") from None
        except subprocess.CalledProcessError as error:
            raise TrainingError(reason(error.stderr + error.stdout)) from None


TP = "--tensor_model_parallel_size 2"
PP = "--pipeline_model_parallel_size 2"
CP = "--context_parallel_size 2"
EP = "--expert_model_parallel_size 2"
FULL = "--tuner_type full"
LORA = "--tuner_type lora --target_modules all-linear --lora_rank 4"
DPO = "--tuner_type full --rlhf_type dpo"
HOST = {"swap_attention": True, "swap_min_bytes": 0, "swap_optimizer": True}


class MsSwift(Framework):
    """Its commands ``sft``, ``pt`` and ``rlhf``."""

    versions = ("ms-swift", "mcore-bridge", "megatron-core", "transformers", "torch")
    jobs: ClassVar[Mapping[str, Job]] = {
        "sft-tensor": Job("`sft`, tensor parallel", "sft", TP, flags=FULL),
        "sft-sequence": Job(
            "`sft`, tensor and sequence parallel", "sft", f"{TP} --sequence_parallel", flags=FULL
        ),
        "sft-pipeline": Job("`sft`, pipeline", "sft", PP, flags=FULL),
        "sft-context": Job("`sft`, context parallel", "sft", CP, flags=FULL),
        "moe-expert": Job("`sft` of experts, expert parallel", "sft", EP, "moe", FULL),
        "moe-pipeline": Job("`sft` of experts, pipeline", "sft", PP, "moe", FULL),
        "lora-tensor": Job(
            "`sft` of LoRA adapters, tensor parallel", "sft", TP, flags=LORA, adapters=True
        ),
        "lora-pipeline": Job(
            "`sft` of LoRA adapters, pipeline", "sft", PP, flags=LORA, adapters=True
        ),
        "pt-tensor": Job("`pt`, tensor parallel", "pt", TP, flags=FULL),
        "pt-pipeline": Job("`pt`, pipeline", "pt", PP, flags=FULL),
        # The loss is of small differences between sums of log-probabilities, which are rounded.
        "dpo-tensor": Job("`rlhf` (DPO), tensor parallel", "rlhf", TP, flags=DPO, loss=1e-5),
        "dpo-pipeline": Job("`rlhf` (DPO), pipeline", "rlhf", PP, flags=DPO, loss=1e-5),
        "features-tensor": Job(
            "`sft`, tensor and sequence parallel, with fused norms and products, activations and "
            "optimizer states in host memory",
            "sft",
            f"{TP} --sequence_parallel",
            flags=FULL,
            options=HOST | {"use_fused_rmsnorm": True, "use_ascend_mc2": True},
            reached=frozenset({"fused-rmsnorm", "mc2", "swap-attention", "swap-optimizer"}),
        ),
        "features-pipeline": Job(
            "`sft`, pipeline, with the schedule ZB-H1",
            "sft",
            PP,
            flags=FULL,
            options={"pipeline_schedule": "zb-h1"},
            reached=frozenset({"pipeline-schedule"}),
        ),
        "features-context": Job(
            "`sft`, context parallel, with Ulysses",
            "sft",
            CP,
            flags=FULL,
            options={"context_parallel_algo": "ulysses_cp_algo"},
            reached=frozenset({"context-parallel"}),
        ),
    }
    _flags = """
    --split_dataset_ratio 0 --load_from_cache_file false --max_length 64
    --dataset_num_proc 1 --dataloader_num_workers 0 --logging_steps 1
    --torch_dtype float32 --fp16 false --bf16 false
    --micro_batch_size 1 --global_batch_size 4 --train_iters 3 --lr 1e-3
    """

    def __init__(self, python: Path, scratch: Path) -> None:
        super().__init__(python, scratch)
        self._adapters: dict[str, Path] = {}

    def train(self, job: Job, ranks: int, layout: str, device: str) -> Numbers:
        """Run the command."""
        if not job.adapters:
            return self._train(job, ranks, layout, device)
        if job.flags not in self._adapters:
            folder = self._train(job, 1, "--train_iters 1", "cpu").folder
            self._adapters[job.flags] = next(folder.glob("*/checkpoint-1"))
        more = f"{layout} --adapters {self._adapters[job.flags]}"
        return self._train(job, ranks, more, device)

    def _train(self, job: Job, ranks: int, more: str, device: str) -> Numbers:
        output = Path(tempfile.mkdtemp(dir=self.scratch))
        on_npu = device == "npu"
        program = ["-m", "swift.cli._megatron.main"] if on_npu else [str(FILES / "ms_swift.py")]
        log = self.run(
            [
                *[*program, job.command],
                *f"--model {self.scratch / job.model} --check_model false".split(),
                *f"--model_type {'qwen3_moe' if job.model == 'moe' else 'qwen3'}".split(),
                *f"--template chatml --dataset {self.scratch / job.command}.jsonl".split(),
                *self._flags.split(),
                *("" if on_npu else "--ddp_backend gloo --attention_backend unfused").split(),
                *["--output_dir", str(output)],
                *f"{job.flags} {more}".split(),
            ],
            0 if on_npu else ranks,
            device,
            MINDSPEED_CONFIG=str(self._config(job.options if ranks > 1 else {})),
            NPROC_PER_NODE=str(ranks),
            MASTER_PORT=str(free_port()),
        )
        lines = next(output.glob("*/logging.jsonl")).read_text().splitlines()
        records = [record for line in lines if "grad_norm" in (record := json.loads(line))]
        if not records:
            raise TrainingError("no step in the log")
        losses = [record["loss"] for record in records]
        return Numbers(losses, [record["grad_norm"] for record in records], output, log)

    def _config(self, options: Mapping[str, object]) -> Path:
        """A file with options, which ms-swift's parser does not know; JSON is YAML."""
        file = Path(tempfile.mkdtemp(dir=self.scratch)) / "options.yaml"
        file.write_text(json.dumps(options))
        return file


_TP, _PP = "tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"
_CP, _EP = "context_parallel_size=2", "expert_model_parallel_size=2"
_ADAPTERS = "--adapters adapters"
PADDED = "--padded"


def _updates(
    shown: str, role: str, layout: str, model: str = "dense", flags: str = "", **more: Any
) -> Job:
    """A job of verl's training worker; its losses are small sums of large numbers."""
    plain = role != "critic"  # whose head is drawn, differently in plain torch
    return Job(shown, role, layout, model, flags, loss=1e-5, norm=3e-5, plain=plain, **more)


class Updates(Framework):
    """Trainings by a script that writes losses, norms and weights."""

    script: ClassVar[str]

    def train(self, job: Job, ranks: int, layout: str, device: str) -> Numbers:
        """Run the script."""
        output = Path(tempfile.mkdtemp(dir=self.scratch)) / "found.pt"
        return self._update(job, output, ["--layout", *layout.split()], ranks, device)

    def plain(self, job: Job) -> Numbers:
        """The same in plain torch, once."""
        output = self.scratch / ("-".join([job.command, job.model, *job.flags.split()]) + ".pt")
        return self._update(job, output, ["--plain"], 0, "cpu")

    def _update(
        self, job: Job, output: Path, more: Sequence[str], ranks: int, device: str
    ) -> Numbers:
        numbers, log = output.with_suffix(".json"), ""
        if not numbers.exists():
            program = [str(FILES / self.script), job.command, str(self.scratch / job.model)]
            plain = ["--equal-to", str(self.plain(job).folder)] if job.plain and ranks else []
            more = [*job.flags.split(), *plain, *more]
            log = self.run([*program, "--output", str(output), *more], ranks, device)
        found = json.loads(numbers.read_text())
        return Numbers(found["losses"], found["norms"], output, log)


class Verl(Updates):
    """Updates by its training worker, and its command for fine-tuning."""

    versions = ("verl", "mbridge", "megatron-core", "transformers", "torch")
    script = "verl_updates.py"
    environment: ClassVar[Mapping[str, str]] = {"VERL_ENGINE_DEVICE": "npu"}  # what Ascend runs
    jobs: ClassVar[Mapping[str, Job]] = {
        "actor-tensor": _updates("actor, tensor and sequence parallel", "actor", _TP),
        "actor-pipeline": _updates("actor, pipeline", "actor", _PP),
        "actor-context": _updates("actor, context parallel", "actor", _CP),
        "actor-padded": _updates("actor, padded, tensor parallel", "actor", _TP, flags=PADDED),
        "actor-expert": _updates("actor of experts, expert parallel", "actor", _EP, "moe"),
        "actor-moe-pipeline": _updates("actor of experts, pipeline", "actor", _PP, "moe"),
        "critic-tensor": _updates("critic, tensor and sequence parallel", "critic", _TP),
        "critic-pipeline": _updates("critic, pipeline", "critic", _PP),
        "reference-tensor": _updates("reference, tensor parallel", "reference", _TP),
        "reference-context": _updates("reference, context parallel", "reference", _CP),
        "sft-tensor": Job(
            "`sft_trainer` in bf16, tensor parallel",
            "sft",
            f"engine.{_TP}",
            loss=1e-2,
            norm=2e-2,
        ),
        "features-tensor": _updates(
            "actor, tensor and sequence parallel, with fused norms and activations recomputed",
            "actor",
            _TP,
            options={"use_fused_rmsnorm": True, "recompute_activation_function": True},
            reached=frozenset({"fused-rmsnorm", "recompute-activation-function"}),
        ),
        "features-pipeline": _updates(
            "actor, pipeline, with the schedule ZB-H1",
            "actor",
            _PP,
            options={"pipeline_schedule": "zb-h1", "pipeline_model_parallel_size": 2},
            reached=frozenset({"pipeline-schedule"}),
        ),
        "features-context": _updates(
            "actor, context parallel, with Ulysses",
            "actor",
            _CP,
            options={"context_parallel_algo": "ulysses_cp_algo"},
            reached=frozenset({"context-parallel"}),
        ),
        "features-optimizer": Job(
            "`sft_trainer` in bf16, tensor parallel, weights within the main weights",
            "sft",
            f"engine.{_TP}",
            options={"reuse_fp32_param": True},
            reached=frozenset({"reuse-fp32-param"}),
            loss=1e-2,
            norm=2e-2,
        ),
    }
    _flags = """
    engine=megatron optim=megatron engine.vanilla_mbridge=True
    engine.override_transformer_config.attention_backend=unfused
    data.train_batch_size=4 data.micro_batch_size_per_gpu=1 data.use_dynamic_bsz=False
    data.num_workers=0 data.max_length=64 data.truncation=right trainer.total_training_steps=3
    trainer.logger=[console] optim.lr=1e-3
    """

    def train(self, job: Job, ranks: int, layout: str, device: str) -> Numbers:
        """Update, or run the command."""
        options = [f"{name}={value}" for name, value in job.options.items() if ranks > 1]
        if job.command != "sft":
            return super().train(job, ranks, f"{layout} --options {' '.join(options)}", device)
        output = Path(tempfile.mkdtemp(dir=self.scratch))
        on_npu = device == "npu"
        program = ["-m", "verl.trainer.sft_trainer"] if on_npu else [str(FILES / "verl_cpu.py")]
        log = self.run(
            [
                *program,
                f"model.path={self.scratch / job.model}",
                f"data.train_files={self.scratch / 'sft.parquet'}",
                f"trainer.n_gpus_per_node={ranks}",
                f"trainer.default_local_dir={output}",
                *f"{self._flags} {layout}".split(),
                *(f"+engine.override_transformer_config.{option}" for option in options),
            ],
            ranks,
            device,
        )
        found = re.findall(r"train/loss:(\S+) .*train/grad_norm:(\S+)", log)
        if not found:
            raise TrainingError("no step in the log")
        losses, norms = (
            [float(number) for number in numbers] for numbers in zip(*found, strict=True)
        )
        return Numbers(losses, norms, output, log)


def _bridged(
    shown: str, bridge: str, layout: str, model: str = "dense", flags: str = "", **more: Any
) -> Job:
    """A job of a bridge, whose logits and saved weights are compared, too."""
    return Job(shown, bridge, layout, model, flags, plain=True, **more)


class Mbridge(Updates):
    """Its models, in Megatron's training."""

    versions = ("mbridge", "megatron-core", "transformers", "torch")
    script = "bridge_updates.py"
    environment_of = "verl"
    jobs: ClassVar[Mapping[str, Job]] = {
        "tensor": _bridged("tensor and sequence parallel", "mbridge", _TP),
        "pipeline": _bridged("pipeline", "mbridge", _PP),
        "expert": _bridged("experts, expert parallel", "mbridge", _EP, "moe"),
    }


class McoreBridge(Updates):
    """The same."""

    versions = ("mcore-bridge", "megatron-core", "transformers", "peft", "torch")
    script = "bridge_updates.py"
    environment_of = "ms-swift"
    jobs: ClassVar[Mapping[str, Job]] = {
        "tensor": _bridged("tensor and sequence parallel", "mcore-bridge", _TP),
        "pipeline": _bridged("pipeline", "mcore-bridge", _PP),
        "expert": _bridged("experts, expert parallel", "mcore-bridge", _EP, "moe"),
        "moe-pipeline": _bridged("experts, pipeline", "mcore-bridge", _PP, "moe"),
        "latent": _bridged(
            "latent attention, tensor and sequence parallel", "mcore-bridge", _TP, "mla"
        ),
        "latent-pipeline": _bridged("latent attention, pipeline", "mcore-bridge", _PP, "mla"),
        "lora": _bridged("LoRA adapters, tensor parallel", "mcore-bridge", _TP, flags=_ADAPTERS),
        "lora-pipeline": _bridged("LoRA adapters, pipeline", "mcore-bridge", _PP, flags=_ADAPTERS),
    }


def _recipe(shown: str, command: str, layout: str) -> Job:
    """A job of a training loop whose log has four digits of norms."""
    return Job(f"recipe by `{command}`, {shown}", command, layout, loss=2e-6, norm=1e-3, plain=True)


class MegatronBridge(Updates):
    """The same, and recipes by its own training loop."""

    versions = ("megatron-bridge", "megatron-core", "transformers", "torch")
    script = "bridge_updates.py"
    jobs: ClassVar[Mapping[str, Job]] = {
        "tensor": _bridged("tensor and sequence parallel", "megatron-bridge", _TP),
        "pipeline": _bridged("pipeline", "megatron-bridge", _PP),
        "expert": _bridged("experts, expert parallel", "megatron-bridge", _EP, "moe"),
        "latent": _bridged(
            "latent attention, tensor and sequence parallel", "megatron-bridge", _TP, "mla"
        ),
        "pretrain-tensor": _recipe("tensor and sequence parallel", "pretrain", _TP),
        "pretrain-pipeline": _recipe("pipeline", "pretrain", _PP),
        "finetune-tensor": _recipe("tensor and sequence parallel", "finetune", _TP),
        "finetune-pipeline": _recipe("pipeline", "finetune", _PP),
    }

    def train(self, job: Job, ranks: int, layout: str, device: str) -> Numbers:
        """Run a script, or a recipe."""
        if job.command == "megatron-bridge":
            return super().train(job, ranks, layout, device)
        return self._recipe(job, ["--layout", *layout.split()], ranks, device)

    def plain(self, job: Job) -> Numbers:
        """The same in plain torch; of a recipe on the batches that one rank has read."""
        if job.command == "megatron-bridge":
            return super().plain(job)
        return self._recipe(job, ["--plain"], 0, "cpu")

    def _recipe(self, job: Job, more: Sequence[str], ranks: int, device: str) -> Numbers:
        home, model = self.scratch / "recipes", str(self.scratch / job.model)
        program = str(FILES / "bridge_recipes.py")
        if not home.exists():
            self.run([program, "import", model], 1, HF_HOME=str(home))
        log = self.run([program, job.command, model, *more], ranks, device, HF_HOME=str(home))
        found = re.findall(r" lm loss: (\S+) .* grad norm: (\S+)", log)
        if not found:
            raise TrainingError("no step in the log")
        losses, norms = ([float(x) for x in numbers] for numbers in zip(*found, strict=True))
        return Numbers(losses, norms, home, log)


FRAMEWORKS: dict[str, type[Framework]] = {
    "ms-swift": MsSwift,
    "verl": Verl,
    "mbridge": Mbridge,
    "mcore-bridge": McoreBridge,
    "megatron-bridge": MegatronBridge,
}


def build(name: str, folder: Path, torch_index: str) -> Path:
    """The interpreter of a framework's environment, built when it is not there.

    Args:
        name: of the framework.
        folder: where environments are.
        torch_index: package index of torch; empty for that of everything else.
    """
    python = folder / name / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pins = FILES / f"{name}.txt"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
    # First: whatever requires torch then keeps this build.
    torch = next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
    index = ["--index-url", torch_index] if torch_index else []
    subprocess.run([*pip, *index, torch], check=True)
    subprocess.run([*pip, "-r", str(pins)], check=True)
    if (alone := pins.with_suffix(".no-deps.txt")).exists():
        subprocess.run([*pip, "--no-deps", "-r", str(alone)], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    return python


def reason(log: str) -> str:
    """The first exception in the log of ranks, and where it was raised."""
    plain = re.sub(r"^\[rank\d+\]:", "", log, flags=re.M)
    found = re.search(r"^\s?(\w+(?:\.\w+)*(?:Error|Exception)\b.*)$", plain, re.M)
    if found is None:
        return "no exception in the log"
    places = re.findall(
        r'File "\S*?(?:site-packages/|/(?=mindspeed/))(\S+)", line (\d+)', plain[: found.start()]
    )
    where = f" in {places[-1][0]}:{places[-1][1]}" if places else ""
    return f"{found[1].strip()[:200]}{where}"


def reached(log: str) -> frozenset[str]:
    """The features that a training has reported to have run."""
    found = re.search(r"^features reached in the first step: (.*)$", log, re.M)
    return frozenset(found[1].split(", ") if found else ())


def measure(
    name: str, python: Path, devices: Sequence[str], jobs: Sequence[str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Versions of the environment, then what each job does on each device; with its section."""
    framework = FRAMEWORKS[name]
    code = "import sys; from importlib.metadata import version as v; print(*map(v, sys.argv[1:]))"
    versions = subprocess.check_output([str(python), "-c", code, *framework.versions], text=True)
    yield (
        name,
        {
            package: version.partition("+")[0]
            for package, version in zip(framework.versions, versions.split(), strict=True)
        },
    )
    with tempfile.TemporaryDirectory() as scratch:
        trainings = framework(python, Path(scratch))
        for job in jobs or framework.jobs:
            for device in devices:
                verdict = trainings.verdict(framework.jobs[job], device)
                print(f"{name} {job} {device}: {verdict}", flush=True)
                yield section(name, device), {job: verdict}


def section(name: str, device: str) -> str:
    """Of the data file: the framework's own has versions and what CPU ranks did."""
    return name if device == "cpu" else f"{name}-{device}"


def table(data: Data) -> str:
    """One row a job, below the packages of its framework; what is not equal in words."""
    lines = [f"| framework | trains | {' | '.join(DEVICES.values())} |", "|---|---|---|---|"]
    for name, framework in FRAMEWORKS.items():
        found = data[name]
        packages = ", ".join(f"{package} {found[package]}" for package in framework.versions[1:])
        lines.append(f"| {name} {found[name]} | with {packages} | | |")
        for job, run in framework.jobs.items():
            verdicts = [
                data.get(section(name, device), {}).get(job, "not measured") for device in DEVICES
            ]
            plain = ", to plain torch as well" if run.plain else ""
            shown = [v + plain if v == EQUAL else v for v in verdicts]
            lines.append(f"| | {run.shown} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure frameworks, and write or check the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    parser.add_argument("--measure", nargs="+", choices=FRAMEWORKS, default=[])
    parser.add_argument("--device", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--only", nargs="+", metavar="JOB", default=[])
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "frameworks")
    parser.add_argument("--torch-index", default="", help="package index of torch")
    args = parser.parse_args(arguments)
    for name in args.measure:
        if unknown := set(args.only) - FRAMEWORKS[name].jobs.keys():
            known = ", ".join(FRAMEWORKS[name].jobs)
            parser.error(f"{name} has no job {', '.join(sorted(unknown))}; it has {known}")
    data = load(DATA)
    for name in args.measure:
        python = build(
            FRAMEWORKS[name].environment_of or name, args.environments.absolute(), args.torch_index
        )
        for part, found in measure(name, python, args.device, args.only):
            data[part] = data.get(part, {}) | found
            store(DATA, _HEAD, data)
    return update({PAGE: {"frameworks": table(data)}}, "frameworks", check=args.check)


if __name__ == "__main__":
    sys.exit(main())
