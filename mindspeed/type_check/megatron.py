"""Rules of Megatron's autograd functions, and what its finalizer does to gradients.

Megatron stays as it is: the rules are attached to its classes. A parameter's type follows from
what happens to its gradient, not from a copy of Megatron's conditions: each gradient is set to the
number of its parameter, the real finalizer runs with a recorded all-reduce, and what arrives there
is summed.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.journal import Journal
from mindspeed.lora.linear import sum_partial_gradients
from mindspeed.spmd import (
    Arguments,
    Attaches,
    Collective,
    Communication,
    I,
    Local,
    P,
    Product,
    R,
    Recomputed,
    Rule,
    Type,
    V,
)


def rules() -> dict[type, Rule]:
    """The rule of each autograd function of Megatron that a training uses.

    A function that a version does not have is left out; one without a rule stops the check.
    """
    found: dict[type, Rule] = {}
    for (module, names), rule in _RULES.items():
        with contextlib.suppress(ModuleNotFoundError):
            holder = importlib.import_module(f"megatron.core.{module}")
            found |= {one: rule for name in names.split() if (one := getattr(holder, name, None))}
    return found


def _group(given: Arguments) -> Any:
    from megatron.core import parallel_state

    group = next((given[name] for name in ("group", "tp_group") if given.get(name)), None)
    return group or parallel_state.get_tensor_model_parallel_group()


def slices_of_experts() -> Any:
    """The group of the ranks that share an expert; their layers do not pass it on."""
    from megatron.core import parallel_state

    return parallel_state.get_expert_tensor_parallel_group()


def _gathered(given: Arguments) -> Type:
    """Backward of the gathered sequence sums over the ranks, or only splits."""
    return R if given["tensor_parallel_output_grad"] else I


def _loss(given: Arguments) -> Type:
    """Smoothed labels have the mean over one rank's part of the vocabulary, so losses differ."""
    return V if given["label_smoothing"] else I


def _communication(given: Arguments) -> Communication:
    return Communication(
        _group(given),
        gathers=given.get("sequence_parallel", False),
        sums_gradient=given.get("allreduce_dgrad", False),
    )


def _collective(
    source: Type, result: Type | Callable[[Arguments], Type], **more: Any
) -> Collective:
    return Collective(source, result, group=_group, **more)


_RULES: Mapping[tuple[str, str], Rule] = {
    ("tensor_parallel.mappings", "_CopyToModelParallelRegion"): _collective(I, R),
    ("tensor_parallel.mappings", "_ReduceFromModelParallelRegion"): _collective(P, I, sums=True),
    # Their backward splits and gathers: the gradient is the whole on every rank.
    ("tensor_parallel.mappings", "_ScatterToModelParallelRegion"): _collective(I, V),
    ("tensor_parallel.mappings", "_GatherFromModelParallelRegion"): _collective(V, I),
    ("tensor_parallel.mappings", "_ScatterToSequenceParallelRegion"): _collective(I, V),
    ("tensor_parallel.mappings", "_GatherFromSequenceParallelRegion"): _collective(V, _gathered),
    (
        "tensor_parallel.mappings",
        "_ReduceScatterToSequenceParallelRegion _ReduceScatterToTensorParallelRegion",
    ): _collective(P, V, sums=True),
    ("tensor_parallel.mappings", "_AllGatherFromTensorParallelRegion"): _collective(V, R),
    ("tensor_parallel.mappings", "_AllToAll"): _collective(V, V, tensor="input"),
    ("tensor_parallel.cross_entropy", "_VocabParallelCrossEntropy"): _collective(V, _loss),
    (
        "tensor_parallel.layers",
        "LinearWithGradAccumulationAndAsyncCommunication LinearWithFrozenWeight",
    ): Product(_communication, x="input"),
    ("tensor_parallel.random", "CheckpointFunction"): Recomputed(others=1),
    ("transformer.moe.moe_utils", "MoEAuxLossAutoScaler"): Attaches("aux_loss"),
    ("transformer.multi_token_prediction", "MTPLossAutoScaler"): Attaches("mtp_loss"),
    ("transformer.moe.moe_utils", "RouterGatingLinearFunction"): Local(),
    ("transformer.hyper_connection", "SinkhornKnopp"): Local(),
    ("utils", "MakeViewlessTensor"): Local(),
    (
        "fusions.fused_bias_swiglu",
        "BiasSwiGLUFunction SwiGLUFunction WeightedSwiGLUFunction",
    ): Local(),
    ("fusions.fused_bias_gelu", "GeLUFunction"): Local(),
    (
        "fusions.fused_bias_geglu",
        "BiasGeGLUFunction GeGLUFunction WeightedQuickGeGLUFunction WeightedBiasQuickGeGLUFunction",
    ): Local(),
    ("fusions.fused_weighted_squared_relu", "WeightedSquaredReLUFunction"): Local(),
    (
        "fusions.fused_softmax",
        "ScaledUpperTriangMaskedSoftmax ScaledMaskedSoftmax ScaledSoftmax",
    ): Local(),
}
"""Module of ``megatron.core`` and names in it -> rule."""


def own_results(journal: Journal, mark: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
    """Name what each rank's experts add to the gathered tokens, which are zero elsewhere.

    Args:
        journal: keeps what is changed in Megatron.
        mark: ``(results, group)`` -> the results, as terms of a sum over the group.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher

    place = getattr(MoEAllGatherTokenDispatcher, "combine_preprocess", None)  # since 0.14
    if place is not None:
        journal.set(
            MoEAllGatherTokenDispatcher,
            "combine_preprocess",
            lambda self, rows: mark(place(self, rows), self.tp_ep_group),
            owner="type-check",
        )


@dataclass(frozen=True)
class SharedCount:
    """Tokens by which a formula divides: of all ranks that share the sample.

    Attributes:
        module: of ``megatron.core``, that calls the function.
        function: its name there.
        count: arguments and result of a call -> the count; None where it divides no loss.
        what: the count.
    """

    module: str
    function: str
    count: Callable[[Arguments, Any], Any]
    what: str

    def caller(self) -> Any:
        """The module; None where this version has no such function in it."""
        try:
            found = importlib.import_module(f"megatron.core.{self.module}")
        except ModuleNotFoundError:
            return None
        return found if hasattr(found, self.function) else None


def shared_counts(per_token: bool) -> tuple[SharedCount, ...]:
    """The counts in the losses that Megatron attaches.

    Args:
        per_token: losses are sums, which the end of backward divides.
    """
    return (
        SharedCount(
            "transformer.moe.router",
            "switch_load_balancing_loss_func",
            lambda given, result: given["tokens_per_expert"],
            "the balancing loss: the tokens of each expert",
        ),
        SharedCount(
            "models.gpt.gpt_model",
            "roll_tensor",
            lambda given, result: (
                result[1] if given["tensor"].is_floating_point() and not per_token else None
            ),
            "the loss of multi-token prediction: its number of tokens",
        ),
    )


@dataclass(frozen=True)
class Axes:
    """Groups of ranks that share the work of a model.

    Attributes:
        tensor: tensor parallel ranks.
        data: ranks with other samples.
        context: ranks with other parts of the sequence.
        expert: expert parallel ranks.
        expert_tensor: ranks that share an expert.
    """

    tensor: Any
    data: Any
    context: Any
    expert: Any
    expert_tensor: Any

    @classmethod
    def of_job(cls) -> Axes:
        """Those that Megatron has made."""
        from megatron.core import parallel_state

        return cls(
            tensor=parallel_state.get_tensor_model_parallel_group(),
            data=parallel_state.get_data_parallel_group(),
            context=parallel_state.get_context_parallel_group(),
            expert=parallel_state.get_expert_model_parallel_group(),
            expert_tensor=parallel_state.get_expert_tensor_parallel_group(),
        )


_FINALIZE = "_allreduce_non_tensor_model_parallel_grads"


def sums_over_tensor_ranks(model: torch.nn.Module, config: Any, group: Any) -> dict[str, Type]:
    """Parameters whose gradients are summed (``R``) or averaged (``I``) after backward, by name.

    By Megatron's finalizer, and by ours for adapters.
    """
    finalizer = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    finalize = getattr(finalizer, _FINALIZE, None) or finalizer._allreduce_layernorm_grads  # 0.12
    groups = (group,) if "tp_group" in inspect.signature(finalize).parameters else ()
    parameters = dict(model.named_parameters())
    names = list(parameters)
    found: dict[str, Type] = {}

    def record(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> None:
        kind = R if op == dist.ReduceOp.SUM else I
        found.update({names[int(number)]: kind for number in tensor.flatten().tolist()})

    chunk = SimpleNamespace(
        ddp_config=SimpleNamespace(use_megatron_fsdp=False, use_custom_fsdp=False),
        named_parameters=model.named_parameters,
        module=None,
    )
    journal = Journal()
    journal.set(dist, "all_reduce", record, owner="type-check")
    journal.set(finalizer, "get_attr_wrapped_model", getattr, owner="type-check")  # no wrappers
    try:
        with _tagged(parameters):
            finalize([chunk], config, *groups)
            sum_partial_gradients([model])
    finally:
        journal.undo()
    return found


@contextlib.contextmanager
def _tagged(parameters: dict[str, torch.nn.Parameter]) -> Iterator[None]:
    """The gradient of each parameter is its number."""
    before = [getattr(one, "main_grad", None) for one in parameters.values()]
    for number, parameter in enumerate(parameters.values()):
        parameter.main_grad = torch.full((1,), float(number))  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters.values(), before, strict=True):
            if gradient is None:
                del parameter.main_grad  # type: ignore[attr-defined]
            else:
                parameter.main_grad = gradient  # type: ignore[attr-defined]


def divided_loss(chunk: Any, output: Any, loss_function: Callable[..., Any]) -> Any:
    """The loss of the last stage, divided as Megatron's schedules divide it; a scalar."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    context_ranks = parallel_state.get_context_parallel_world_size()
    return schedules.forward_step_calc_loss(
        chunk, output, loss_function, chunk.config, None, False, 1, [], context_ranks, True
    )[0]
