"""Reports of a run: one aligned line and one record per log interval.

The last rank logs, because the last pipeline stage knows the loss. Between log lines a step only
appends a device tensor to a list; sums over data-parallel ranks and copies to the host happen once
per interval. Tokens per second and FLOPs are those of samples, not of padding
(:mod:`mindspeed.training.token_counts`). Where the records go: :mod:`mindspeed.training.sinks`.

    iteration     10/   600 | consumed samples:     160 | lm loss: 7.621034E+00 | grad norm: ...
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mindspeed import device, session
from mindspeed.adaptor.versions.trainer import expert_metrics
from mindspeed.built_model import TrainedModel
from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.flags import read
from mindspeed.job import Parallel, Precision, Schedule, TrainState
from mindspeed.preference.options import PreferenceOptions
from mindspeed.profiling.model_flops import flops_of_tokens
from mindspeed.te.parameter_marks import counted
from mindspeed.training.forward_step import Reports, sum_reports
from mindspeed.training.options import DataOptions, LoggingOptions, LoraOptions, ModelOptions
from mindspeed.training.sinks import open_sinks
from mindspeed.training.step import StepResult
from mindspeed.training.token_counts import TokenCounter, TokenCounts, model_shape

GIGA = 10**9


class Log:
    """Collects steps and reports them.

    Args:
        args: final values.
        model: for the loss scale and the norm of the parameters.
        iteration: iterations that are done already.
        counter: counts the tokens of training.
    """

    def __init__(
        self, args: argparse.Namespace, model: TrainedModel, iteration: int, counter: TokenCounter
    ) -> None:
        self._args = args
        self._iterations_of_job, self._world = Schedule.of(args).iterations, Parallel.of(args).world
        self._options, self._shape = read(LoggingOptions, args), model_shape(args)
        self._scales_loss = Precision.of(args).name == "fp16"
        self._model = model
        self._counter = counter
        self._speaks = dist.get_rank() == dist.get_world_size() - 1
        self._sinks = open_sinks(args, iteration) if self._speaks else []
        self._reports: list[Reports] = []
        self._grad_norm: float | None = None
        self._learning_rate: float | None = None
        self._skipped = 0
        self._samples = 0
        self._iterations = 0
        self._last_loss: float | None = None
        self._started = self._interval_start = time.perf_counter()
        self._tokens = 0

    def add(self, result: StepResult, samples: int) -> None:
        """Note one step of ``samples`` sequences."""
        self._iterations += 1
        self._samples += samples
        self._skipped += result.skipped
        self._grad_norm = result.grad_norm
        self._learning_rate = result.learning_rate
        if result.losses and not result.skipped:
            self._reports.append(sum_reports(result.losses))
        for sink in self._sinks:
            sink.advance()

    def report(self, state: TrainState) -> None:
        """Print and record the steps since the last report, with what features add."""
        reports = mean_reports(self._reports)
        loss = reports.pop("lm loss", None)
        auxiliary = _auxiliary_losses(self._model.config, self._iterations)
        seams = session.install().seams  # after the auxiliary losses, whose message some lengthen
        extra = " | ".join(filter(None, seams.log.run_all(state.iteration)))
        figures = seams.figures.run_all(state.iteration)
        params_norm = _params_norm(self._model) if self._options.log_params_norm else None
        counts = self._counter.take(self._samples)
        self._tokens += counts.tokens
        elapsed = time.perf_counter() - self._interval_start
        if self._speaks:
            self._last_loss = reports.get("loss") if loss is None else loss
            metrics = self._metrics(state, elapsed, loss, counts)
            if params_norm is not None:
                metrics["params_norm"] = params_norm
            reports |= auxiliary
            line = _line(metrics, reports, self._iterations_of_job)
            metrics |= reports
            for one in figures:
                metrics |= one
            for sink in self._sinks:
                sink.record(state.iteration, metrics, line + (f" {extra} |" if extra else ""))
        self._reports.clear()
        self._skipped = self._samples = self._iterations = 0
        self._interval_start = time.perf_counter()

    def report_held_out(self, name: str, iteration: int, means: Mapping[str, float]) -> None:
        """Print and record the mean reports on held-out data."""
        if not self._speaks or not means:
            return
        metrics: dict[str, Any] = {"iteration": iteration}
        line = f" {name} loss at iteration {iteration} |"
        for report, mean in means.items():
            line += f" {report} value: {mean:.6E} |"
            if report == "lm loss":
                perplexity = math.exp(min(20.0, mean))
                line += f" lm loss PPL: {perplexity:.6E} |"
                metrics |= {f"{name}_loss": mean, f"{name}_perplexity": perplexity}
            else:
                metrics[f"{report} {name}"] = mean
        for sink in self._sinks:
            sink.record(iteration, metrics, line)

    def message(self, text: str) -> None:
        """Print a line without disturbing the progress bar."""
        if self._speaks:
            for sink in self._sinks:
                sink.message(text)

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """Time spent in this block (validation, saving) does not count as training."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._interval_start += time.perf_counter() - start

    def close(self, iteration: int) -> None:
        """Print the summary and what can be done next."""
        if not self._speaks:
            return
        commands = [command for command in (sink.close() for sink in self._sinks) if command]
        summary = _summary(self._args, iteration, self._last_loss, self._tokens, self._started)
        print(
            "\n".join([summary, *(f"  look at    {command}" for command in commands)]), flush=True
        )

    def _metrics(
        self, state: TrainState, elapsed: float, loss: float | None, counts: TokenCounts
    ) -> dict[str, Any]:
        steps = max(1, self._iterations)
        flops = flops_of_tokens(self._shape, counts.tokens, counts.pairs)
        metrics: dict[str, Any] = {
            "iteration": state.iteration,
            "consumed_samples": state.train_samples,
            "seconds_per_iteration": elapsed / steps,
            "learning_rate": self._learning_rate,
            "global_batch_size": self._samples // steps,
            "lm_loss": loss,
            "grad_norm": self._grad_norm,
            "tokens_per_second": counts.tokens / elapsed,
            "tflops_per_device": flops / elapsed / self._world / 1e12,
            "memory_gb": device.current().memory_stats().peak / GIGA,
            "skipped_iterations": self._skipped,
            "eta_seconds": (self._iterations_of_job - state.iteration) * elapsed / steps,
        }
        if counts.positions > counts.tokens:
            metrics["padding_fraction"] = 1 - counts.tokens / counts.positions
            metrics["positions_per_second"] = counts.positions / elapsed
        if self._scales_loss:
            metrics["loss_scale"] = self._model.optimizer.get_loss_scale().item()
        return metrics


def mean_reports(reports: Sequence[Reports]) -> dict[str, float]:
    """Mean over iterations of (sum / count) over all data-parallel ranks, by name.

    One all-reduce of 8 bytes per iteration and name among the ranks of the last stage; empty
    elsewhere.

    Args:
        reports: one per iteration: name -> [2], fp32.
    """
    names = list(reports[0]) if reports else []
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True) or not names:
        return {}
    sums = torch.stack([report[name] for report in reports for name in names])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    per_iteration = (sums[:, 0] / sums[:, 1]).view(len(reports), len(names)).T.tolist()
    # Added one by one in single precision, as Megatron-LM does: equal to the last digit.
    return {
        name: float(reduce(lambda a, b: np.float32(a + np.float32(b)), means, np.float32(0)))
        / len(means)
        for name, means in zip(names, per_iteration, strict=True)
    }


def _line(metrics: Mapping[str, Any], reports: Mapping[str, float], train_iters: int) -> str:
    """One aligned line; losses and learning rate in Megatron-LM's digits."""
    parts = [
        f" iteration {metrics['iteration']:8d}/{train_iters:8d}",
        f"consumed samples: {metrics['consumed_samples']:12d}",
    ]
    if metrics["lm_loss"] is not None:
        parts.append(f"lm loss: {metrics['lm_loss']:.6E}")
    parts += [f"{name}: {mean:.6E}" for name, mean in reports.items()]
    if "params_norm" in metrics:
        parts.append(f"params norm: {metrics['params_norm']:.6E}")
    if metrics["learning_rate"] is not None:
        parts.append(f"learning rate: {np.float32(metrics['learning_rate']):.6E}")
    if "loss_scale" in metrics:
        parts.append(f"loss scale: {metrics['loss_scale']:.1f}")
    if metrics["grad_norm"] is not None:
        parts.append(f"grad norm: {metrics['grad_norm']:.3f}")
    padding = metrics.get("padding_fraction")
    parts += [
        f"ms/iteration: {1000 * metrics['seconds_per_iteration']:8.1f}",
        f"tokens/s: {metrics['tokens_per_second']:9.0f}",
        *([f"padding: {100 * padding:4.1f}%"] if padding else []),
        f"TFLOP/s/device: {metrics['tflops_per_device']:8.3f}",
        f"memory GB: {metrics['memory_gb']:6.2f}",
        f"skipped: {metrics['skipped_iterations']:3d}",
        f"ETA {timedelta(seconds=int(metrics['eta_seconds']))}",
    ]
    return " | ".join(parts) + " |"


def _summary(
    args: argparse.Namespace, iteration: int, loss: float | None, tokens: int, started: float
) -> str:
    elapsed = time.perf_counter() - started
    lines = [
        f"trained to iteration {iteration} of {Schedule.of(args).iterations} "
        f"in {timedelta(seconds=int(elapsed))}, {tokens / elapsed:,.0f} tokens/s overall"
        + (f", last loss {loss:.4f}" if loss is not None else "")
    ]
    files = read(CheckpointOptions, args)
    if files.save:
        lines += [
            f"  {what:<11}mindspeed {command}"
            for what, command in _next_steps(args, files.save, files.load)
        ]
    return "\n".join(lines)


def _next_steps(args: argparse.Namespace, save: str, load: str | None) -> Iterator[tuple[str, str]]:
    """What a user does with a trained model, and the commands for it."""
    adapters = bool(read(LoraOptions, args).lora_target_modules)
    objective = read(PreferenceOptions, args).objective
    model = f"--load {load} --lora-load {save}" if adapters else f"--load {save}"
    if not read(DataOptions, args).is_instruction_dataset:
        yield "continue", f"pretrain ... --save {save} --auto-resume"
        yield "generate", f"generate {model}"
    else:
        command = {"preference": "dpo", "reward": "reward"}.get(objective, "finetune")
        yield "continue", f"{command} ... --save {save} --auto-resume"
        if objective != "reward":
            yield "chat", f"chat {model}"
            yield "serve", f"serve {model}"
    if adapters:
        yield "merge", f"merge-lora {model} --save {save}-merged --format hf"
    elif read(ModelOptions, args).model_family:
        yield "export", f"export --hf --load {save} --output {save}-hf"
    yield "draw", f"plot {save}"


def _params_norm(model: TrainedModel) -> float:
    """Norm of all parameters: each counted once over the ranks that hold parts of the model."""
    totals = torch.zeros(2, dtype=torch.float32, device=device.current().torch_device())
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    expert_tp_rank = parallel_state.get_expert_tensor_parallel_rank()
    for chunk in model.chunks:
        for parameter in chunk.parameters():
            if counted(parameter, tp_rank, expert_tp_rank):
                kind = 0 if getattr(parameter, "allreduce", True) else 1
                totals[kind] += parameter.detach().float().square().sum()
    dense, experts = totals.unbind()
    dist.all_reduce(dense, group=parallel_state.get_model_parallel_group())
    group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    dist.all_reduce(experts, group=group)
    return math.sqrt((dense + experts).item())


_LOSSES_OF_EXPERTS = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Kinds of load balancing, and what Megatron calls their losses."""


def _auxiliary_losses(config: Any, iterations: int) -> dict[str, float]:
    """Mean load-balancing, z and multi-token losses of the interval; collective for such models."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    scale = 1 / (get_num_microbatches() * max(1, iterations))
    found: dict[str, Any] = {}
    if config.num_moe_experts:
        kinds = config.moe_router_load_balancing_type
        kinds = [kinds] if isinstance(kinds, str) else kinds
        names = [_LOSSES_OF_EXPERTS[kind] for kind in kinds if kind in _LOSSES_OF_EXPERTS]
        names += ["z_loss"] if config.moe_z_loss_coeff is not None else []
        expert_metrics(
            loss_scale=scale,
            iteration=0,
            writer=None,
            total_loss_dict=found,
            force_initialize=True,
            track_names=names,
            num_layers=config.num_layers,
            moe_layer_freq=config.moe_layer_freq,
            mtp_num_layers=config.mtp_num_layers,
        )
    if config.mtp_num_layers:
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        MTPLossLoggingHelper.track_mtp_metrics(scale, 0, None, None, found)
    return {name: float(value) for name, value in found.items()}
