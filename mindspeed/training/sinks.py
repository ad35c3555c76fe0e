"""Destinations of metrics: terminal, JSON lines, TensorBoard, Weights & Biases.

:class:`mindspeed.training.log.Log` makes one stream of records, and each sink shows or keeps it in
its own way. Only one rank opens sinks. A resumed run continues in the same files: what was
recorded after the loaded checkpoint is dropped (JSON lines), hidden (TensorBoard), or not
recorded a second time (W&B), so that no iteration appears twice.

Curves have Megatron-LM's names, so that runs of both are comparable in one dashboard.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import netrc
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.errors import describe
from mindspeed.files import atomic_write_text, make_dirs, secure_open
from mindspeed.flags import read
from mindspeed.parsing import decode_json
from mindspeed.training.options import LoggingOptions, TrainingOptions

Metrics = Mapping[str, Any]

# Our key -> the name of the curve, Megatron-LM's where it has one. Keys that are not here are names
# of reports (:mod:`mindspeed.training.forward_step`) and of auxiliary losses: the curve's, too.
CURVES = {
    "lm_loss": "lm loss",
    "learning_rate": "learning-rate",
    "global_batch_size": "batch-size",
    "seconds_per_iteration": "iteration-time",
    "tflops_per_device": "throughput",
    "validation_loss": "lm loss validation",
    "validation_perplexity": "lm loss validation ppl",
    "test_loss": "lm loss test",
    "test_perplexity": "lm loss test ppl",
    "consumed_samples": "consumed-samples",
    "grad_norm": "grad-norm",
    "tokens_per_second": "tokens-per-second",
    "memory_gb": "memory-gb",
    "skipped_iterations": "skipped-iterations",
    "loss_scale": "loss-scale",
    "params_norm": "params-norm",
    "padding_fraction": "padding-fraction",
    "positions_per_second": "positions-per-second",
}
_NO_CURVE = ("iteration", "eta_seconds")
_AUXILIARY = ("load_balancing_loss", "z_loss")
# Names that no report can have: they are in the files or curves already.
RESERVED = frozenset({*CURVES, *CURVES.values(), *_NO_CURVE, *_AUXILIARY, "time"} - {"lm loss"})


class Sink(Protocol):
    """One destination of the metrics."""

    def record(self, iteration: int, metrics: Metrics, line: str) -> None:
        """Take the metrics up to ``iteration``; ``line`` is the text form."""

    def message(self, text: str) -> None:
        """Show a line that is no metric."""

    def advance(self) -> None:
        """One more step is done."""

    def close(self) -> str | None:
        """Write what is left; returns a command that shows it."""


def open_sinks(args: argparse.Namespace, done: int) -> list[Sink]:
    """All destinations that the flags of a run select.

    Args:
        args: final values.
        done: iterations that are done already; later ones in the files are of a lost run.
    """
    options, save = read(LoggingOptions, args), read(CheckpointOptions, args).save
    on_terminal = options.progress_bar and sys.stderr.isatty()
    total = read(TrainingOptions, args).train_iters
    sinks: list[Sink] = [ProgressBar(done, total) if on_terminal else Console()]
    path = options.metrics_file or (save and str(Path(save) / "metrics.jsonl"))
    say = sinks[0].message
    if path:
        sinks.append(OptionalSink(f"metrics file {path}", lambda: JsonLines(Path(path), done), say))
    if folder := options.tensorboard_dir:
        sinks.append(
            OptionalSink(f"TensorBoard {folder}", lambda: TensorBoard(folder, options, done), say)
        )
    if options.wandb_project:
        directory, values = Path(options.wandb_save_dir or save or "."), vars(args)
        wandb = lambda: WeightsAndBiases(options, directory, done, values)  # noqa: E731
        sinks.append(OptionalSink("W&B", wandb, say))
    return sinks


def missing_packages(options: LoggingOptions) -> Iterator[str]:
    """One line for each package that a flag needs and that is not installed."""
    for flag, value, package, install in (
        ("--tensorboard-dir", options.tensorboard_dir, "tensorboard", "'mindspeed[suite]'"),
        ("--wandb-project", options.wandb_project, "wandb", "wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            yield f"{flag} {value} needs the package {package}: pip install {install}"


class RecordingSink:
    """Shows nothing; the base of sinks that only record."""

    def message(self, text: str) -> None: ...

    def advance(self) -> None: ...

    def close(self) -> str | None:
        return None


class Console(RecordingSink):
    """Log lines on standard output."""

    def record(self, iteration: int, metrics: Metrics, line: str) -> None:
        print(line, flush=True)

    def message(self, text: str) -> None:
        print(text, flush=True)


class ProgressBar:
    """Log lines above a progress bar, on a terminal."""

    def __init__(self, done: int, total: int | None) -> None:
        from tqdm import tqdm

        self._bar = tqdm(initial=done, total=total, unit="it", dynamic_ncols=True, leave=False)

    def record(self, iteration: int, metrics: Metrics, line: str) -> None:
        self._bar.write(line)
        if metrics.get("lm_loss") is not None:
            self._bar.set_postfix_str(f"loss {metrics['lm_loss']:.3f}", refresh=False)

    def message(self, text: str) -> None:
        self._bar.write(text)

    def advance(self) -> None:
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class OptionalSink:
    """A sink that training continues without when its files cannot be written; says so once.

    Args:
        name: What to call it.
        make: Opens it.
        say: Prints a line.
    """

    def __init__(self, name: str, make: Callable[[], Sink], say: Callable[[str], None]) -> None:
        self._name = name
        self._say = say
        self._sink: Sink | None = None
        with self._given_up_on_failure():
            self._sink = make()

    def record(self, iteration: int, metrics: Metrics, line: str) -> None:
        with self._given_up_on_failure():
            if self._sink is not None:
                self._sink.record(iteration, metrics, line)

    def message(self, text: str) -> None: ...

    def advance(self) -> None: ...

    def close(self) -> str | None:
        with self._given_up_on_failure():
            if self._sink is not None:
                return self._sink.close()
        return None

    @contextmanager
    def _given_up_on_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._sink = None
            self._say(f" WARNING {self._name}: {describe(error)}; training continues without it")


class JsonLines(RecordingSink):
    """One JSON object per report."""

    def __init__(self, path: Path, done: int) -> None:
        make_dirs(path.parent)
        if path.exists():
            lines = path.read_text("utf-8", errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if _iteration_of(line) <= done]
            if len(kept) < len(lines):
                atomic_write_text(path, "".join(kept))
        self._file = secure_open(path, "a")

    def record(self, iteration: int, metrics: Metrics, line: str) -> None:
        finite = {k: v if _is_finite(v) else None for k, v in metrics.items()}
        self._file.write(json.dumps({**finite, "time": time.time()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard(RecordingSink):
    """One curve per metric."""

    def __init__(self, directory: str, options: LoggingOptions, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = directory
        make_dirs(directory)
        self._writer = SummaryWriter(
            directory, purge_step=done + 1, max_queue=options.tensorboard_queue_size
        )
        self._interval = options.tensorboard_log_interval
        self._left_out = {
            key
            for key, wanted in (
                ("memory_gb", options.log_memory_to_tensorboard),
                ("loss_scale", options.log_loss_scale_to_tensorboard),
                ("validation_perplexity", options.log_validation_ppl_to_tensorboard),
                ("test_perplexity", options.log_validation_ppl_to_tensorboard),
            )
            if not wanted
        }

    def record(self, iteration: int, metrics: Metrics, line: str) -> None:
        if iteration % self._interval == 0:
            for name, value in curves(metrics, self._left_out).items():
                self._writer.add_scalar(name, value, iteration)
            self._writer.flush()

    def close(self) -> str:
        self._writer.close()
        return f"tensorboard --logdir {self._directory}"


class WeightsAndBiases(RecordingSink):
    """One curve per metric at Weights & Biases; without key or network in files, for later.

    ``wandb sync DIR/wandb/offline-run-*`` uploads what was recorded offline. The variable
    WANDB_MODE overrides our choice. A resumed run keeps its identity, stored in
    ``DIR/wandb/run_id.txt``, and leaves out what a lost run has recorded already: nothing can be
    undone there.

    Args:
        directory: below it are its files; the run is called after it without ``--wandb-exp-name``.
        done: iterations that are done already.
        values: all flags of the run, shown as its configuration.
    """

    def __init__(
        self, options: LoggingOptions, directory: Path, done: int, values: Mapping[str, Any]
    ) -> None:
        import wandb

        make_dirs(directory / "wandb")
        settings = wandb.Settings()
        steps = directory / "wandb" / "recorded_steps.txt"
        self._recorded_before = _last_step(steps) if done else 0
        atomic_write_text(steps, f"{self._recorded_before}\n")  # without half a line
        self._steps = secure_open(steps, "a")
        self._run = wandb.init(
            project=options.wandb_project,
            name=options.wandb_exp_name or directory.resolve().name,
            entity=options.wandb_entity,
            dir=str(directory),
            id=_run_id(directory / "wandb" / "run_id.txt", done),
            resume="allow",
            mode=_wandb_mode(settings.base_url),
            config=_plain(values),
            # What is printed is in the log already, with the ranks of all nodes.
            settings=wandb.Settings(console="off", silent=True),
        )

    def record(self, iteration: int, metrics: Metrics, line: str) -> None:
        if iteration > self._recorded_before:
            self._run.log(curves(metrics), step=iteration)
            self._steps.write(f"{iteration}\n")
            self._steps.flush()

    def close(self) -> str | None:
        offline, files = self._run.offline, Path(self._run.dir).parent
        self._run.finish()
        self._steps.close()
        return f"wandb sync {files}" if offline else None


def curves(metrics: Metrics, left_out: Sequence[str] | set[str] = ()) -> dict[str, float]:
    """The metrics that make a curve, under Megatron-LM's names."""
    return {
        CURVES.get(key, key): value
        for key, value in metrics.items()
        if value is not None and key not in _NO_CURVE and key not in left_out
    }


def _run_id(file: Path, done: int) -> str:
    """The identity of the run: that of the run it continues, or a new one."""
    if done and file.exists():
        known = file.read_text("utf-8").strip()
        if known:
            return known
    fresh = uuid.uuid4().hex[:12]
    atomic_write_text(file, fresh + "\n")
    return fresh


def _last_step(file: Path) -> int:
    """The largest step of a file with one step per line; the last line may be half-written."""
    lines = file.read_text("utf-8").splitlines(keepends=True) if file.exists() else []
    return max((int(line) for line in lines if line.endswith("\n")), default=0)


def _wandb_mode(base_url: str, timeout: float = 3.0) -> Literal["online", "offline"] | None:
    """None (W&B decides) if WANDB_MODE is set; online with a key and a network, else offline."""
    if os.environ.get("WANDB_MODE"):
        return None
    address = urlsplit(base_url)
    host = address.hostname or ""
    if not (os.environ.get("WANDB_API_KEY") or _netrc_knows(host)):
        return "offline"
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((host, port), timeout).close()
    except OSError:
        return "offline"
    return "online"


def _netrc_knows(host: str) -> bool:
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _plain(values: Metrics) -> dict[str, Any]:
    """Values for JSON; data types, functions and other objects as text."""
    simple = (str, int, float, bool, type(None), list, tuple)
    return {k: v if isinstance(v, simple) else str(v) for k, v in values.items()}


def _iteration_of(line: str) -> float:
    """Iteration of a record; infinite for half-written lines of a killed run."""
    try:
        iteration = decode_json(line)["iteration"]
    except (ValueError, KeyError, TypeError):
        return math.inf
    return iteration if isinstance(iteration, int) and line.endswith("\n") else math.inf


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
