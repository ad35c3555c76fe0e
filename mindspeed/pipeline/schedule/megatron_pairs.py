"""Pairs on Megatron's models: ``--moe-fb-overlap`` with a schedule of ours.

With ``overlap_moe_expert_parallel_comm`` in its configuration a model cuts each layer into parts
(``build_schedule_plan``), and Megatron runs the parts of a forward and of a backward in turn on two
streams. A micro-batch whose backward may be in a pair must have come forward in parts, so every
forward and backward of a training step runs so, alone or in a pair.

The order of forwards and backwards, the messages and the weight gradients that wait are those of
the plan, as without parts (:class:`.MegatronWork`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.utils import ScheduleNode, set_streams
from megatron.core.utils import get_attr_wrapped_model

from mindspeed import device
from mindspeed.pipeline.schedule.actions import BACKWARD_INPUT, Action
from mindspeed.pipeline.schedule.executor import Tensors
from mindspeed.pipeline.schedule.megatron_work import MegatronWork, StepArguments, key_of
from mindspeed.pipeline.schedule.plan import Plan


class PairedWork(MegatronWork):
    """One training step of one rank whose layers run in parts."""

    def __init__(self, plan: Plan, rank: int, step: StepArguments) -> None:
        super().__init__(plan, rank, step)
        self._parts: dict[tuple[int, int], tuple[Any, Any]] = {}  # parts of a forward, and the loss
        set_streams()

    def forward(self, action: Action, inputs: Tensors) -> Tensors:
        """Run a chunk, and the loss function on the last stage."""
        return self._run(action, None, inputs, [])[0]

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        """Gradients of the inputs."""
        return self._run(None, action, [], gradients)[1]

    def pair(
        self, forward: Action, backward: Action, inputs: Tensors, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """Both in turn, part by part."""
        return self._run(forward, backward, inputs, gradients)

    def _run(
        self, forward: Action | None, backward: Action | None, inputs: Tensors, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        received: Tensors = []
        ahead = behind = loss = gradient = None
        with self._surroundings(backward):
            if forward is not None:
                ahead, loss = self._cut(forward, inputs)
            if backward is not None:
                received, behind, gradient = self._begin_backward(backward, gradients)
            output = type(ahead or behind).run(ahead, behind, b_grad=gradient)  # type: ignore[union-attr]
        outputs = [] if forward is None else self._end_forward(forward, inputs, output, ahead, loss)
        return outputs, [x.grad for x in received if x.grad is not None]

    @contextlib.contextmanager
    def _surroundings(self, backward: Action | None) -> Iterator[None]:
        """Contexts that Megatron gives a forward and a backward, and that of a divided backward."""
        config = self._step.config
        with contextlib.ExitStack() as stack:
            if config.enable_autocast:
                stack.enter_context(torch.autocast("cuda", dtype=config.autocast_dtype))
            if config.fp8 and config.fp8_recipe == Fp8Recipe.delayed:
                stack.enter_context(get_fp8_context(config))
            if backward is not None and backward.op == BACKWARD_INPUT:
                stack.enter_context(self._weight_gradients.deferred(key_of(backward)))
            yield

    def _cut(self, action: Action, inputs: Tensors) -> tuple[Any, Any]:
        """The parts of a chunk for a micro-batch, and the function of its loss."""
        step, chunk = self._step, self._plan.placement.chunk(action.stage)
        for tensor in inputs:
            tensor.requires_grad_()
        self._gather_parameters(chunk)
        model = step.chunks[chunk]
        first = schedules.check_first_val_step(
            step.first_val_step, step.forward_only, action.microbatch == 0
        )
        if first and hasattr(model, "set_is_first_microbatch"):
            model.set_is_first_microbatch()
        schedules.set_current_microbatch(model, action.microbatch)
        get_attr_wrapped_model(model, "set_input_tensor")(inputs or [None])  # type: ignore[list-item]
        inner = get_attr_wrapped_model(model, "build_schedule_plan", return_model_obj=True)
        with self._data(action):
            found = step.forward_step_func(step.readers[chunk], inner, return_schedule_plan=True)
        parts, loss = found
        return parts, loss

    def _begin_backward(self, action: Action, gradients: Tensors) -> tuple[Tensors, Any, Any]:
        """Inputs of a chunk, its parts and the gradient of its output."""
        inputs, outputs = self.live.pop(key_of(action))
        parts, loss = self._parts.pop(key_of(action))
        for tensor in inputs:
            tensor.retain_grad()
        if gradients:
            return inputs, parts, gradients[0]
        if self._step.config.grad_scale_func is not None:
            outputs[0] = self._step.config.grad_scale_func(outputs[0])
        torch.autograd.backward(outputs[0])
        return inputs, parts, loss.get_grad()

    def _end_forward(
        self, action: Action, inputs: Tensors, output: Any, parts: Any, loss: Any
    ) -> Tensors:
        """Compute the loss on the last stage; keep what the backward needs."""
        step, chunk = self._step, self._plan.placement.chunk(action.stage)
        stream = device.current().current_stream()
        node = ScheduleNode(loss, stream, parts.event, name="loss_func")
        output, num_tokens = schedules.forward_step_calc_loss(
            step.chunks[chunk],
            output,
            node.forward,
            step.config,
            chunk if len(step.chunks) > 1 else None,
            step.collect_non_loss_data,
            step.num_microbatches,
            self.losses,
            step.groups.cp.size(),
            action.stage == self._plan.placement.num_stages - 1,
        )
        self._num_tokens += num_tokens
        self.live[key_of(action)] = inputs, [output]
        self._parts[key_of(action)] = parts, node
        return [output]
