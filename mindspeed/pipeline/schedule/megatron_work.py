"""The computations of a plan on Megatron's model chunks.

What surrounds them is Megatron's own: ``forward_step`` computes a micro-batch and its loss,
``finalize_model_grads`` ends the step. In between gradients are only accumulated, as the whole step
runs under ``no_sync``; the reduction of a chunk starts where the plan has its ``G``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from megatron.core.pipeline_parallel import schedules

from mindspeed import device
from mindspeed.errors import ConfigError, DataError
from mindspeed.pipeline.megatron_placement import finalized_groups, move_results
from mindspeed.pipeline.schedule.actions import BACKWARD_INPUT, FORWARD_INPUT_ONLY, Action
from mindspeed.pipeline.schedule.executor import PREFETCH, Tensors
from mindspeed.pipeline.schedule.headers import check_tensors, made_here
from mindspeed.pipeline.schedule.plan import Plan
from mindspeed.pipeline.schedule.row import row_of

if TYPE_CHECKING:
    from mindspeed.pipeline.schedule.megatron_weights import MicroBatchWeights


class Recomputation(Protocol):
    """The layers of one chunk; :mod:`mindspeed.memory.scheduled` has them.

    A micro-batch is any key.
    """

    def stored(self) -> AbstractContextManager[object]:
        """Around ``F``: the activations are stored."""
        ...

    def dropped(self, microbatch: Any) -> AbstractContextManager[object]:
        """Around ``Fc``: only inputs are."""
        ...

    def recompute(self, microbatch: Any) -> None:
        """``R``: everything that backward needs is there when it returns."""
        ...


@dataclass(frozen=True)
class StepArguments:
    """The arguments of ``forward_backward_func`` that concern what is computed.

    Attributes:
        forward_step_func: computes one micro-batch.
        readers: a data iterator, or None, for each chunk.
        chunks: this rank's model chunks.
        config: the model's configuration.
        groups: Megatron's ``ProcessGroupCollection`` with tp, cp, pp, embd, pos_embd and dp_cp.
        num_microbatches: of the step.
        forward_only: no backward follows.
        collect_non_loss_data: keep what the loss function returns for ``non_loss_data=True``.
        first_val_step: of fp8 weights: whether this is the first step of a validation.
        force_all_reduce: reduce gradients with an all-reduce in this step.
        recomputations: for each chunk what drops and recomputes its activations, if anything does.
        weights: what each micro-batch counts.
        several_tensors: a stage may return several tensors, some without gradients.
    """

    forward_step_func: Callable[..., Any]
    readers: list[Any]
    chunks: list[Any]
    config: Any
    groups: Any
    num_microbatches: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    force_all_reduce: bool
    recomputations: Sequence[Recomputation | None]
    weights: MicroBatchWeights
    several_tensors: bool = False

    @property
    def reduction(self) -> dict[str, bool]:
        """Arguments of what reduces gradients, which releases before 0.16 do not have."""
        return {"force_all_reduce": True} if self.force_all_reduce else {}


class MegatronWork:
    """One step of one rank (:class:`mindspeed.pipeline.schedule.executor.Work`).

    Args:
        plan: that is executed.
        rank: this rank in the pipeline.
        step: what to compute.

    Attributes:
        losses: what the loss function returned for each micro-batch of the last stage.
        live: activations that wait for their backward: (stage, micro-batch) -> inputs and outputs.
    """

    def __init__(self, plan: Plan, rank: int, step: StepArguments) -> None:
        self._plan, self._rank, self._step = plan, rank, step
        self.losses: list[Any] = []
        self.live: dict[tuple[int, int], tuple[Tensors, Tensors]] = {}
        self._num_tokens = torch.zeros([], dtype=torch.int, device=device.current().torch_device())
        self._gathered: set[int] = set()
        self._reduced: set[int] = set()
        self._embedding: Any = None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around all actions: no gradient is reduced before its ``G``."""
        config, step = self._step.config, self._step
        if config.finalize_model_grads_func is not None and not step.forward_only:
            self._embedding = schedules.clear_embedding_activation_buffer(
                config, step.chunks, self._has_last_stage
            )
        functions = config.no_sync_func or []
        with contextlib.ExitStack() as stack:
            for no_sync in functions if isinstance(functions, list) else [functions]:
                stack.enter_context(no_sync())
            if row_of(self._plan, self._rank, PREFETCH).splits:
                stack.enter_context(self._weight_gradients.splitting())
            yield

    def finalize(self) -> None:
        """Reduce what no ``G`` did and let Megatron finalise the gradients."""
        step, config = self._step, self._step.config
        self._move_results()
        if step.forward_only:
            return
        for chunk in range(len(step.chunks)):
            self._start_reduction(chunk)
        if config.finalize_model_grads_func is None:
            return
        schedules.finish_embedding_wgrad_compute(
            config, self._embedding, self._has_last_stage, step.groups.tp
        )
        config.finalize_model_grads_func(
            step.chunks,
            self._num_tokens if config.calculate_per_token_loss else None,
            pg_collection=finalized_groups(step.groups, self._plan.placement),
            **step.reduction,
        )

    def forward(self, action: Action, inputs: Tensors) -> Tensors:
        """Run a chunk, and the loss function on the last stage."""
        step = self._step
        chunk = self._plan.placement.chunk(action.stage)
        if not step.forward_only:
            if not step.several_tensors:
                for tensor in inputs:
                    tensor.requires_grad_()
            self._gather_parameters(chunk)
        with self._stored_or_dropped(action, chunk):
            (output,), num_tokens = self._forward_step(action, chunk, inputs)
        outputs = list(output) if isinstance(output, tuple | list) else [output]
        if step.several_tensors:
            check_tensors(outputs, action)
        self._num_tokens += num_tokens
        if not step.forward_only:
            self.live[key_of(action)] = inputs, outputs
        return outputs

    def handed_on(self, action: Action) -> None:
        """Free the content of outputs; their graph stays."""
        if self._step.forward_only:
            return
        _, outputs = self.live[key_of(action)]
        for output in made_here(outputs) if self._step.several_tensors else outputs:
            schedules.deallocate_output_tensor(
                output, self._step.config.deallocate_pipeline_outputs
            )

    def backward(self, action: Action, gradients: Tensors) -> Tensors:
        """Gradients of the inputs; zeros for those that did not take part."""
        config = self._step.config
        inputs, outputs = self.live.pop(key_of(action))
        self._step.weights.before_backward(key_of(action)[1])
        if config.timers is not None:
            config.timers("backward-compute", log_level=2).start()
        for tensor in inputs:
            if tensor.requires_grad:
                tensor.retain_grad()
        if action.stage == self._plan.placement.num_stages - 1:
            if config.grad_scale_func is not None:
                outputs[0] = config.grad_scale_func(outputs[0])
            gradients = [torch.ones_like(outputs[0])]
        split = action.op == BACKWARD_INPUT
        with self._weight_gradients.deferred(key_of(action)) if split else contextlib.nullcontext():
            _run_backward(outputs, gradients)
        if config.timers is not None:
            config.timers("backward-compute").stop()
        return [
            torch.zeros_like(x) if x.grad is None else x.grad for x in inputs if x.requires_grad
        ]

    def pair(
        self, forward: Action, backward: Action, inputs: Tensors, gradients: Tensors
    ) -> tuple[Tensors, Tensors]:
        """One after the other."""
        return self.forward(forward, inputs), self.backward(backward, gradients)

    def weight_gradients(self, action: Action) -> None:
        """Add to the gradients of weights what the ``I`` of this micro-batch left out."""
        self._weight_gradients.compute(key_of(action))

    def recompute(self, action: Action) -> None:
        """Compute what a forward did not keep, with the random numbers that it drew."""
        layers = self._step.recomputations[self._plan.placement.chunk(action.stage)]
        if layers is not None:
            layers.recompute(action.microbatch)

    def offload(self, action: Action) -> None:
        """Start to copy what a pending ``W`` needs to the host."""
        self._weight_gradients.offload(key_of(action))

    def load(self, action: Action) -> None:
        """Start to copy it back."""
        self._weight_gradients.load(key_of(action))

    def reduce(self, action: Action) -> None:
        """Start the reduction of a chunk, if it can overlap with anything."""
        self._start_reduction(self._plan.placement.chunk(action.stage))

    @property
    def num_live(self) -> int:
        """Number of (stage, micro-batch) pairs with activations, for a backward or for a ``W``."""
        split = row_of(self._plan, self._rank, PREFETCH).splits
        return len(self.live) + (len(self._weight_gradients.pending) if split else 0)

    @cached_property
    def _weight_gradients(self) -> Any:
        """The store that the linear layers of all chunks share."""
        module = self._step.chunks[0]
        while module is not None:
            if (store := getattr(module, "weight_gradients", None)) is not None:
                return store
            module = getattr(module, "module", None)
        raise ConfigError(
            f"the pipeline schedule {self._plan.name} computes weight gradients apart from those "
            "of the inputs, which the layers of this model cannot: take one without I and W"
        )

    @property
    def _has_last_stage(self) -> bool:
        placement = self._plan.placement
        return placement.rank(placement.num_stages - 1) == self._rank

    def _move_results(self) -> None:
        """Give losses and tokens to the last rank, where Megatron looks for them."""
        placement = self._plan.placement
        source, last = placement.rank(placement.num_stages - 1), placement.ranks - 1
        if source == last:
            return
        results = (self.losses, self._num_tokens)
        results = move_results(results, source=source, target=last, group=self._step.groups.pp)
        self.losses, self._num_tokens = results
        if self._rank != last:
            self.losses = []

    def _stored_or_dropped(self, action: Action, chunk: int) -> AbstractContextManager[object]:
        """Store or drop the activations of a forward."""
        layers = self._step.recomputations[chunk]
        if layers is None or self._step.forward_only:
            return contextlib.nullcontext()
        if action.op == FORWARD_INPUT_ONLY:
            return layers.dropped(action.microbatch)
        return layers.stored()

    def _forward_step(self, action: Action, chunk: int, inputs: Tensors) -> Any:
        step = self._step
        first = schedules.check_first_val_step(
            step.first_val_step, step.forward_only, action.microbatch == 0
        )
        with self._data(action):
            return schedules.forward_step(
                step.weights.forward_step(step.forward_step_func, key_of(action)[1]),
                step.readers[chunk],
                step.chunks[chunk],
                step.num_microbatches,
                inputs or [None],  # type: ignore[list-item]
                self.losses,
                step.config,
                cp_group_size=step.groups.cp.size(),
                collect_non_loss_data=step.collect_non_loss_data,
                is_first_microbatch=first,
                current_microbatch=action.microbatch,
                vp_stage=chunk if len(step.chunks) > 1 else None,
                is_last_stage=action.stage == self._plan.placement.num_stages - 1,
            )

    @contextlib.contextmanager
    def _data(self, action: Action) -> Iterator[None]:
        """Read a micro-batch in the block; say which one an iterator has not."""
        try:
            yield
        except StopIteration:
            raise DataError(
                f"the data iterator of pipeline stage {action.stage} (rank {self._rank} of the "
                f"pipeline) ended at micro-batch {action.microbatch}; the step has "
                f"{self._step.num_microbatches}"
            ) from None

    def _gather_parameters(self, chunk: int) -> None:
        """Start the parameter gathers of this chunk and the next one, if they are aligned."""
        functions, chunks = self._step.config.param_sync_func, self._step.chunks
        if functions is None or len(chunks) == 1:
            return
        for number in {chunk, min(chunk + 1, len(chunks) - 1)} - self._gathered:
            self._gathered.add(number)
            function = functions[number] if isinstance(functions, list) else functions
            function(chunks[number].parameters())

    def _start_reduction(self, chunk: int) -> None:
        """Start the reduction of a chunk once; ``finalize_model_grads`` waits for it.

        Without ``--overlap-grad-reduce``, or with several instances of the distributed optimizer,
        ``finalize_model_grads`` does it all.
        """
        model = self._step.chunks[chunk]
        options = getattr(model, "ddp_config", None)
        if chunk in self._reduced or options is None or not hasattr(model, "bucket_groups"):
            return
        if options.overlap_grad_reduce and options.num_distributed_optimizer_instances == 1:
            self._reduced.add(chunk)
            for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
                group.start_grad_sync(**self._step.reduction)


def key_of(action: Action) -> tuple[int, int]:
    """Stage and micro-batch."""
    assert action.microbatch is not None
    return action.stage, action.microbatch


def _run_backward(outputs: Tensors, gradients: Tensors) -> None:
    """Call the engine directly: freed outputs no longer have the shape of their gradients."""
    tensors = tuple(output for output in outputs if output.requires_grad)
    if tensors:
        grad_tensors = tuple(gradients)
        torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
            tensors=tensors,
            grad_tensors=grad_tensors,
            keep_graph=False,
            create_graph=False,
            inputs=(),
            allow_unreachable=True,
            accumulate_grad=True,
        )
