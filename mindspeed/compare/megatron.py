"""Records a Megatron model: hooks on its modules during the steps that are recorded.

    begin     weights
    forward   outputs of modules; query, key, value; the activation; the sum before an MLP's norm
    backward  gradients of all these tensors
    end       gradients of weights, reduced over all ranks

A hook on a tensor's gradient is right for both kinds of recomputation: it is registered wherever
the tensor requires a gradient, which is in the second forward where the first ran without a graph.
The number of a micro-batch is bound to it then, because schedules run other forwards in between.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from mindspeed.adaptor.training_steps import MicroBatchNumbers
from mindspeed.compare.digest import Place, bits
from mindspeed.compare.forced import ForcedValues, Replace
from mindspeed.compare.megatron_experts import ExpertHooks, layers_of
from mindspeed.compare.megatron_modules import (
    called_for,
    flattened,
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
from mindspeed.compare.megatron_places import Columns, MicroBatchRows, Ranks, rows_of
from mindspeed.compare.megatron_random import random_states
from mindspeed.compare.megatron_weights import MegatronWeights, NamedChunk
from mindspeed.compare.names import Name
from mindspeed.compare.noise import Noise
from mindspeed.compare.recorder import Recorder
from mindspeed.compare.routing import GAPS, counted, scores_of
from mindspeed.compare.scales import gradient_scale
from mindspeed.instruments.instrument import in_backward
from mindspeed.journal import Journal

_OUTPUTS = ("output", "choice", "logits")


@dataclass
class _MicroBatch:
    number: int  # in the step, over all data-parallel ranks
    rows: MicroBatchRows
    calls: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Call:
    """A call of a module: its micro-batch, and the module's name with the number of the call.

    ``bits`` has digests of what the forward has made, to be compared with what a recomputation
    makes.
    """

    batch: _MicroBatch
    name: str
    bits: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Chunk(NamedChunk):
    current: _MicroBatch | None = None
    calls: defaultdict[str, list[_Call]] = field(default_factory=lambda: defaultdict(list))
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
        recorder: Recorder,
        what: Collection[str],
        micro_batches: Collection[int] = (),
        noise: Noise | None = None,
        forced: Callable[[int], ForcedValues] | None = None,
        by_sample: bool = False,
    ) -> None:
        self._recorder, self._what, self._noise = recorder, frozenset(what), noise
        self._values_of, self._by_sample = forced, by_sample
        self._forced: ForcedValues | None = None
        self._only = frozenset(micro_batches)
        self._handles: list[RemovableHandle] = []
        self._journal = Journal()
        self._chunks: list[_Chunk] = []
        self._logits: dict[int, torch.Tensor] = {}  # of the call of a router that runs
        self._joint: dict[int, Columns] = {}  # of projections to several things
        self._weights = MegatronWeights(recorder, what, noise)
        self._ranks: Ranks | None = None
        self._recomputes = False
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
        if self._values_of is not None:
            self._forced = self._values_of(number)
            step.scalars["forced"] = True
        step.place = asdict(self._ranks)
        if "rng" in self._what:
            step.random = random_states()
        self._recomputes = bool(config.recompute_granularity)
        forward = self._counted(options["forward_step_func"], step.scalars)
        try:
            self._weights.begin(self._chunks, self._forced)
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
            columns = Columns(logits.shape[-1])
            result = self._tensor(call, "logits", logits, columns, reduction)
            self._logits[id(router)] = logits if result is None else result
            return self._logits[id(router)]

        self._journal.set(router, "gating", recorded, owner="compare")

    def _gaps(self, call: _Call, router: Any, chosen: torch.Tensor) -> None:
        """Count how close the choice of each token is."""
        logits, batch = self._logits.pop(id(router), None), call.batch
        skip = self._only and batch.number not in self._only
        if logits is None or skip or "activations" not in self._what or in_backward():
            return
        scores = scores_of(router, logits).detach().reshape(-1, logits.shape[-1])
        place = batch.rows.place(len(scores) // batch.rows.samples, Columns(scores.shape[1]))
        if place is not None and scores.shape == chosen.shape:
            parts: list[tuple[Any, Place]] = [(slice(None), place)]
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
        chunk.current = _MicroBatch(self.micro_batch, rows)
        if not module.pre_process:
            chunk.current.calls["embedding output"] = 1  # for tokens that are predicted ahead
        if "inputs" in self._what or "activations" in self._what:
            for what, value in (("tokens", tokens), ("labels", given.get("labels"))):
                if value is not None:
                    place = rows.place(length, Columns(1))
                    flat = value.t().reshape(-1, 1)
                    self._add(chunk.current, "forward", "data", what, flat, place, exactly=True)

    def _loss(self, chunk: _Chunk, module: Any, args: Any, output: Any) -> Any:
        batch = chunk.current
        if batch is None or not isinstance(output, torch.Tensor) or output.dim() != 2:
            return None  # logits of a forward step with a loss of its own
        call = _Call(batch, "loss")
        return self._tensor(call, "per_token", output, Columns(1), 1, loss=True)

    def _output(self, chunk: _Chunk, name: str, module: Any, args: Any, output: Any) -> Any:
        first, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
        call = self._call_of(chunk, name, "output")
        if call is None or not isinstance(first, torch.Tensor):
            return None
        columns = self._joint.get(id(module))
        if columns is None:
            columns = output_columns(module, name, first, self._ranks, chunk.module.config)
        reduction = reduction_of(module, name, call.batch.rows, first)
        result = self._tensor(call, "output", first, columns, reduction)
        if name.endswith("router") and rest and isinstance(rest[0], torch.Tensor):
            self._gaps(call, module, rest[0])
            choice = self._tensor(call, "choice", rest[0], columns, 1)
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
                result = self._tensor(call, what, value, columns, 1)
                changed[index] = value if result is None else result
            return tuple(changed), kwargs

        yield before

    def _call_of(self, chunk: _Chunk, name: str, side: str) -> _Call | None:
        """A module's call; in the backward the same call in the forward."""
        calls = chunk.calls[f"{name} {side}"]
        if not in_backward():
            batch = chunk.current
            if batch is None:
                return None
            batch.calls[f"{name} {side}"] += 1
            count = batch.calls[f"{name} {side}"]
            calls.append(_Call(batch, name if count == 1 else f"{name}#{count}"))
            return calls[-1]
        index = chunk.recomputed[f"{name} {side}"]
        chunk.recomputed[f"{name} {side}"] += 1
        return calls[index] if index < len(calls) else None

    def _tensor(
        self,
        call: _Call,
        what: str,
        x: torch.Tensor,
        columns: Columns,
        reduction: int,
        loss: bool = False,
    ) -> torch.Tensor | None:
        """Record a tensor and its gradient; the perturbed tensor in a run with noise."""
        batch, name = call.batch, call.name
        step, ranks = self._recorder.step, self._ranks
        assert ranks is not None
        if step is None or (self._only and batch.number not in self._only):
            return None
        kind = "loss" if loss else "activations" if what in _OUTPUTS else "inputs"
        flat = flattened(x, loss)
        place = None
        if flat is not None and len(flat) % batch.rows.samples == 0:
            place = batch.rows.place(len(flat) // batch.rows.samples, columns)
        if flat is None or place is None or flat.shape != (len(place.rows), len(place.columns)):
            step.skipped[f"{name}/{what}"] = f"its place is not known: {list(x.shape)}"
            return None
        recomputes = in_backward()
        if self._noise is None and self._forced is None:
            self._compare_recomputed(call, what, x, recomputes)
        result = None
        if self._noise is not None and not recomputes and x.is_floating_point():
            label = f"{batch.number}/{name}/{what}/{place.identity}"
            noisy = self._noise.on(x, label, reduction)
            if what == "input" and name.endswith("pre_mlp_layernorm"):
                x.data.copy_(noisy)  # the residual branch takes the same tensor
            else:
                result = x + (noisy - x.detach()).nan_to_num()  # logits of padding are infinite
            flat = flattened(x if result is None else result, loss)
        if kind in self._what and not recomputes:
            exactly = what == "choice"
            self._add(batch, "forward", name, what, flat, place, reduction, exactly=exactly)
        target = x if result is None else result
        value = self._replacement(call, what, "forward", x, place, loss)
        if value is not None:
            target = result = self._forced_value(call, what, x, value, place, reduction)
        graph = target.requires_grad and torch.is_grad_enabled()  # else its second forward has one
        if "output-gradients" in self._what and graph:
            of_keys = what in ("key", "value") or name.endswith("k_layernorm")
            shared = of_keys and columns.parts < ranks.tp_size  # ranks have terms of its gradient
            if shared != columns.partial:
                tokens = len(place.rows) // batch.rows.samples
                place = batch.rows.place(tokens, replace(columns, partial=shared))
                assert place is not None
            self._hook_gradient(target, call, what, place, reduction, loss)
        return result

    def _compare_recomputed(self, call: _Call, what: str, x: torch.Tensor, again: bool) -> None:
        """Compare a tensor that is computed again with what the forward has made, in bits."""
        if again and what in call.bits:
            different = bits(x) != call.bits.pop(what)
            self._recorder.add_recomputed(call.batch.number, call.name, what, different)
        elif not again and (self._recomputes or not torch.is_grad_enabled()):
            call.bits[what] = bits(x)

    def _forced_value(
        self,
        call: _Call,
        what: str,
        x: torch.Tensor,
        value: torch.Tensor,
        place: Place,
        reduction: int,
    ) -> torch.Tensor:
        """The value of the other run, perturbed in a run with noise, in the place of ``x``."""
        if self._noise is not None and value.is_floating_point():
            label = f"{call.batch.number}/{call.name}/{what}/forced/{place.identity}"
            value = self._noise.on(value, label, reduction)
        if what == "input" and call.name.endswith("pre_mlp_layernorm"):
            x.data.copy_(value)  # the residual branch takes the same tensor
            return x
        return Replace.apply(x, value) if x.requires_grad else value

    def _replacement(
        self, call: _Call, what: str, when: str, x: torch.Tensor, place: Place, loss: bool
    ) -> torch.Tensor | None:
        """The value of the other run for a tensor or a gradient, in its shape."""
        step = self._recorder.step
        if self._forced is None or step is None:
            return None
        name = Name(step.number, call.batch.number, when, call.name, what)
        scale = None
        if when == "backward":
            own = step.scalars["tokens"].get(str(call.batch.number))
            total = self._forced.tokens.total(call.batch.number)
            scale = gradient_scale(step.scalars, total, None if own is None else max(float(own), 1))
        value = self._forced.value(name, place, scale)
        if value is None:
            return None
        value = value.to(x.device)
        if loss:
            return value.view(x.shape[1], x.shape[0]).t().to(x.dtype).contiguous()
        return value.view(x.shape).to(x.dtype)

    def _hook_gradient(
        self,
        x: torch.Tensor,
        call: _Call,
        what: str,
        place: Place,
        reduction: int,
        loss: bool,
    ) -> None:
        what = f"grad_{what}"
        batch, name = call.batch, call.name

        def record(gradient: torch.Tensor) -> torch.Tensor | None:
            result = None
            if self._noise is not None:
                label = f"{batch.number}/{name}/{what}/{place.identity}"
                result = self._noise.on(gradient, label, reduction)
            flat = flattened(gradient if result is None else result, loss)
            self._add(batch, "backward", name, what, flat, place, reduction)
            value = self._replacement(call, what, "backward", gradient, place, loss)
            if value is None or place.partial:
                return result
            if self._noise is None:
                return value
            label = f"{batch.number}/{name}/{what}/forced/{place.identity}"
            return self._noise.on(value, label, reduction)

        x.register_hook(record)

    def _add(
        self,
        batch: _MicroBatch,
        when: str,
        module: str,
        what: str,
        flat: Any,
        place: Any,
        reduction: int = 1,
        exactly: bool = False,
    ) -> None:
        if self._only and batch.number not in self._only:
            return
        if not self._by_sample:
            self._recorder.add(
                batch.number, when, module, what, flat, place, reduction, exactly=exactly
            )
            return
        first = batch.number * batch.rows.samples
        for number, (here, own) in enumerate(batch.rows.by_sample(place), first):
            part = flat[here.to(flat.device)]
            self._recorder.add(number, when, module, what, part, own, reduction, exactly=exactly)


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
