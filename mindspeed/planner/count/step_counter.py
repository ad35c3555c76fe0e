"""Count everything in a step with one ``TorchDispatchMode``.

Nested instruments (:class:`~mindspeed.instruments.live_memory.LiveMemory`,
:class:`~mindspeed.instruments.flops.FlopCounter`,
:class:`~mindspeed.instruments.ledger.CommLedger`) give the same figures; one mode takes a fraction
of their time, most of which is Python per operator and mode.

Bytes are counted by kind, which :func:`claim` sets by the holder of a storage:

==============  ==========================================================================
kind            held by
==============  ==========================================================================
weights         parameters and buffers of modules, parameter buffers of data parallelism
gradients       gradient buffers of data parallelism, ``main_grad`` and ``grad``
main weights    parameters of the optimizer that are not the model's, ``master_param``
optimizer       other states of the optimizer: moments
activations     made by a forward pass; between steps, what a step has left alive
temporary       made by a backward pass, by reductions of gradients or the optimizer's step
==============  ==========================================================================

A storage with several holders has the first kind in this table: with --reuse-fp32-param the weights
share the memory of the main weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from mindspeed.built_model import TrainedModel
from mindspeed.device.wrapped_tensors import any_wraps
from mindspeed.instruments import flops as flop_reports
from mindspeed.instruments.clock import Call, VirtualClock
from mindspeed.instruments.flops import FlopCount, repeated_in
from mindspeed.instruments.ledger import DEVICE, Communication, CommunicationMode, OperatorTraits
from mindspeed.instruments.live_memory import HOST, LiveMemory, tensors_of
from mindspeed.te.quantized_weight import stored

WEIGHTS, GRADIENTS, MAIN_WEIGHTS, OPTIMIZER = "weights", "gradients", "main weights", "optimizer"
KINDS = (WEIGHTS, GRADIENTS, MAIN_WEIGHTS, OPTIMIZER, "activations", "temporary")
_MAIN = ("master_param", "main_param")
_DEPTH = 3


def claim(memory: LiveMemory, model: TrainedModel) -> None:
    """Set the kinds of the storages of a model; to be repeated once optimizer states exist."""
    for kind, tensor in [*_of_optimizer(model.optimizer), *_of_chunks(model.chunks)]:
        memory.claim(tensor, kind)


def _of_optimizer(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for part in getattr(optimizer, "chained_optimizers", None) or [optimizer]:
        inner = getattr(part, "optimizer", None) or part
        yield from _offloaded(inner)
        kept = [*getattr(inner, "state", {}).values(), *getattr(inner, "extras", {}).values()]
        for states in kept:
            for name, value in states.items() if isinstance(states, dict) else ():
                kind = MAIN_WEIGHTS if name in _MAIN else OPTIMIZER
                for tensor in _tensors(value):
                    yield kind, tensor
        for group in getattr(inner, "param_groups", ()):
            for parameter in group["params"]:
                yield MAIN_WEIGHTS, parameter
                if parameter.grad is not None:
                    yield GRADIENTS, parameter.grad


def _offloaded(optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Host memory of ``--optimizer-cpu-offload``, which a CPU device does not distinguish."""
    for one in getattr(optimizer, "cpu_optimizers", ()):
        for group in one.param_groups:
            for weight in group["params"]:
                yield from ((HOST, tensor) for tensor in _tensors([weight, weight.grad]))
        for state in one.state.values():
            yield from ((HOST, tensor) for tensor in _tensors(list(state.values())))


def _of_chunks(chunks: list[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        for parameter in chunk.parameters():
            for name in ("grad", "main_grad"):
                gradient = getattr(parameter, name, None)
                if isinstance(gradient, torch.Tensor):
                    yield GRADIENTS, gradient
        for name in ("buffers", "expert_parallel_buffers"):
            buffers = vars(chunk).get(name)
            for buffer in buffers if isinstance(buffers, list) else ():
                if isinstance(buffer.grad_data, torch.Tensor):
                    yield GRADIENTS, buffer.grad_data
                if isinstance(buffer.param_data, torch.Tensor):
                    yield WEIGHTS, buffer.param_data
        for module in chunk.modules():
            for tensor in [*module._parameters.values(), *module._buffers.values()]:
                # Shards of Megatron-FSDP are weights since they were built, or main weights.
                for one in () if tensor is None else stored(tensor):
                    if not is_traceable_wrapper_subclass(one):
                        yield WEIGHTS, one


def _tensors(value: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Tensors of a state: itself, items of sequences, attributes of an encoded state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, depth - 1)
    elif depth and hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from _tensors(item, depth - 1)


ACTIVATIONS, TEMPORARY = "activations", "temporary"


class StepCounter(LiveMemory):
    """Counts live bytes always, the rest inside :meth:`counting`.

    While :attr:`kind` is "activations", storages that a backward pass allocates are "temporary".

    Args:
        clock: times what is counted, too.

    Attributes:
        flops: FLOPs of forward, backward and recomputation.
        communications: communications, in order.
    """

    def __init__(self, clock: VirtualClock | None = None) -> None:
        super().__init__()
        self.flops = FlopCount()
        self.communications: list[Communication] = []
        self._counts = False
        self._clock = clock
        self.mode: TorchDispatchMode = _Mode(self)

    def enter_contexts(self, stack: ExitStack) -> None:
        """Receive FLOPs that are reported without an operator, too."""
        super().enter_contexts(stack)
        stack.enter_context(flop_reports.received_by(self._reported))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count operators inside the block."""
        self._counts = True
        try:
            with nullcontext() if self._clock is None else self._clock.told(self.phase):
                yield
        finally:
            self._counts = False

    def kind_of_new(self) -> str:
        """Kind of a new storage, by the phase of the step."""
        if self.kind == ACTIVATIONS and self.phase.current() != "forward":
            return TEMPORARY
        return self.kind

    def _reported(self, flops: int) -> None:
        if self._counts:
            self._add(flops, 0)

    def _add(self, flops: int, repeated: int) -> None:
        recomputed = self.phase.current() == "recompute"
        self.flops += FlopCount(flops, flops if recomputed else repeated)

    def _count(self, traits: OperatorTraits, call: Call) -> None:
        if traits.formula is not None:
            self._add(call.flops, repeated_in(traits.packet, call.args, call.flops))


class _Mode(CommunicationMode):
    supports_higher_order_operators = True

    def __init__(self, counter: StepCounter) -> None:
        super().__init__(counter.phase, counter.communications.append)
        self._counter = counter
        self._depth = 0  # of operators of ours that communicate

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device
        if any_wraps(types):
            return NotImplemented
        kwargs = kwargs or {}
        counter, traits = self._counter, self.traits_of(func)
        if not counter._counts:
            result = func(*args, **kwargs)
        else:
            result = self._counted(func, traits, args, kwargs)
        if traits.plain:
            counter.hold(func, args, kwargs, result)
        for tensor in tensors_of(result):
            counter.see(tensor)
        return result

    def _counted(self, func: Any, traits: OperatorTraits, args: Any, kwargs: Any) -> Any:
        counter, clock, kernel = self._counter, self._counter._clock, traits.operator
        if clock is not None:
            clock.before(traits, args)
        sent = self.communications(func, args, kwargs) if traits.collective else []
        counter.communications += sent
        if kernel is None:
            result = func(*args, **kwargs)
        elif clock is not None:  # which needs what the kernel runs
            result = self._inside(kernel, args)
            if traits.formula is not None:
                return result
        else:
            self._depth += 1
            try:
                result = self._inside(kernel, args)
            finally:
                self._depth -= 1
        if not self._depth:
            call = Call.of(traits, func, args, kwargs, result, with_bytes=clock is not None)
            counter._count(traits, call)
            if clock is not None:
                clock.after(traits, call, sent)
        return result
