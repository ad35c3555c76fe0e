"""Keep the table of docs/frameworks.md: what trains inside frameworks that users have.

python tools/frameworks.py                       write the table from docs/frameworks.toml
python tools/frameworks.py --check               fail where it is out of date
python tools/frameworks.py --measure ms-swift    build the framework's environment from
                                                 tools/frameworks/ms-swift.txt, train in it, keep
                                                 what comes out
python tools/frameworks.py --measure ms-swift --only sft-tensor

Each job is the framework's own command on CPU ranks, three steps in fp32 of a tiny model that the
framework's transformers has saved. It is ``equal`` when losses are within 1e-6 (DPO's: 1e-5) and
gradient norms within 1e-5, relative, of those of the same command on one rank.
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from feature_table import ROOT, update
from megatron_release import Data, load, store

PAGE = ROOT / "docs" / "frameworks.md"
DATA = ROOT / "docs" / "frameworks.toml"
FILES = ROOT / "tools" / "frameworks"
_HEAD = "# What trains inside frameworks; written by tools/frameworks.py --measure.\n"
_VERSIONS = ("ms-swift", "mcore-bridge", "megatron-core", "transformers", "torch")
EQUAL = "equal"
LIMIT = 600
"""Seconds of a training, which needs about one minute."""


@dataclass(frozen=True)
class Job:
    """A training that must equal that of one rank.

    Attributes:
        shown: in words.
        command: of the framework; its data has the same name.
        layout: flags.
        model: of tiny_models.py.
        flags: also those of the one rank.
        adapters: starts with adapters that one rank has trained for a step; those that the
            framework draws differ between layouts.
        loss: relative tolerance.
    """

    shown: str
    command: str
    layout: str
    model: str = "dense"
    flags: str = "--tuner_type full"
    adapters: bool = False
    loss: float = 1e-6


TP = "--tensor_model_parallel_size 2"
PP = "--pipeline_model_parallel_size 2"
CP = "--context_parallel_size 2"
EP = "--expert_model_parallel_size 2"
LORA = "--tuner_type lora --target_modules all-linear --lora_rank 4"
DPO = "--tuner_type full --rlhf_type dpo"
FLAGS = """
--split_dataset_ratio 0 --load_from_cache_file false --max_length 64
--dataset_num_proc 1 --dataloader_num_workers 0 --logging_steps 1
--torch_dtype float32 --fp16 false --bf16 false --ddp_backend gloo --attention_backend unfused
--micro_batch_size 1 --global_batch_size 4 --train_iters 3 --lr 1e-3
"""
JOBS = {
    "sft-tensor": Job("`sft`, tensor parallel", "sft", TP),
    "sft-sequence": Job("`sft`, tensor and sequence parallel", "sft", f"{TP} --sequence_parallel"),
    "sft-pipeline": Job("`sft`, pipeline", "sft", PP),
    "sft-context": Job("`sft`, context parallel", "sft", CP),
    "moe-expert": Job("`sft` of experts, expert parallel", "sft", EP, "moe"),
    "moe-pipeline": Job("`sft` of experts, pipeline", "sft", PP, "moe"),
    "lora-tensor": Job("`sft` of LoRA adapters, tensor parallel", "sft", TP, "dense", LORA, True),
    "lora-pipeline": Job("`sft` of LoRA adapters, pipeline", "sft", PP, "dense", LORA, True),
    "pt-tensor": Job("`pt`, tensor parallel", "pt", TP),
    "pt-pipeline": Job("`pt`, pipeline", "pt", PP),
    # The loss is of small differences between sums of log-probabilities, which are rounded.
    "dpo-tensor": Job("`rlhf` (DPO), tensor parallel", "rlhf", TP, "dense", DPO, loss=1e-5),
    "dpo-pipeline": Job("`rlhf` (DPO), pipeline", "rlhf", PP, "dense", DPO, loss=1e-5),
}
"""ms-swift's, on two ranks each."""
Steps = list[tuple[float, float]]


class TrainingError(Exception):
    """A command failed; the message says why, in one line."""


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
    if torch_index:
        torch = next(line for line in pins.read_text().splitlines() if line.startswith("torch=="))
        subprocess.run([*pip, "--index-url", torch_index, torch], check=True)
    subprocess.run([*pip, "-r", str(pins)], check=True)
    subprocess.run([*pip, "--no-deps", "-e", str(ROOT)], check=True)
    return python


class Trainings:
    """Trainings with a framework.

    Args:
        python: interpreter of its environment.
        scratch: folder of models, checkpoints and logs.
    """

    def __init__(self, python: Path, scratch: Path) -> None:
        self._python = python
        self._scratch = scratch
        self._one_ranks: dict[tuple[str, str, str], Steps] = {}
        self._adapters: dict[tuple[str, str, str], str] = {}
        self._run([str(FILES / "tiny_models.py"), str(scratch)])

    def verdict(self, job: Job) -> str:
        """``equal``, or what is wrong."""
        try:
            expected, found = self._one_rank(job), self._train(job, 2, job.layout)[0]
        except TrainingError as error:
            return f"failed: {error}"
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True), 1):
            for what, one, other, within in zip(
                ("loss", "gradient norm"), ours, theirs, (job.loss, 1e-5), strict=True
            ):
                if not math.isclose(one, other, rel_tol=within):
                    return f"differs: step {step}: {what} {one}, on one rank {other}"
        return EQUAL

    def _one_rank(self, job: Job) -> Steps:
        key = (job.command, job.model, job.flags)
        if key not in self._one_ranks:
            if job.adapters:
                folder = self._train(job, 1, "--train_iters 1")[1]
                self._adapters[key] = str(next(folder.glob("*/checkpoint-1")))
            self._one_ranks[key] = self._train(job, 1, "")[0]
        return self._one_ranks[key]

    def _train(self, job: Job, ranks: int, layout: str) -> tuple[Steps, Path]:
        """Losses and gradient norms by step, and the folder with what was saved."""
        output = Path(tempfile.mkdtemp(dir=self._scratch))
        adapters = self._adapters.get((job.command, job.model, job.flags))
        self._run(
            [
                *f"-m torch.distributed.run --standalone --nproc_per_node {ranks}".split(),
                *[str(FILES / "ms_swift.py"), job.command],
                *f"--model {self._scratch / job.model} --check_model false".split(),
                *f"--model_type {'qwen3_moe' if job.model == 'moe' else 'qwen3'}".split(),
                *f"--template chatml --dataset {self._scratch / job.command}.jsonl".split(),
                *FLAGS.split(),
                *["--output_dir", str(output)],
                *([] if adapters is None else ["--adapters", adapters]),
                *f"{job.flags} {layout}".split(),
            ]
        )
        lines = next(output.glob("*/logging.jsonl")).read_text().splitlines()
        records = [record for line in lines if "grad_norm" in (record := json.loads(line))]
        if not records:
            raise TrainingError("no step in the log")
        return [(record["loss"], record["grad_norm"]) for record in records], output

    def _run(self, arguments: list[str]) -> None:
        environment = os.environ | {
            "MINDSPEED_DEVICE": "cpu",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": str(ROOT),
        }
        try:
            subprocess.run(
                [str(self._python), *arguments],
                check=True,
                capture_output=True,
                text=True,
                env=environment,
                cwd=self._scratch,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            raise TrainingError(f"no end within {LIMIT} seconds") from None
        except subprocess.CalledProcessError as error:
            raise TrainingError(reason(error.stderr + error.stdout)) from None


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


def measure(name: str, python: Path, jobs: list[str]) -> Iterator[dict[str, str]]:
    """Versions of the environment, then what each job does."""
    code = "import sys; from importlib.metadata import version as v; print(*map(v, sys.argv[1:]))"
    versions = subprocess.check_output([str(python), "-c", code, *_VERSIONS], text=True).split()
    yield {
        package: version.partition("+")[0]
        for package, version in zip(_VERSIONS, versions, strict=True)
    }
    with tempfile.TemporaryDirectory() as scratch:
        trainings = Trainings(python, Path(scratch))
        for job in jobs:
            verdict = trainings.verdict(JOBS[job])
            print(f"{name} {job}: {verdict}", flush=True)
            yield {job: verdict}


def table(data: Data) -> str:
    """One row a job, one column a framework; what is not equal in words."""
    shown = {package: package for package in _VERSIONS} | {
        name: job.shown for name, job in JOBS.items()
    }
    lines = ["| | " + " | ".join(data) + " |", "|---|" + "---|" * len(data)]
    for name, words in shown.items():
        cells = (found.get(name, "") for found in data.values())
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure frameworks, and write or check the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    parser.add_argument("--measure", nargs="+", choices=["ms-swift"], default=[])
    parser.add_argument("--only", nargs="+", metavar="JOB", choices=JOBS, default=list(JOBS))
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "frameworks")
    parser.add_argument("--torch-index", default="", help="package index of torch")
    args = parser.parse_args(arguments)
    data = load(DATA)
    for name in args.measure:
        python = build(name, args.environments.absolute(), args.torch_index)
        for found in measure(name, python, args.only):
            data[name] = data.get(name, {}) | found
            store(DATA, _HEAD, data)
    return update({PAGE: {"frameworks": table(data)}}, "frameworks", check=args.check)


if __name__ == "__main__":
    sys.exit(main())
