"""Files of the quickstart, below one directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed.data.quickstart_corpus import Files


@dataclass(frozen=True)
class Paths:
    """Files and directories below ``workdir``."""

    workdir: Path

    @property
    def corpus_files(self) -> Files:
        return Files(self.workdir / "practice")

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
