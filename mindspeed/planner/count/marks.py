"""Marks that divide a step into blocks: actions of the schedule, layers, the end of the step.

    with marked(recorder, model, planned):
        step()

===================  ==============================================================================
boundary             mark
===================  ==============================================================================
action               around Megatron's ``forward_step`` and ``backward_step`` and the operations of
                     :class:`~mindspeed.pipeline.schedule.megatron_work.MegatronWork`
gradients are zeroed around the optimizer's ``zero_grad``
update               around its ``step``
layer, forward       pre-hook of a ``TransformerLayer``; after the last one its hook
layer, once more     the same pre-hook inside a backward
layer, backward      the gradient of its output is complete
layer in parts       around the work of its parts, and of those of a layer beside it
before the first     the gradient of the input of layer 0 is complete
===================  ==============================================================================

No saved-tensor hooks and no module backward hooks: they change what autograd keeps. Where exactly a
boundary lies does not matter, only that it is the same for every layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mindspeed.built_model import TrainedModel
from mindspeed.errors import PlanError
from mindspeed.journal import Journal
from mindspeed.planner.count.recording import Part, Place

Enter = Callable[[int, Part, int], None]
"""Receives index of the action, part and layer of the block that begins."""


class Marks:
    """Hooks of one step.

    Args:
        enter: receives the blocks.
        planned: row of the rank.

    Attributes:
        executed: ops that began.
        layers: number of layers of each chunk.
    """

    def __init__(self, enter: Enter, planned: Sequence[Place]) -> None:
        self._enter, self._planned = enter, planned
        self.executed: list[str] = []
        self.layers: tuple[int, ...] = ()
        self._inside = False
        self._ops: tuple[str, ...] = ()  # of the action that runs

    @contextlib.contextmanager
    def watching(self, model: TrainedModel) -> Iterator[None]:
        """Mark the steps inside the block."""
        from megatron.core.transformer import TransformerLayer

        from mindspeed.adaptor.watched_calls import schedule_steps
        from mindspeed.pipeline.schedule.megatron_work import MegatronWork

        journal, handles, counts = Journal(), list[Any](), list[int]()
        try:
            self._wrap(journal, schedule_steps(), "forward_step", lambda args: ("F",))
            self._wrap(journal, schedule_steps(), "backward_step", lambda args: ("B",))
            self._wrap_call(journal, model.optimizer, "zero_grad", Part.CLEAR, Part.OPEN)
            self._wrap_call(journal, model.optimizer, "step", Part.UPDATE, Part.CLOSE)
            for name in ("forward", "backward", "weight_gradients", "recompute"):
                self._wrap(journal, MegatronWork, name, lambda args: (args[1].op,))
            numbers: dict[Any, tuple[int, int]] = {}  # layer -> its chunk and number
            for chunk, module in enumerate(model.chunks):
                layers = [one for one in module.modules() if isinstance(one, TransformerLayer)]
                counts.append(len(layers))
                for index, layer in enumerate(layers):
                    numbers[layer] = chunk, index
                    last = index == len(layers) - 1
                    handles += self._layer_hooks(layer, chunk, index, last)
            self.layers = tuple(counts)
            if model.chunks[0].config.overlap_moe_expert_parallel_comm:
                self._wrap_pairs(journal, numbers)
            self._enter(-1, Part.HEAD, 0)
            yield
        finally:
            journal.undo()
            for handle in handles:
                handle.remove()

    def check(self) -> None:
        """Compare the executed row with the planned one.

        Raises:
            PlanError: they differ.
        """
        planned = [place.op for place in self._planned]
        if self.executed != planned:
            raise PlanError(
                f"the schedule executed {' '.join(self.executed)} instead of its plan "
                f"{' '.join(planned)}"
            )

    @property
    def _now(self) -> int:
        return len(self.executed) - 1

    def _wrap(
        self, journal: Journal, owner: Any, name: str, ops_of: Callable[[Any], tuple[str, ...]]
    ) -> None:
        inner = getattr(owner, name)

        def action(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # the work of a plan calls Megatron's forward_step
                return inner(*args, **kwargs)
            self._ops = ops_of(args)
            self.executed += self._ops
            self._inside = True
            self._enter(self._now, _FIRST.get(self._ops[0], Part.BACK_PRE), 0)
            try:
                return inner(*args, **kwargs)
            finally:
                self._inside = False
                last = len(self.executed) == len(self._planned)
                self._enter(self._now, Part.END if last else Part.GAP, 0)

        journal.set(owner, name, action, owner="planner")

    def _wrap_pairs(self, journal: Journal, numbers: Mapping[Any, tuple[int, int]]) -> None:
        """Mark the work of layers that run in parts, beside those of another micro-batch."""
        from mindspeed.adaptor.watched_calls import layer_of_parts, layers_in_parts
        from mindspeed.pipeline.schedule.megatron_pairs import PairedWork

        for name in ("forward", "backward"):
            self._wrap(journal, PairedWork, name, lambda args: (args[1].op,))
        self._wrap(journal, PairedWork, "pair", lambda args: (args[1].op, args[2].op))
        run = layers_in_parts().run

        def marked(ahead: Any, behind: Any, *args: Any, **kwargs: Any) -> Any:
            last = True
            if behind is not None:
                chunk, layer = numbers[layer_of_parts(behind)]
                self._check_chunk(self._now, chunk)
                part, last = Part.BACK, layer == 0
            if ahead is not None:
                chunk, layer = numbers[layer_of_parts(ahead)]
                self._check_chunk(self._now - len(self._ops) + 1, chunk)
                part = Part.LAYER if behind is None else Part.BOTH
                last = last and layer == self.layers[chunk] - 1
            self._inner(part, layer)
            try:
                return run(ahead, behind, *args, **kwargs)
            finally:
                if last:
                    self._inner(Part.POST if self._ops[:1] == ("F",) else Part.BACK_PRE, 0)

        journal.set(layers_in_parts(), "run", staticmethod(marked), owner="planner")

    def _wrap_call(
        self, journal: Journal, owner: Any, name: str, during: Part, after: Part
    ) -> None:
        """Mark a call that is no action."""
        inner = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(self._now, during, 0)
            try:
                return inner(*args, **kwargs)
            finally:
                self._enter(self._now, after, 0)

        journal.set(owner, name, call, owner="planner")

    def _layer_hooks(self, layer: Any, chunk: int, index: int, last: bool) -> list[Any]:
        def mark(part: Part, number: int) -> Callable[[Any], None]:
            return lambda gradient: self._inner(part, number)

        def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            self._check_chunk(self._now, chunk)
            self._inner(Part.LAYER if self._forward else Part.AGAIN, index)
            if index == 0 and hidden.requires_grad:
                hidden.register_hook(mark(Part.BACK_PRE, 0))

        def leave(module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if hidden.requires_grad:
                hidden.register_hook(mark(Part.BACK, index))
            if last and self._forward:
                self._inner(Part.POST, 0)

        return [
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.register_forward_hook(leave),
        ]

    def _check_chunk(self, action: int, chunk: int) -> None:
        if self._inside and action < len(self._planned):
            planned = self._planned[action]
            if planned.chunk != chunk:
                raise PlanError(
                    f"action {action} of the schedule ran chunk {chunk} instead of the planned "
                    f"{planned.op} of chunk {planned.chunk}"
                )

    @property
    def _forward(self) -> bool:
        return self._inside and self.executed[-1] in ("F", "Fc")

    def _inner(self, part: Part, layer: int) -> None:
        """Begin a block inside of an action."""
        if self._inside:
            self._enter(self._now, part, layer)


_FIRST = {"F": Part.PRE, "Fc": Part.PRE, "B": Part.BACK_POST, "I": Part.BACK_POST}
"""The part with which an action begins; others have one part."""
