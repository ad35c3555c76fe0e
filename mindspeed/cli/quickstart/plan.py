"""The story as data: the commands in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed.cli.quickstart.paths import Places
from mindspeed.cli.quickstart.step import TRACKER, Step, words

VOCAB_SIZE = 2048
PROMPT = "This module provides"
QUESTIONS = (
    "Mapping key not found.\nQuestion: is KeyError an exception?\nAnswer:",
    "Return the number of items in a container.\nQuestion: is len an exception?\nAnswer:",
)
TUNING_ITERATIONS = 120


@dataclass(frozen=True)
class Plan(Places):
    """What is done, on which files, and how the models are trained."""

    ranks: int
    tp: int
    pp: int
    iterations: int

    @property
    def tuning_iterations(self) -> int:
        """Fewer where the pretraining is a short one, too."""
        return min(TUNING_ITERATIONS, max(2, self.iterations // 3))

    def steps(self) -> Sequence[Step]:
        """The whole way."""
        return [*self._data(), *self._pretraining(), *self._tuning(), *self._judging()]

    def _data(self) -> Sequence[Step]:
        practice, tokenizer = self.practice, self.tokenizer / "tokenizer_config.json"
        return [
            Step(
                "collect text, instructions and an exam from this Python's documentation",
                words("corpus", output=practice.directory),
                practice.corpus,
            ),
            Step(
                f"train a byte-level BPE tokenizer with {VOCAB_SIZE} entries",
                words(
                    "tokenizer",
                    "overwrite",
                    input=practice.corpus,
                    vocab_size=VOCAB_SIZE,
                    output=self.tokenizer,
                ),
                tokenizer,
                (practice.corpus,),
            ),
            Step(
                "turn the text into token files",
                words(
                    "preprocess",
                    "append-eod",
                    "overwrite",
                    input=practice.corpus,
                    tokenizer_model=self.tokenizer,
                    output_prefix=self.workdir / "data" / "corpus",
                ),
                self.workdir / "data" / "corpus_text_document.idx",
                (tokenizer,),
            ),
        ]

    def _pretraining(self) -> Sequence[Step]:
        tracker = self.checkpoints / TRACKER
        evaluations = max(self.iterations // 5, 1)
        return [
            Step(
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
            Step(
                "draw how it learned",
                words("plot", runs=(self.workdir,), output=self.picture),
                self.picture,
                (self.metrics,),
                optional=True,
            ),
            Step(
                "let it write",
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
                how="apart",
                keeps_text=True,
            ),
            Step(
                "write it for transformers",
                words("export", "hf", load=self.checkpoints, output=self.exported),
                self.exported / "config.json",
                (tracker,),
                how="apart",
                replaces=self.exported,
            ),
            Step(
                "check that transformers computes the same",
                words(
                    "verify",
                    load=self.checkpoints,
                    hf=self.exported,
                    input=self.practice.corpus,
                ),
                self.workdir / "verify.txt",
                (self.exported / "config.json",),
                how="apart",
                keeps_text=True,
            ),
        ]

    def _tuning(self) -> Sequence[Step]:
        prefix = self.workdir / "data" / "instructions"
        index = prefix.with_name("instructions_packed_input_ids_document.idx")
        tracker = self.adapter / TRACKER
        iterations = self.tuning_iterations
        return [
            Step(
                "turn questions and answers into token files with labels",
                words(
                    "preprocess",
                    "overwrite",
                    input=self.practice.instructions,
                    handler_name="AlpacaStyleInstructionHandler",
                    prompt_type=self.practice.template,
                    tokenizer_model=self.tokenizer,
                    output_prefix=prefix,
                ),
                index,
                (self.tokenizer / "tokenizer_config.json",),
            ),
            Step(
                f"tune it on them with LoRA for {iterations} iterations "
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
            Step(
                "draw how it learned that",
                words("plot", runs=(self.adapter,), output=self.tuning_picture),
                self.tuning_picture,
                (self.tuning_metrics,),
                optional=True,
            ),
            Step(
                "merge the adapter into the model",
                words(
                    "merge-lora",
                    load=self.checkpoints,
                    lora_load=self.adapter,
                    save=self.merged,
                ),
                self.merged / TRACKER,
                (tracker,),
                how="apart",
                replaces=self.merged,
            ),
        ]

    def _judging(self) -> Sequence[Step]:
        models = {
            "pretrained": (self.checkpoints, "yes/no questions about built-in names"),
            "tuned": (self.merged, "the same; it was tuned on other names"),
        }
        exams = [
            Step(
                f"exam of the {name} model: {about}",
                words(
                    "evaluate",
                    load=directory,
                    task="boolq",
                    task_data_path=self.practice.evaluation.parent,
                    output=self.results(name).parent,
                ),
                self.results(name),
                (directory / TRACKER, self.practice.corpus),
                how="apart",
                replaces=self.results(name).parent,
            )
            for name, (directory, about) in models.items()
        ]
        return [
            Step(
                "ask the tuned model",
                words(
                    "generate",
                    "greedy",
                    load=self.merged,
                    prompt=QUESTIONS,
                    max_new_tokens=24,
                ),
                self.answers,
                (self.merged / TRACKER,),
                how="apart",
                keeps_text=True,
            ),
            *exams,
        ]
