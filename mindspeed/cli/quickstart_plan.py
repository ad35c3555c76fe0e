"""The steps of the quickstart as data, and the files that they make.

A step is done when its output exists and is not older than its inputs; a training is done when its
latest checkpoint has all iterations.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspeed.data.quickstart_corpus import CorpusFiles

# Names the latest checkpoint of a directory; written last, so it also says when it was finished.
TRACKER = "latest_checkpointed_iteration.txt"

# Where a command runs: in this process, in a subprocess, or in one whose progress is shown.
How = Literal["in_process", "subprocess", "training"]


@dataclass(frozen=True)
class QuickstartStep:
    """One command.

    Attributes:
        title: Description.
        command: Arguments of ``mindspeed``.
        output: The last file that it writes.
        inputs: Files that it depends on.
        how: Where it runs.
        iterations: Iterations of a training.
        metrics: Metrics file of a training.
        keeps_text: Write its standard output to ``output``.
        replaces: Directory that the command creates; an outdated one is removed first.
        optional: Skip the step if a package for it is missing.
    """

    title: str
    command: tuple[str, ...]
    output: Path
    inputs: tuple[Path, ...] = ()
    how: How = "in_process"
    iterations: int = 0
    metrics: Path | None = None
    keeps_text: bool = False
    replaces: Path | None = None
    optional: bool = False

    @property
    def trained(self) -> int:
        """Iterations of the latest checkpoint of a training."""
        text = self.output.read_text("utf-8").strip() if self.output.exists() else ""
        return int(text) if text.isdecimal() else 0

    def fresh(self) -> bool:
        """Whether the output exists and no input is newer."""
        if not self.output.exists():
            return False
        written = self.output.stat().st_mtime_ns
        return all(path.exists() and path.stat().st_mtime_ns <= written for path in self.inputs)

    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.fresh() and (self.how != "training" or self.trained >= self.iterations)


def words(command: str, *switches: str, **flags: Any) -> tuple[str, ...]:
    """A command line from Python values.

    Args:
        command: Name of the command.
        switches: Flags without a value.
        flags: Flags with a value, or with several (a tuple repeats the flag); ``runs`` are
            arguments without a flag.
    """
    result = [command, *map(str, flags.pop("runs", ()))]
    for name, value in flags.items():
        for item in value if isinstance(value, tuple) else (value,):
            result.append(f"--{name.replace('_', '-')}={item}")
    return (*result, *(f"--{switch}" for switch in switches))


def typed(command: tuple[str, ...], width: int = 96) -> str:
    """The command as typed in a shell, wrapped over several lines."""
    lines = ["mindspeed"]
    for word in command:
        name, _, value = word.partition("=")
        text = f"{name} {_quoted(value)}" if word.startswith("--") and value else word
        if len(lines[-1]) + len(text) + 3 > width:
            lines.append("   ")
        lines[-1] += f" {text}"
    return " \\\n".join(lines)


def _quoted(value: str) -> str:
    """One shell word; with newlines in bash's $'...' form."""
    if "\n" not in value:
        return shlex.quote(value)
    escaped = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"


VOCAB_SIZE = 2048
PROMPT = "This module provides"
QUESTIONS = (
    "Mapping key not found.\nQuestion: is KeyError an exception?\nAnswer:",
    "Return the number of items in a container.\nQuestion: is len an exception?\nAnswer:",
)
TUNING_ITERATIONS = 120


@dataclass(frozen=True)
class Paths:
    """Files and directories below ``workdir``."""

    workdir: Path

    @property
    def corpus_files(self) -> CorpusFiles:
        return CorpusFiles(self.workdir / "practice")

    @property
    def tokenizer(self) -> Path:
        return self.workdir / "tokenizer"

    @property
    def checkpoints(self) -> Path:
        return self.workdir / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.workdir / "metrics.jsonl"

    @property
    def exported(self) -> Path:
        return self.workdir / "hf"

    @property
    def adapter(self) -> Path:
        return self.workdir / "lora"

    @property
    def tuning_metrics(self) -> Path:
        return self.adapter / "metrics.jsonl"

    @property
    def merged(self) -> Path:
        return self.workdir / "merged"

    @property
    def loss_plot(self) -> Path:
        return self.workdir / "loss.png"

    @property
    def tuning_plot(self) -> Path:
        return self.workdir / "tuning.png"

    @property
    def sample(self) -> Path:
        return self.workdir / "sample.txt"

    @property
    def answers(self) -> Path:
        return self.workdir / "answers.txt"

    def results(self, model: str) -> Path:
        """The results of an evaluation; ``model`` is ``pretrained`` or ``tuned``."""
        return self.workdir / "scores" / model / "results.json"


@dataclass(frozen=True)
class Quickstart(Paths):
    """All steps with their files, parallel sizes and iterations."""

    ranks: int
    tp: int
    pp: int
    iterations: int

    @property
    def tuning_iterations(self) -> int:
        """Fewer if pretraining is short as well."""
        return min(TUNING_ITERATIONS, max(2, self.iterations // 3))

    def steps(self) -> Sequence[QuickstartStep]:
        return [*self._data(), *self._pretraining(), *self._tuning(), *self._evaluation()]

    def _data(self) -> Sequence[QuickstartStep]:
        corpus_files, tokenizer = self.corpus_files, self.tokenizer / "tokenizer_config.json"
        return [
            QuickstartStep(
                "collect text, instructions and questions from this Python's documentation",
                words("corpus", output=corpus_files.directory),
                corpus_files.corpus,
            ),
            QuickstartStep(
                f"train a byte-level BPE tokenizer with {VOCAB_SIZE} entries",
                words(
                    "tokenizer",
                    "overwrite",
                    input=corpus_files.corpus,
                    vocab_size=VOCAB_SIZE,
                    output=self.tokenizer,
                ),
                tokenizer,
                (corpus_files.corpus,),
            ),
            QuickstartStep(
                "tokenize the text",
                words(
                    "preprocess",
                    "append-eod",
                    "overwrite",
                    input=corpus_files.corpus,
                    tokenizer_model=self.tokenizer,
                    output_prefix=self.workdir / "data" / "corpus",
                ),
                self.workdir / "data" / "corpus_text_document.idx",
                (tokenizer,),
            ),
        ]

    def _pretraining(self) -> Sequence[QuickstartStep]:
        tracker = self.checkpoints / TRACKER
        evaluations = max(self.iterations // 5, 1)
        return [
            QuickstartStep(
                f"pretrain a LLaMA for {self.iterations} iterations "
                f"({self.ranks} processes, TP {self.tp} x PP {self.pp})",
                words(
                    "pretrain",
                    "auto-resume",
                    "override-opt-param-scheduler",
                    config="quickstart",
                    nproc=self.ranks,
                    tensor_model_parallel_size=self.tp,
                    pipeline_model_parallel_size=self.pp,
                    train_iters=self.iterations,
                    lr_warmup_iters=min(30, self.iterations // 4),
                    eval_interval=evaluations,
                    data_path=self.workdir / "data" / "corpus_text_document",
                    tokenizer_model=self.tokenizer,
                    save=self.checkpoints,
                    save_interval=evaluations,
                    keep_last=2,
                    metrics_file=self.metrics,
                    tensorboard_dir=self.workdir / "tensorboard",
                ),
                tracker,
                how="training",
                iterations=self.iterations,
                metrics=self.metrics,
            ),
            QuickstartStep(
                "plot the training",
                words("plot", runs=(self.workdir,), output=self.loss_plot),
                self.loss_plot,
                (self.metrics,),
                optional=True,
            ),
            QuickstartStep(
                "generate text",
                words(
                    "generate",
                    load=self.checkpoints,
                    prompt=PROMPT,
                    max_new_tokens=100,
                    temperature=0.5,
                    top_p=0.9,
                ),
                self.sample,
                (tracker,),
                how="subprocess",
                keeps_text=True,
            ),
            QuickstartStep(
                "export for transformers",
                words("export", "hf", load=self.checkpoints, output=self.exported),
                self.exported / "config.json",
                (tracker,),
                how="subprocess",
                replaces=self.exported,
            ),
            QuickstartStep(
                "verify the logits against transformers",
                words(
                    "verify",
                    load=self.checkpoints,
                    hf=self.exported,
                    input=self.corpus_files.corpus,
                ),
                self.workdir / "verify.txt",
                (self.exported / "config.json",),
                how="subprocess",
                keeps_text=True,
            ),
        ]

    def _tuning(self) -> Sequence[QuickstartStep]:
        prefix = self.workdir / "data" / "instructions"
        index = prefix.with_name("instructions_packed_input_ids_document.idx")
        tracker = self.adapter / TRACKER
        iterations = self.tuning_iterations
        return [
            QuickstartStep(
                "tokenize questions and answers, with labels",
                words(
                    "preprocess",
                    "overwrite",
                    input=self.corpus_files.instructions,
                    handler_name="AlpacaStyleInstructionHandler",
                    prompt_type=self.corpus_files.template,
                    tokenizer_model=self.tokenizer,
                    output_prefix=prefix,
                ),
                index,
                (self.tokenizer / "tokenizer_config.json",),
            ),
            QuickstartStep(
                f"fine-tune on them with LoRA for {iterations} iterations "
                f"({self.tp} processes, TP {self.tp})",
                words(
                    "finetune",
                    "auto-resume",
                    "variable-seq-lengths",
                    config="quickstart",
                    nproc=self.tp,
                    tensor_model_parallel_size=self.tp,
                    pipeline_model_parallel_size=1,
                    load=self.checkpoints,
                    save=self.adapter,
                    lora_target_modules="all-linear",
                    lora_r=8,
                    lora_alpha=16,
                    lr=1e-2,
                    min_lr=5e-4,
                    lr_warmup_iters=min(10, iterations // 2),
                    weight_decay=0,
                    train_iters=iterations,
                    eval_iters=0,
                    split="100,0,0",
                    data_path=prefix,
                    tokenizer_model=self.tokenizer,
                ),
                tracker,
                (self.checkpoints / TRACKER, index),
                how="training",
                iterations=iterations,
                metrics=self.tuning_metrics,
                replaces=self.adapter,
            ),
            QuickstartStep(
                "plot the fine-tuning",
                words("plot", runs=(self.adapter,), output=self.tuning_plot),
                self.tuning_plot,
                (self.tuning_metrics,),
                optional=True,
            ),
            QuickstartStep(
                "merge the adapter into the model",
                words(
                    "merge-lora",
                    load=self.checkpoints,
                    lora_load=self.adapter,
                    save=self.merged,
                ),
                self.merged / TRACKER,
                (tracker,),
                how="subprocess",
                replaces=self.merged,
            ),
        ]

    def _evaluation(self) -> Sequence[QuickstartStep]:
        models = {
            "pretrained": (self.checkpoints, "yes/no questions about built-in names"),
            "tuned": (self.merged, "the same; it was fine-tuned on other names"),
        }
        evaluations = [
            QuickstartStep(
                f"evaluate the {name} model: {about}",
                words(
                    "evaluate",
                    load=directory,
                    task="boolq",
                    task_data_path=self.corpus_files.evaluation.parent,
                    output=self.results(name).parent,
                ),
                self.results(name),
                (directory / TRACKER, self.corpus_files.corpus),
                how="subprocess",
                replaces=self.results(name).parent,
            )
            for name, (directory, about) in models.items()
        ]
        return [
            QuickstartStep(
                "ask the fine-tuned model",
                words(
                    "generate",
                    "greedy",
                    load=self.merged,
                    prompt=QUESTIONS,
                    max_new_tokens=24,
                ),
                self.answers,
                (self.merged / TRACKER,),
                how="subprocess",
                keeps_text=True,
            ),
            *evaluations,
        ]
