"""Records the tensors of modules, forward and backward, and puts others in their place.

A tensor is recorded when a module makes or gets it, and its gradient by a hook on it: registered
wherever the tensor requires a gradient, which with recomputation is the second forward if the first
ran without a graph. The micro-batch is bound to the hook then, because schedules run other forwards
in between.

    noise    the tensor and its gradient get errors as large as rounding
    forced   they are replaced by those of another run
    again    what is computed again is compared with what the forward has made, in bits
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch

from mindspeed.compare.digest import Elements, bits
from mindspeed.compare.forced import ForcedValues, Replace
from mindspeed.compare.megatron_modules import flattened
from mindspeed.compare.megatron_places import MicroBatchRows, RankColumns, Ranks
from mindspeed.compare.names import Name
from mindspeed.compare.noise import Noise
from mindspeed.compare.recorder import RunRecorder
from mindspeed.compare.scales import gradient_scale
from mindspeed.instruments.instrument import in_backward

_OUTPUTS = ("output", "choice", "logits")


@dataclass
class MicroBatch:
    """A micro-batch that a chunk of the model runs.

    Attributes:
        number: In the step, over all data-parallel ranks.
        rows: Of its activations on this rank.
        calls: How often each module was called.
    """

    number: int
    rows: MicroBatchRows
    calls: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module.

    Attributes:
        batch: Its micro-batch.
        name: Of the module, with the number of the call.
        bits: Digests of what the forward has made, to be compared with a recomputation.
    """

    batch: MicroBatch
    name: str
    bits: dict[str, torch.Tensor] = field(default_factory=dict)


class MegatronTensors:
    """Records the tensors of a rank's modules.

    Args:
        recorder: Gets them.
        what: Kinds of tensors, as in ``--record-what``.
        micro_batches: Numbers of those that are recorded; empty: all.
        noise: Perturbs every recorded tensor; None in runs that are to be trusted.
        by_sample: Each sample of a micro-batch has digests of its own.
    """

    def __init__(
        self,
        recorder: RunRecorder,
        what: Collection[str],
        micro_batches: Collection[int],
        noise: Noise | None,
        by_sample: bool,
    ) -> None:
        self._recorder, self._what, self._noise = recorder, frozenset(what), noise
        self._only, self._by_sample = frozenset(micro_batches), by_sample
        self._forced: ForcedValues | None = None
        self._ranks: Ranks | None = None
        self._recomputes = False

    def begin(self, ranks: Ranks, forced: ForcedValues | None, recomputes: bool) -> None:
        """Begin a step.

        Args:
            ranks: This rank's place.
            forced: Values of another run, which replace every recorded tensor.
            recomputes: The job computes some modules again in the backward.
        """
        self._ranks, self._forced, self._recomputes = ranks, forced, recomputes

    def add(
        self,
        call: ModuleCall,
        what: str,
        x: torch.Tensor,
        columns: RankColumns,
        reduction: int,
        loss: bool = False,
    ) -> torch.Tensor | None:
        """Record a tensor and its gradient.

        Args:
            call: Of the module that makes or gets it.
            what: Of the module.
            x: ``[tokens, samples, ...]``, ``[rows, columns]``, or a loss ``[samples, tokens]``.
            columns: Of this rank.
            reduction: How many terms make up one value.
            loss: It is the loss of each token.

        Returns:
            What takes its place: perturbed in a run with noise, the other run's in a forced one.
        """
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
            assert flat is not None
        if kind in self._what and not recomputes:
            exactly = what == "choice"
            self.add_flat(batch, "forward", name, what, flat, place, reduction, exactly=exactly)
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

    def _compare_recomputed(
        self, call: ModuleCall, what: str, x: torch.Tensor, again: bool
    ) -> None:
        """Compare a tensor that is computed again with what the forward has made, in bits."""
        if again and what in call.bits:
            different = bits(x) != call.bits.pop(what)
            self._recorder.add_recomputed(call.batch.number, call.name, what, different)
        elif not again and (self._recomputes or not torch.is_grad_enabled()):
            call.bits[what] = bits(x)

    def _forced_value(
        self,
        call: ModuleCall,
        what: str,
        x: torch.Tensor,
        value: torch.Tensor,
        place: Elements,
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
        self,
        call: ModuleCall,
        what: str,
        when: str,
        x: torch.Tensor,
        place: Elements,
        loss: bool,
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
        call: ModuleCall,
        what: str,
        place: Elements,
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
            assert flat is not None
            self.add_flat(batch, "backward", name, what, flat, place, reduction)
            value = self._replacement(call, what, "backward", gradient, place, loss)
            if value is None or place.partial:
                return result
            if self._noise is None:
                return value
            label = f"{batch.number}/{name}/{what}/forced/{place.identity}"
            return self._noise.on(value, label, reduction)

        x.register_hook(record)

    def add_flat(
        self,
        batch: MicroBatch,
        when: str,
        module: str,
        what: str,
        flat: torch.Tensor,
        place: Elements,
        reduction: int = 1,
        exactly: bool = False,
    ) -> None:
        """Record rows of a micro-batch, or of each of its samples.

        Args:
            batch: The micro-batch.
            when: Pass.
            module: Name.
            what: Of the module.
            flat: ``[rows, columns]``.
            place: In the whole tensor.
            reduction: How many terms make up one value.
            exactly: Take the exact digest, too.
        """
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
