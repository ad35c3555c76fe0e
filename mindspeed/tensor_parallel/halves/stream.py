"""Two halves of a micro-batch on their way through layers, forward and backward.

    stream = Stream(hidden, ALL_REDUCE, None)              # hidden [s, b, h]
    hidden = stream.run(hidden, first_layer, following=second_layer[0])
    hidden = stream.run(hidden, second_layer, following=None)

The graph of autograd is cut where a step of :mod:`mindspeed.tensor_parallel.halves.order` begins.
Autograd would run backward in the reverse order of forward, and a norm has to wait late in both:
in forward for the output before it, in backward for the gradient after it. So each step keeps its
inputs and outputs, and an autograd function for each layer runs the steps of backward.

A layer leaves the reductions of its last sublayer under way, and the next one waits for them. What
autograd sees between the two is an empty tensor of the right shape, in forward and in backward.

Gradients of a parameter are added over both halves and given to autograd once, so that its hooks
run once for a micro-batch; ``main_grad`` gets two products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mindspeed.errors import TrainingError
from mindspeed.spmd import Passes, typed
from mindspeed.tensor_parallel.exchange import PartExchange, Started, running
from mindspeed.tensor_parallel.halves.order import HALVES, Order, OrderStep, after, before

Gather = Callable[[Tensor], Started]
"""Starts to gather ``[s/p, b, h]`` along s."""


class Sublayer(Protocol):
    """Attention or MLP of one layer, for a half of the micro-batch."""

    @property
    def norm_parameters(self) -> Sequence[Tensor]:
        """Those of :meth:`enter` that get gradients."""

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The others that get gradients."""

    def enter(self, hidden: Tensor) -> Tensor:
        """The norm: from ``[s, b, h]`` to the input of the column layer, in its dtype."""

    def run(self, x: Tensor, half: int) -> tuple[Tensor, Tensor | None]:
        """Column layer to row layer: the output ``[s, b, h]`` and the bias to be added to it."""

    def leave(self, output: Tensor, bias: Tensor | None, hidden: Tensor, half: int) -> Tensor:
        """Bias, dropout and residual: the next ``[s, b, h]``."""


def halves_of(size: int) -> tuple[int, int]:
    """Samples of both halves of a micro-batch; the first one has the odd one."""
    return size - size // HALVES, size // HALVES


@dataclass(eq=False)
class _Stretch:
    """A stretch of the graph, from leaves to outputs."""

    leaves: list[Tensor]
    outputs: list[Tensor]


@dataclass(eq=False)
class _Part:
    """One half in one sublayer.

    Attributes:
        exchange: Its collectives.
        stretches: By the kind of step.
        x: Input of the column layer, a leaf.
        hidden: Before the norm, a leaf; the residual.
        output: Of the row layer, and its bias.
    """

    exchange: PartExchange = field(default_factory=PartExchange)
    stretches: dict[str, _Stretch] = field(default_factory=dict)
    x: Tensor | None = None
    hidden: Tensor | None = None
    output: tuple[Tensor, Tensor | None] | None = None


class HalvesStream:
    """A micro-batch as two halves.

    Args:
        hidden: ``[s, b, h]``, b at least 2; with sequence parallelism this rank's shard.
        order: Of the steps.
        gather: With sequence parallelism: starts the collective that ends ``I``.
        trace: Gets the name of each step that begins, with its sublayer and direction.
    """

    def __init__(
        self,
        hidden: Tensor,
        order: Order,
        gather: Gather | None = None,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self._order, self._gather, self._trace = order, gather, trace
        self._sizes = halves_of(hidden.shape[1])
        starts = hidden.detach().split(self._sizes, 1)
        self._starts = [_leaf(one.contiguous(), hidden.requires_grad) for one in starts]
        self._sublayers: list[Sublayer] = []
        self._parts: list[list[_Part]] = [_parts()]
        self.grads: dict[Tensor, Tensor] = {}
        # Of each half: gradients of the column layer's input, of the residual, of the output.
        self._dx: list[Tensor | None] = [None] * HALVES
        self._dh: list[Tensor | None] = [None] * HALVES
        self._dy: list[Tensor | None] = [None] * HALVES

    def run(
        self, hidden: Tensor, sublayers: Sequence[Sublayer], following: Sublayer | None
    ) -> Tensor:
        """Run a layer forward.

        Args:
            hidden: ``[s, b, h]``: of the constructor, or the result of the layer before.
            sublayers: Of the layer, in order.
            following: The first one of the layer that continues; None: the layer is the last one.

        Returns:
            ``[s, b, h]``; an empty tensor of this shape if a layer continues.
        """
        start = len(self._sublayers)
        self._sublayers += sublayers
        first, closed, end = start == 0, following is None, len(self._sublayers)
        upcoming = [*self._sublayers, following]
        if first:
            for step in before(self._order.forward):
                self._enter(step.half, 0, upcoming[0])
        for index in range(start, end):
            self._parts.append(_parts())
            self._forward(index, upcoming)
        if closed:
            for step in after(self._order.forward):
                self._enter(step.half, end, None)
            ends = [_known(part.hidden) for part in self._parts[end]]
            out = torch.cat([one.detach() for one in ends], 1)
            _drop(*ends, *(one for part in self._parts[end] for one in _outputs(part)))
        else:
            out = hidden.new_empty(()).expand(hidden.shape)
        if not torch.is_grad_enabled():
            return out
        parameters = [p for one in sublayers for p in one.parameters]
        norms = [one.norm_parameters for one in sublayers[0 if first else 1 :]]
        norms += [] if following is None else [following.norm_parameters]
        parameters += [p for one in norms for p in one]
        layer = _Layer(self, range(start, end), first, closed, parameters)
        return _Backward.apply(hidden, layer, [out], *parameters)  # type: ignore[no-any-return]

    def _say(self, step: str, index: int, direction: str) -> None:
        if self._trace is not None:
            self._trace(f"{direction}{index}{step}")

    def _forward(self, index: int, upcoming: Sequence[Sublayer | None]) -> None:
        """The steps of a sublayer; what is between a half's 1 and 2 runs inside of its call."""
        steps = list(self._order.forward)
        while steps:
            step = steps.pop(0)
            if step.kind == "I":
                self._enter(step.half, index + step.ahead, upcoming[index + step.ahead])
                continue
            inside = []
            while (one := steps.pop(0)) != OrderStep(step.half, "2"):
                inside.append(one)
            self._say(str(step), index, "F")
            self._call(step.half, index, inside, upcoming)

    def _enter(self, half: int, index: int, sublayer: Sublayer | None) -> None:
        """``I`` of a sublayer; None: what is left after the last one."""
        self._say("ab"[half] + "I", index, "F")
        part = self._parts[index][half]
        if index == 0:
            leaves = [self._starts[half]]
            hidden = leaves[0].view_as(leaves[0])
        else:
            ended = self._parts[index - 1][half]
            ended.exchange.finish("output")
            (output, bias), residual = _known(ended.output), _known(ended.hidden)
            leaves = [_leaf(output, output.requires_grad), residual]
            hidden = self._sublayers[index - 1].leave(leaves[0], bias, residual, half)
            ended.output = ended.hidden = None
            _drop(output, leaves[0])
        outputs = [hidden]
        part.hidden = _leaf(hidden, hidden.requires_grad)
        if sublayer is not None:
            outputs.append(x := sublayer.enter(hidden))
            part.x = _leaf(x, x.requires_grad)
            if self._gather is not None:
                part.exchange.input = self._gather(part.x.detach())
        self._keep(part, "I", leaves, outputs)

    def _call(
        self,
        half: int,
        index: int,
        inside: Sequence[OrderStep],
        upcoming: Sequence[Sublayer | None],
    ) -> None:
        """``1``, what is between, and ``2``."""
        part, sublayer = self._parts[index][half], self._sublayers[index]
        x, part.x = _known(part.x), None

        def between(row_input: Tensor) -> Tensor:
            self._keep(part, "1", [x], [row_input])
            with running(None):
                for one in inside:
                    self._enter(one.half, index + one.ahead, upcoming[index + one.ahead])
            self._say("ab"[half] + "2", index, "F")
            leaves.append(_leaf(row_input, row_input.requires_grad))
            return leaves[0]

        leaves: list[Tensor] = []
        if inside:
            part.exchange.between = between
        with running(part.exchange):
            output, bias = sublayer.run(x, half)
        if part.exchange.between is not None:
            raise TrainingError(
                "half of a micro-batch has run through a layer without its row-parallel layer"
            )
        self._keep(part, "2" if inside else "1", leaves or [x], [output])
        part.output = output, bias

    @staticmethod
    def _keep(part: _Part, kind: str, leaves: list[Tensor], outputs: list[Tensor]) -> None:
        if torch.is_grad_enabled():
            part.stretches[kind] = _Stretch(leaves, outputs)

    def backward(self, layer: _Layer, grad: Tensor) -> Tensor | None:
        """Run a layer backward: from the gradient ``[s, b, h]`` of its output to its input's.

        The first is empty if a layer continues, the second if this one does. None: no gradient.
        """
        if layer.closed:
            self._dh = [one.contiguous() for one in grad.split(self._sizes, 1)]
            for step in after(self._order.backward):
                self._enter_backward(step.half, layer.indices.stop)
        for index in reversed(layer.indices):
            for step in self._order.backward:
                if step.kind == "I":
                    self._enter_backward(step.half, index + step.ahead)
                else:
                    self._call_backward(step, index)
        if not layer.first:
            return grad.new_zeros(()).expand(grad.shape)
        for step in before(self._order.backward):
            self._enter_backward(step.half, 0)
        known = [one for one in self._dh if one is not None]
        return torch.cat(known, 1) if known else None

    def _enter_backward(self, half: int, index: int) -> None:
        self._say("ab"[half] + "I", index, "B")
        part = self._parts[index][half]
        part.exchange.finish("grad_input")
        nearby = self._sublayers[max(index - 1, 0) : index + 1]
        grads = self._run_backward(part, "I", [self._dh[half], self._dx[half]], nearby)
        self._dx[half] = None
        self._dh[half] = grads[-1]
        if index == 0:
            return
        self._dy[half] = dy = grads[0]
        if self._gather is not None and dy is not None:
            self._parts[index - 1][half].exchange.grad_output = self._gather(dy)

    def _call_backward(self, step: OrderStep, index: int) -> None:
        part, half = self._parts[index][step.half], step.half
        if step.kind not in part.stretches:
            return  # 2 is a part of 1
        self._say(str(step), index, "B")
        given, taker = self._dy[half], part.exchange
        if self._gather is not None and taker.gathers_again and step.kind == "2":
            taker.again = self._gather(part.stretches["1"].leaves[0].detach())
        (found,) = self._run_backward(part, step.kind, [given], [self._sublayers[index]])
        if step.kind == "2":
            self._dy[half] = found
            return
        self._dy[half], self._dx[half] = None, found
        for weight, grad in taker.weight_gradients():
            self._add(weight, grad)

    def _run_backward(
        self,
        part: _Part,
        kind: str,
        grads: Sequence[Tensor | None],
        sublayers: Sequence[Sublayer],
    ) -> list[Tensor | None]:
        """Gradients of the leaves of a stretch; those of parameters are added up."""
        stretch = part.stretches.pop(kind)
        pairs = [
            (output, grad)
            for output, grad in zip(stretch.outputs, grads, strict=False)
            if output.requires_grad and grad is not None
        ]
        if not pairs:
            return [None] * len(stretch.leaves)
        parameters = [p for one in sublayers for p in (*one.norm_parameters, *one.parameters)]
        leaves = [leaf for leaf in stretch.leaves if leaf.requires_grad]
        outputs, given = zip(*pairs, strict=True)
        found = torch.autograd.grad(outputs, [*leaves, *parameters], given, allow_unused=True)
        for parameter, grad in zip(parameters, found[len(leaves) :], strict=True):
            if grad is not None:
                self._add(parameter, grad)
        own = iter(found)
        return [next(own) if leaf.requires_grad else None for leaf in stretch.leaves]

    def _add(self, parameter: Tensor, grad: Tensor) -> None:
        known = self.grads.get(parameter)
        if known is None or getattr(parameter, "grad_added_to_main_grad", False):
            self.grads[parameter] = grad  # in the second case a placeholder
        else:
            self.grads[parameter] = known + grad


@dataclass(eq=False)
class _Layer:
    """What the backward of a layer needs.

    Attributes:
        stream: The micro-batch.
        indices: Of the sublayers.
        first: No layer is before it.
        closed: No layer continues.
        parameters: Whose gradients are known after it: its own, but for its first norm, which the
            layer before may have entered, and that norm of the next one.
    """

    stream: HalvesStream
    indices: range
    first: bool
    closed: bool
    parameters: list[Tensor]


@typed(Passes())
class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, layer: _Layer, out: list[Tensor], *parameters: Tensor
    ) -> Tensor:
        ctx.layer = layer
        return out.pop()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        layer: _Layer = ctx.layer
        dx = layer.stream.backward(layer, grads[0])
        of_parameters = [layer.stream.grads.pop(p, None) for p in layer.parameters]
        return (dx, None, None, *of_parameters)


def _parts() -> list[_Part]:
    return [_Part() for _ in range(HALVES)]


def _leaf(x: Tensor, requires_grad: bool) -> Tensor:
    return x.detach().requires_grad_(requires_grad)


def _outputs(part: _Part) -> list[Tensor]:
    return part.stretches["I"].outputs if "I" in part.stretches else []


def _drop(*tensors: Tensor) -> None:
    """Free the memory of tensors that have been read; the graph needs their shapes only."""
    if torch.is_grad_enabled():
        for one in tensors:
            one.data = one.new_empty(()).expand(one.shape)


def _known(x: Any) -> Any:
    if x is None:
        raise TrainingError("a half of the micro-batch was computed out of order")
    return x
