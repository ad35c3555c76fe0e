"""Rules of Megatron's autograd functions, and what its finalizer does to gradients.

Megatron stays as it is: the rules are attached to its classes. A parameter's type follows from
what happens to its gradient, not from a copy of Megatron's conditions: each gradient is set to the
number of its parameter, the real finalizer runs with a recorded all-reduce, and what arrives there
is summed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mindspeed.journal import Journal
from mindspeed.lora.linear import sum_partial_gradients
from mindspeed.spmd import (
    Arguments,
    Collective,
    Communication,
    I,
    Local,
    P,
    Passes,
    Product,
    R,
    Recomputed,
    Rule,
    Type,
    V,
)


def rules() -> dict[type, Rule]:
    """The rule of each autograd function of Megatron that a training uses."""
    from megatron.core import parallel_state, utils
    from megatron.core.fusions import (
        fused_bias_geglu,
        fused_bias_gelu,
        fused_bias_swiglu,
        fused_softmax,
        fused_weighted_squared_relu,
    )
    from megatron.core.tensor_parallel import cross_entropy, layers, mappings, random
    from megatron.core.transformer import multi_token_prediction
    from megatron.core.transformer.moe import moe_utils

    found: dict[type, Rule] = {
        mappings._CopyToModelParallelRegion: Collective(I, R),
        mappings._ReduceFromModelParallelRegion: Collective(P, I, sums=True),
        # Their backward splits and gathers: the gradient is the whole on every rank.
        mappings._ScatterToModelParallelRegion: Collective(I, V),
        mappings._GatherFromModelParallelRegion: Collective(V, I),
        mappings._ScatterToSequenceParallelRegion: Collective(I, V),
        mappings._GatherFromSequenceParallelRegion: Collective(V, _gathered),
        mappings._ReduceScatterToSequenceParallelRegion: Collective(P, V, sums=True),
        mappings._AllGatherFromTensorParallelRegion: Collective(V, R),
        mappings._ReduceScatterToTensorParallelRegion: Collective(P, V, sums=True),
        mappings._AllToAll: Collective(V, V, tensor="input"),
        cross_entropy._VocabParallelCrossEntropy: Collective(
            V, I, group=lambda given: parallel_state.get_tensor_model_parallel_group()
        ),
        random.CheckpointFunction: Recomputed(others=1),
        utils.MakeViewlessTensor: Local(),
        moe_utils.RouterGatingLinearFunction: Local(),
        moe_utils.MoEAuxLossAutoScaler: Passes(),
        multi_token_prediction.MTPLossAutoScaler: Passes(),
    }
    for function in (
        layers.LinearWithGradAccumulationAndAsyncCommunication,
        layers.LinearWithFrozenWeight,
    ):
        found[function] = Product(_communication, x="input")
    for module, names in {
        fused_bias_swiglu: "BiasSwiGLUFunction SwiGLUFunction WeightedSwiGLUFunction",
        fused_bias_gelu: "GeLUFunction",
        fused_bias_geglu: "BiasGeGLUFunction GeGLUFunction WeightedQuickGeGLUFunction "
        "WeightedBiasQuickGeGLUFunction",
        fused_weighted_squared_relu: "WeightedSquaredReLUFunction",
        fused_softmax: "ScaledUpperTriangMaskedSoftmax ScaledMaskedSoftmax ScaledSoftmax",
    }.items():
        found |= {getattr(module, name): Local() for name in names.split()}
    return found


def _gathered(given: Arguments) -> Type:
    """Backward of the gathered sequence sums over the ranks, or only splits."""
    return R if given["tensor_parallel_output_grad"] else I


def _communication(given: Arguments) -> Communication:
    from megatron.core import parallel_state

    if getattr(given["weight"], "routed_expert", False):  # its layers do not pass their group on
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = given["tp_group"] or parallel_state.get_tensor_model_parallel_group()
    return Communication(
        group,
        gathers=given.get("sequence_parallel", False),
        sums_gradient=given.get("allreduce_dgrad", False),
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


def sums_over_tensor_ranks(model: torch.nn.Module, config: Any, group: Any) -> dict[str, Type]:
    """Parameters whose gradients are summed (``R``) or averaged (``I``) after backward, by name.

    By Megatron's finalizer, and by ours for adapters.
    """
    finalizer = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    parameters = dict(model.named_parameters())
    names = list(parameters)
    found: dict[str, Type] = {}

    def record(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> None:
        kind = R if op == dist.ReduceOp.SUM else I
        found.update({names[int(number)]: kind for number in tensor.flatten().tolist()})

    chunk = SimpleNamespace(
        ddp_config=SimpleNamespace(use_megatron_fsdp=False),
        named_parameters=model.named_parameters,
        module=None,
    )
    journal = Journal()
    journal.set(dist, "all_reduce", record, owner="type-check")
    journal.set(finalizer, "get_attr_wrapped_model", getattr, owner="type-check")  # no wrappers
    try:
        with _tagged(parameters):
            finalizer._allreduce_non_tensor_model_parallel_grads([chunk], config, group)
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
