"""Records a Megatron model: hooks on its modules during the steps that are recorded.

    begin     weights
    forward   outputs of modules; query, key, value; the activation; the sum before an MLP's norm
    backward  gradients of all these tensors
    end       gradients of weights, reduced over all ranks

How a tensor and its gradient are recorded is in :mod:`.megatron_tensors`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from mindspeed.adaptor.training_steps import MicroBatchNumbers
from mindspeed.compare.digest import Elements
from mindspeed.compare.forced import ForcedValues
from mindspeed.compare.megatron_experts import ExpertHooks, layers_of
from mindspeed.compare.megatron_modules import (
    called_for,
    global_names,
    input_columns,
    inputs_of,
    is_recorded,
    output_columns,
    output_width,
    records_output,
    reduction_of,
    unwrapped,
)
from mindspeed.compare.megatron_places import MicroBatchRows, RankColumns, Ranks, rows_of
from mindspeed.compare.megatron_random import random_states
from mindspeed.compare.megatron_tensors import MegatronTensors, MicroBatch, ModuleCall
from mindspeed.compare.megatron_weights import MegatronWeights, NamedChunk
from mindspeed.compare.noise import Noise
from mindspeed.compare.recorder import RunRecorder
from mindspeed.compare.routing import GAPS, counted, scores_of
from mindspeed.instruments.instrument import in_backward
from mindspeed.journal import Journal


@dataclass
class _Chunk(NamedChunk):
    current: MicroBatch | None = None
    calls: defaultdict[str, list[ModuleCall]] = field(default_factory=lambda: defaultdict(list))
    recomputed: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))


class MegatronHooks:
    """Records steps of a Megatron job, on one rank.

    Args:
        recorder: Gets the tensors.
        what: Kinds of tensors, as in ``--record-what``.
        micro_batches: Numbers of those that are recorded; empty: all.
        noise: Perturbs every recorded tensor; None in runs that are to be trusted.
        forced: Values of another run in a step, which replace every recorded tensor.
        by_sample: Each sample of a micro-batch has digests of its own.
    """

    def __init__(
        self,
        recorder: RunRecorder,
        what: Collection[str],
        micro_batches: Collection[int] = (),
        noise: Noise | None = None,
        forced: Callable[[int], ForcedValues] | None = None,
        by_sample: bool = False,
    ) -> None:
        self._recorder, self._what, self._noise = recorder, frozenset(what), noise
        self._values_of, self._by_sample = forced, by_sample
        self._only = frozenset(micro_batches)
        self._handles: list[RemovableHandle] = []
        self._journal = Journal()
        self._chunks: list[_Chunk] = []
        self._logits: dict[int, torch.Tensor] = {}  # of the call of a router that runs
        self._joint: dict[int, RankColumns] = {}  # of projections to several things
        self._weights = MegatronWeights(recorder, what, noise)
        self._tensors = MegatronTensors(recorder, what, micro_batches, noise, by_sample)
        self._ranks: Ranks | None = None
        self.micro_batch = 0
        """Number in the step of the micro-batch whose forward runs."""

    @property
    def rounds(self) -> set[int]:
        """The recorded micro-batches, and those that run on other ranks at the same time."""
        from megatron.core import parallel_state as state

        ranks = state.get_data_parallel_world_size()
        return {one // ranks * ranks + rank for one in self._only for rank in range(ranks)}

    def expected(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """About how many pieces this rank will record in a step, and the bytes of their tensors.

        Args:
            options: Arguments of the schedule, by name.
        """
        batches = len(self._only) or options["num_microbatches"]
        each = options["micro_batch_size"] if self._by_sample else 1
        forward = "activations" in self._what
        inputs, backward = "inputs" in self._what, "output-gradients" in self._what
        kinds = [("weights", 1), ("weight-gradients", 2), ("main-weights", 2), ("optimizer", 4)]
        of_weights = [count for kind, count in kinds if kind in self._what]
        pieces, size = 3 * batches * each, 0
        for chunk in _chunks(options["model"]):
            rows = options["seq_length"] * options["micro_batch_size"]
            rows //= chunk.config.context_parallel_size
            for path, module in chunk.named_modules():
                if not is_recorded(path, module):
                    continue
                count = (forward + backward) * records_output(path, module)
                count += (inputs + backward) * len(inputs_of(path, module))
                pieces += batches * count * each
                width = output_width(module) or chunk.config.hidden_size
                size += batches * count * rows * width * chunk.config.params_dtype.itemsize
            for parameter in chunk.parameters():
                pieces += len(of_weights) + ("optimizer" in self._what)
                size += sum(of_weights) * parameter.numel() * parameter.element_size()
        return pieces, size

    def around(self, schedule: Callable[..., Any], number: int, options: dict[str, Any]) -> Any:
        """Run the schedule of a step that is recorded.

        Args:
            schedule: Megatron's forward-backward function.
            number: Of the step.
            options: Arguments of the function, by name.
        """
        from megatron.core.utils import get_model_config

        model = options["model"]
        chunks = model if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        self._ranks = Ranks.of_job(config)
        self._chunks = [_Chunk(unwrapped(one), one, global_names(unwrapped(one))) for one in chunks]
        step = self._recorder.begin(number)
        step.scalars = _scalars(config, options["num_microbatches"], self._ranks)
        forced = None if self._values_of is None else self._values_of(number)
        if forced is not None:
            step.scalars["forced"] = True
        step.place = asdict(self._ranks)
        if "rng" in self._what:
            step.random = random_states()
        self._tensors.begin(self._ranks, forced, bool(config.recompute_granularity))
        forward = self._counted(options["forward_step_func"], step.scalars)
        try:
            self._weights.begin(self._chunks, forced)
            for chunk in self._chunks:
                self._hook(chunk)
            return schedule(**{**options, "forward_step_func": forward})
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._journal.undo()

    def gradients(self) -> None:
        """Record the reduced gradients of all weights, once the schedule has ended."""
        tokens = next((c.current.rows.total for c in self._chunks if c.current), 1)
        self._weights.gradients(tokens)

    def optimizer(self, optimizer: Any, rate: float | None, grad_norm: Any) -> None:
        """Record what a step of the optimizer has made.

        Args:
            optimizer: Of Megatron.
            rate: Learning rate of the step.
            grad_norm: What the step returned; None where a rank has no parameters.
        """
        self._weights.optimizer(optimizer, rate, grad_norm)

    def _counted(self, forward_step: Callable[..., Any], scalars: dict[str, Any]) -> Any:
        """A forward step that notes which micro-batch runs, and its number of tokens."""
        numbers = MicroBatchNumbers()

        @functools.wraps(forward_step)
        def run(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            inner = unwrapped(model)
            chunk = next(one for one in self._chunks if one.module is inner)
            self.micro_batch = numbers.next(inner)
            chunk.current = None
            output, loss_function = forward_step(data_iterator, model, *args, **kwargs)
            return output, _noting(loss_function, scalars["tokens"], self.micro_batch)

        return run

    def _hook(self, chunk: _Chunk) -> None:
        module, called = chunk.module, called_for(chunk.wrapped)
        assert self._ranks is not None
        self._handles.append(
            called.register_forward_pre_hook(
                functools.partial(self._begin_micro_batch, chunk), with_kwargs=True
            )
        )
        if module.post_process:
            self._handles.append(called.register_forward_hook(functools.partial(self._loss, chunk)))
        for path, inner in module.named_modules():
            if not is_recorded(path, inner):
                continue
            name = chunk.names[path]
            if {"inputs", "output-gradients"} & self._what:
                for before in self._inputs_of(chunk, path, name, inner):
                    handle = inner.register_forward_pre_hook(before, with_kwargs=True)
                    self._handles.append(handle)
            if path.endswith("router") and hasattr(inner, "gating"):
                self._hook_logits(chunk, name, inner)
            if path.endswith("in_proj") and (own := self._weights.columns(chunk, path)):
                self._joint[id(inner)] = own
            if records_output(path, inner):
                after = functools.partial(self._output, chunk, name)
                self._handles.append(inner.register_forward_hook(after))

        experts = ExpertHooks(
            self._recorder,
            self._what,
            self._only,
            self._noise,
            self._ranks,
            functools.partial(_running, chunk),
            self._by_sample,
        )
        for path, layer in layers_of(module):
            experts.hook(chunk.names[path], layer, self._journal, self._handles)

    def _hook_logits(self, chunk: _Chunk, name: str, router: Any) -> None:
        """A router computes its logits in a method, not in a module."""
        gating = router.gating

        def recorded(*args: Any, **kwargs: Any) -> Any:
            logits = gating(*args, **kwargs)
            call = self._call_of(chunk, name, "logits")
            if call is None:
                return logits
            reduction = router.weight.shape[1]
            columns = RankColumns(logits.shape[-1])
            result = self._tensors.add(call, "logits", logits, columns, reduction)
            self._logits[id(router)] = logits if result is None else result
            return self._logits[id(router)]

        self._journal.set(router, "gating", recorded, owner="compare")

    def _gaps(self, call: ModuleCall, router: Any, chosen: torch.Tensor) -> None:
        """Count how close the choice of each token is."""
        logits, batch = self._logits.pop(id(router), None), call.batch
        skip = self._only and batch.number not in self._only
        if logits is None or skip or "activations" not in self._what or in_backward():
            return
        scores = scores_of(router, logits).detach().reshape(-1, logits.shape[-1])
        place = batch.rows.place(len(scores) // batch.rows.samples, RankColumns(scores.shape[1]))
        if place is not None and scores.shape == chosen.shape:
            parts: list[tuple[Any, Elements]] = [(slice(None), place)]
            if self._by_sample:
                parts = batch.rows.by_sample(place)
            first = batch.number * len(parts)
            for number, (here, own) in enumerate(parts, first):
                counts = counted(scores[here], chosen[here].bool(), own)
                self._recorder.add_counts(number, call.name, GAPS, counts, own)

    def _begin_micro_batch(self, chunk: _Chunk, called: Any, args: Any, kwargs: Any) -> None:
        module = chunk.module
        assert self._ranks is not None
        if chunk.current is not None or in_backward():
            return  # recomputed, or a second forward of a forward step
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        packed = getattr(given.get("packed_seq_params"), "packed", None)
        tokens, ranks = given.get("input_ids"), self._ranks
        if tokens is None:
            received = module.decoder.input_tensor
            received = received[0] if isinstance(received, list) else received
            length, samples = received.shape[:2]
            length *= ranks.tp_size if ranks.sequence else 1
        else:
            samples, length = tokens.shape
        rows = rows_of(ranks, samples, length, packed)
        if self._by_sample and self._recorder.step is not None:
            self._recorder.step.scalars["samples"] = samples
        chunk.current = MicroBatch(self.micro_batch, rows)
        if not module.pre_process:
            chunk.current.calls["embedding output"] = 1  # for tokens that are predicted ahead
        if "inputs" in self._what or "activations" in self._what:
            for what, value in (("tokens", tokens), ("labels", given.get("labels"))):
                if value is not None:
                    place = rows.place(length, RankColumns(1))
                    assert place is not None
                    flat = value.t().reshape(-1, 1)
                    self._tensors.add_flat(
                        chunk.current, "forward", "data", what, flat, place, exactly=True
                    )

    def _loss(self, chunk: _Chunk, module: Any, args: Any, output: Any) -> Any:
        batch = chunk.current
        if batch is None or not isinstance(output, torch.Tensor) or output.dim() != 2:
            return None  # logits of a forward step with a loss of its own
        call = ModuleCall(batch, "loss")
        return self._tensors.add(call, "per_token", output, RankColumns(1), 1, loss=True)

    def _output(self, chunk: _Chunk, name: str, module: Any, args: Any, output: Any) -> Any:
        first, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        call = self._call_of(chunk, name, "output")
        if call is None or not isinstance(first, torch.Tensor):
            return None
        columns = self._joint.get(id(module))
        if columns is None:
            columns = output_columns(module, name, first, self._ranks, chunk.module.config)
        reduction = reduction_of(module, name, call.batch.rows, first)
        result = self._tensors.add(call, "output", first, columns, reduction)
        if name.endswith("router") and rest and isinstance(rest[0], torch.Tensor):
            self._gaps(call, module, rest[0])
            choice = self._tensors.add(call, "choice", rest[0], columns, 1)
            if choice is not None:
                result, rest = first if result is None else result, (choice, *rest[1:])
        if result is None:
            return None
        return result if rest is None else (result, *rest)

    def _inputs_of(self, chunk: _Chunk, path: str, name: str, module: Any) -> Iterator[Any]:
        """Hooks for inputs that are no other module's output."""
        ranks = self._ranks
        assert ranks is not None
        whats = inputs_of(path, module)
        if not whats:
            return
        name = re.sub(r"mlp\.linear_fc1$", "pre_mlp_layernorm", name)

        def before(module: Any, args: Any, kwargs: Any) -> Any:
            call = self._call_of(chunk, name, "input")
            if call is None:
                return None
            changed = list(args)
            for index, what in enumerate(whats):
                value = args[index] if index < len(args) else None
                if not isinstance(value, torch.Tensor):
                    continue
                columns = input_columns(what, value, ranks, module, chunk.module.config)
                result = self._tensors.add(call, what, value, columns, 1)
                changed[index] = value if result is None else result
            return tuple(changed), kwargs

        yield before

    def _call_of(self, chunk: _Chunk, name: str, side: str) -> ModuleCall | None:
        """A module's call; in the backward the same call in the forward."""
        calls = chunk.calls[f"{name} {side}"]
        if not in_backward():
            batch = chunk.current
            if batch is None:
                return None
            batch.calls[f"{name} {side}"] += 1
            count = batch.calls[f"{name} {side}"]
            calls.append(ModuleCall(batch, name if count == 1 else f"{name}#{count}"))
            return calls[-1]
        index = chunk.recomputed[f"{name} {side}"]
        chunk.recomputed[f"{name} {side}"] += 1
        return calls[index] if index < len(calls) else None


def _chunks(model: Any) -> list[Any]:
    return [unwrapped(one) for one in (model if isinstance(model, list) else [model])]


def _running(chunk: _Chunk) -> tuple[int, MicroBatchRows] | None:
    """Number and rows of the micro-batch that runs forward."""
    batch = None if in_backward() else chunk.current
    return None if batch is None else (batch.number, batch.rows)


def _noting(function: Callable[..., Any], tokens: dict[str, Any], number: int) -> Any:
    """A loss function that notes the number of tokens it is a sum over."""

    @functools.wraps(function)
    def loss(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        if isinstance(found, tuple) and len(found) == 3:
            tokens[str(number)] = found[1]
        return found

    return loss


def _scalars(config: Any, micro_batches: int, ranks: Ranks) -> dict[str, Any]:
    """Factors of a job's gradients: what a comparison divides by."""
    scale = 1.0
    if config.grad_scale_func is not None:
        scale = float(config.grad_scale_func(torch.ones(1)))
    return {
        "loss_scale": scale,
        "micro_batches": micro_batches,
        "per_token": bool(config.calculate_per_token_loss),
        "cp": ranks.cp_size,
        "tokens": {},
    }
