"""Rules against numbers on two ranks: in every direction that a rule accepts, are they true?

A call is tried with all types of its inputs. Where the checker accepts them, its output has the
types that the rule says, and both sides of the adjoint identity are measured, for the derivative
along a direction that has the types of the inputs:

    sum over outputs of <derivative, cotangent>  =  sum over inputs of <direction, gradient>

type   value of the ranks         cotangent    pairing
R      equal                      P            <x, sum of the gradients>
I      equal                      I            <x, gradient>
V      a part each                V            sum over the ranks of <x, gradient>
P      a term of a sum each       R            <sum of the terms, gradient>
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import pkgutil
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

STEP, TOLERANCE = 1e-2, 2e-3
"""Of central differences: several functions compute in fp32."""
PAIRED = {"R": "P", "I": "I", "V": "V", "P": "R"}


@dataclass(frozen=True)
class Case:
    """A call of autograd functions on two ranks.

    Attributes:
        names: of the functions, ``module.name`` without ``mindspeed.`` or ``megatron.core.``.
        run: ``(group, *tensors)`` -> output, or a tuple of them.
        shapes: of the tensors, fp64.
        kinds: a type for each tensor, or a small letter for any: equal letters are equal types.
        frozen: indices of tensors without a gradient.
        within: what forward and backward run in.
        attached: of a loss, the last tensor, that enters the gradient and no output: its factor.
    """

    names: tuple[str, ...]
    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    kinds: str = ""
    frozen: tuple[int, ...] = ()
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    attached: float | None = None

    def directions(self) -> Iterator[tuple[str, ...]]:
        """All types of the tensors that are tried."""
        given = self.kinds or "abcdef"[: len(self.shapes)]
        free = sorted({one for one in given if one.islower()})
        for chosen in itertools.product("RIVP", repeat=len(free)):
            types = dict(zip(free, chosen, strict=True))
            yield tuple(types.get(one, one) for one in given)


CASES: list[Case] = []


def case(names: str, *shapes: tuple[int, ...], **more: Any) -> Any:
    """Add a call to the table."""

    def add(run: Callable[..., Any]) -> Callable[..., Any]:
        CASES.append(Case(tuple(names.split()), run, shapes, **more))
        return run

    return add


def function_of(name: str) -> Any:
    """The autograd function of a name."""
    module, _, function = name.rpartition(".")
    package = "megatron.core" if module.startswith(MEGATRON) else "mindspeed"
    return getattr(importlib.import_module(f"{package}.{module}"), function)


MEGATRON = ("tensor_parallel.mappings", "tensor_parallel.layers", "tensor_parallel.random",
            "tensor_parallel.cross_entropy", "fusions.", "transformer.", "utils")  # fmt: skip


def name_of(function: type) -> str:
    """The name of an autograd function in the table."""
    module = function.__module__.removeprefix("mindspeed.").removeprefix("megatron.core.")
    return f"{module}.{function.__name__}"


def _one(name: str, *rest: Any) -> None:
    """A function of one tensor, the group and more."""
    CASES.append(
        Case((name,), lambda group, x: function_of(name).apply(x, group, *rest), ((4, 8),))
    )


# Collectives.
for _name in ("_ReduceScatter", "_AllGather", "_AllReduce"):
    _one(f"te.comm.{_name}")
for _name in [
    "_CopyToModelParallelRegion",
    "_ReduceFromModelParallelRegion",
    "_ScatterToModelParallelRegion",
    "_GatherFromModelParallelRegion",
    "_ScatterToSequenceParallelRegion",
    "_ReduceScatterToSequenceParallelRegion",
    "_AllGatherFromTensorParallelRegion",
    "_ReduceScatterToTensorParallelRegion",
]:
    _one(f"tensor_parallel.mappings.{_name}")
for _sums in (True, False):
    _one("tensor_parallel.mappings._GatherFromSequenceParallelRegion", _sums)
_one("tensor_parallel.two_dimensional.grid._ToGrid")
_one("tensor_parallel.two_dimensional.grid._FromGrid")
_one("models.model_extras._LargestLogit")
_one("preference.answers._SumOverRanks")


@case("tensor_parallel.mappings._AllToAll", (4, 8))
def all_to_all(group, x):
    return function_of("tensor_parallel.mappings._AllToAll").apply(group, x, None, None)


UNEVEN = "adaptor.context_parallel.uneven_parts"


@case(f"{UNEVEN}._Split", (4, 4))
def part_of_a_whole(group, x):
    from mindspeed.adaptor.context_parallel.uneven_parts import split_forward_gather_backward

    return split_forward_gather_backward(x, group, 0, [2, 2], None)


@case(f"{UNEVEN}._Gather", (4, 4))
def whole_of_parts(group, x):
    from mindspeed.adaptor.context_parallel.uneven_parts import gather_forward_split_backward

    return gather_forward_split_backward(x, group, 0, None, None)


@case(f"{UNEVEN}._AllToAll", (4, 6))
def to_other_dimension(group, x):
    from mindspeed.adaptor.context_parallel.uneven_parts import all_to_all

    return all_to_all(x, group, scatter_dim=1, gather_dim=0)


def _target(rows: int, size: int) -> torch.Tensor:
    return (torch.arange(rows) * 5 % size)[:, None]


@case("tensor_parallel.cross_entropy._VocabParallelCrossEntropy", (4, 1, 3))
def megatron_loss(group, logits):
    function = function_of("tensor_parallel.cross_entropy._VocabParallelCrossEntropy")
    return function.apply(logits.clone(), _target(4, 6))


@case("te.cross_entropy._CrossEntropy", (4, 1, 3))
def own_loss(group, logits):
    from mindspeed.te.cross_entropy import _CrossEntropy

    return _CrossEntropy.apply(logits, _target(4, 6), 0.1, group, -100)


def _both_halves(collective: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(group, x):
        from mindspeed.moe.split_phase import Ticket, finish, start

        ticket = Ticket(collective(group))
        return finish(start(x, ticket), ticket)

    return run


def _moe(name: str, *more: Any) -> Callable[[Any], Any]:
    return lambda group: getattr(importlib.import_module("mindspeed.moe.collectives"), name)(
        group, *more
    )


HALVES = {
    "AllToAll": _moe("AllToAll", [2, 2], [2, 2]),
    "GatherRows": _moe("GatherRows", [4, 4]),
    "SumRows": _moe("SumRows", [2, 2]),
    "Gather": _moe("Gather"),
    "ReduceScatter": _moe("ReduceScatter"),
}
"""Collectives of two halves: class in ``moe.collectives`` -> one of a group."""

for _make in HALVES.values():
    CASES.append(
        Case(("moe.split_phase._Start", "moe.split_phase._Finish"), _both_halves(_make), ((4, 8),))
    )


# Products: what a layer communicates is hidden in its arguments.
def _linear(mode: str, split: bool, bias: bool, **more: Any) -> None:
    shapes: tuple[tuple[int, ...], ...] = ((4, 1, 6), (3, 6)) + (((3,),) if bias else ())

    def run(group, x, weight, bias=None):
        from mindspeed.te.linear_communication import LinearCommunication
        from mindspeed.te.linear_function import linear

        weight.partition_dim = int(mode == "row")
        return linear(x, weight, bias, LinearCommunication(group, mode, split))

    CASES.append(Case(("te.linear_function._Linear",), run, shapes, **more))


def _adapted(mode: str, split: bool) -> None:
    def run(group, x, weight, a, b):
        from mindspeed.lora.adapted_linear import _Adapted
        from mindspeed.te.linear_communication import LinearCommunication

        weight.partition_dim = int(mode == "row")
        layer = LinearCommunication(group, mode, split)
        return _Adapted.apply(x, weight, None, a, b, None, 0.5, layer)

    shapes = ((4, 1, 6), (3, 6), (2, 6), (3, 2))
    CASES.append(Case(("lora.adapted_linear._Adapted",), run, shapes, "aVbc", frozen=(1,)))


@contextmanager
def _overlapped() -> Iterator[None]:
    """CoC: parts of a product run beside parts of its collective."""
    from mindspeed.te import kernels
    from mindspeed.tensor_parallel.products import OverlappedProducts
    from mindspeed.tensor_parallel.strategy import Overlap

    overlap = Overlap(parts=2, column_backward=True)
    plain = {name: getattr(kernels, name) for name in overlap.operations}
    with pytest.MonkeyPatch.context() as patch:
        for name, product in OverlappedProducts(overlap, plain).kernels().items():
            patch.setattr(kernels, name, product)
        yield


for _mode, _split in itertools.product(("column", "row"), (False, True)):
    _linear(_mode, _split, bias=False)
    _linear(_mode, _split, bias=False, within=_overlapped)
    _adapted(_mode, _split)
_linear("column", True, bias=True)
_linear("row", False, bias=True)
_linear("row", True, bias=True)


@dataclass
class _Sublayer:
    """A column- and a row-parallel product, without a norm."""

    group: Any
    split: bool
    parameters: list[Any]
    norm_parameters: tuple[Any, ...] = ()

    def enter(self, hidden: Any) -> Any:
        return hidden

    def run(self, x: Any, half: int) -> Any:
        from mindspeed.te.linear_communication import LinearCommunication
        from mindspeed.te.linear_function import linear
        from mindspeed.tensor_parallel.exchange import at_row_input

        first, second = self.parameters
        y = linear(x, first, None, LinearCommunication(self.group, "column", self.split))
        (y,) = at_row_input(None, (y,)) or (y,)
        return linear(y, second, None, LinearCommunication(self.group, "row", self.split)), None

    def leave(self, output: Any, bias: Any, hidden: Any, half: int) -> Any:
        return output + hidden


def _in_halves(split: bool) -> None:
    def run(group, x, first, second):
        from spmd_types.checker import no_typecheck

        from mindspeed.te.comm import all_gather_first_dim
        from mindspeed.tensor_parallel.halves.order import ALL_REDUCE, SEQUENCE_PARALLEL
        from mindspeed.tensor_parallel.halves.stream import HalvesStream

        first.partition_dim, second.partition_dim = 0, 1

        def gather(shard):  # for the column layer, whose rule says that it gathers
            with no_typecheck():
                return all_gather_first_dim(shard, group, async_op=True)

        order = SEQUENCE_PARALLEL if split else ALL_REDUCE
        stream = HalvesStream(x, order, gather if split else None)
        return stream.run(x, [_Sublayer(group, split, [first, second])], None)

    shapes = ((4, 3, 6), (3, 6), (6, 3))
    CASES.append(Case(("tensor_parallel.halves.stream._Backward",), run, shapes, "aVV"))


for _split in (False, True):
    _in_halves(_split)


def _megatron_linear(split: bool, sums: bool) -> None:
    def run(group, x, weight):
        weight.partition_dim = 0
        function = function_of(name)
        return function.apply(x, weight, None, False, sums, split, None, None, group)

    name = "tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication"
    CASES.append(Case((name,), run, ((4, 1, 6), (3, 6))))


for _split, _sums in ((False, False), (False, True), (True, False)):
    _megatron_linear(_split, _sums)


@case("tensor_parallel.layers.LinearWithFrozenWeight", (4, 1, 6), (3, 6), frozen=(1,))
def frozen(group, x, weight):
    weight.partition_dim = 0
    return function_of("tensor_parallel.layers.LinearWithFrozenWeight").apply(
        x, weight, None, True, group
    )


def _grid(first: bool) -> Callable[..., Any]:
    """Both groups of a grid have one rank but one of them."""

    def run(group, x, weight):
        from mindspeed.adaptor.grid_layers import linear_products
        from mindspeed.tensor_parallel.two_dimensional.linear import GridCommunication, linear

        alone = _alone()
        groups = (group, alone) if first else (alone, group)
        return linear(x, weight, None, GridCommunication(*groups), linear_products(False))

    return run


@functools.cache
def _alone() -> Any:
    import torch.distributed as dist

    return next(
        one
        for one in [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        if one is not dist.GroupMember.NON_GROUP_MEMBER
    )


for _first in (True, False):
    CASES.append(
        Case(
            ("tensor_parallel.two_dimensional.linear._Linear",), _grid(_first), ((4, 1, 6), (3, 6))
        )
    )


def _grid_norm(rms: bool) -> None:
    def run(group, x, weight, bias=None):
        from mindspeed.tensor_parallel.two_dimensional.norm import norm

        return norm(x, weight, bias, eps=1e-5, group=group, rms=rms)

    shapes = ((4, 1, 6), (6,)) + (() if rms else ((6,),))
    CASES.append(Case(("tensor_parallel.two_dimensional.norm._Norm",), run, shapes))


_grid_norm(rms=True)
_grid_norm(rms=False)


# Attention: the sequence is sharded.
@case("attention.context_parallel._Attention", (4, 2, 4), (4, 2, 4), (4, 2, 4), (2,), kinds="abbc")
def ring_attention(group, q, k, v, sink):
    from mindspeed.attention import Mask, context_parallel_attention, planners, zigzag

    plan = planners.ring(Mask.documents((0, 8)), zigzag(8, 2))
    return context_parallel_attention(q, k, v, plan, group, sink=sink)


@case("attention.context_parallel._Attention", (8, 2, 4), (8, 2, 4), (8, 2, 4), kinds="abb")
def attention_of_one_rank(group, q, k, v):
    from mindspeed.attention import Mask, context_parallel_attention, contiguous, planners

    plan = planners.ring(Mask.documents((0, 8)), contiguous(8, 1))
    return context_parallel_attention(q, k, v, plan, group)


def _heads(group: Any) -> Any:
    from mindspeed.attention import HeadAllToAll, contiguous

    return HeadAllToAll(contiguous(8, 2), group.rank(), group)


@case("attention.ulysses_all_to_all._ToHeads", (4, 2, 4), (4, 1, 4), (4, 1, 4), kinds="aab")
@case("attention.ulysses_all_to_all._ToHeads", (4, 2, 4), (4, 2, 4), (4, 2, 4), kinds="aab")
def to_heads(group, q, k, v):
    return _heads(group).to_heads(q, k, v)


@case("attention.ulysses_all_to_all._ToSequence", (8, 1, 4))
def to_sequence(group, out):
    return function_of("attention.ulysses_all_to_all._ToSequence").apply(_heads(group), out, 2)


@case("adaptor.repairs.attention.latent_key_gradient._SumOfKeyGradients", (4, 1, 6))
def latent_and_key(group, x):
    name = "adaptor.repairs.attention.latent_key_gradient._SumOfKeyGradients"
    return torch.split(function_of(name).apply(x, [4, 2], group), [4, 2], dim=-1)


# What a rank computes by itself.
def _local(
    name: str, *shapes: tuple[int, ...], rest: tuple[Any, ...] = (), before: Any = ()
) -> None:
    CASES.append(
        Case((name,), lambda group, *xs: function_of(name).apply(*before, *xs, *rest), shapes)
    )


_fusions = "fusions.fused_bias_"
_local(f"{_fusions}swiglu.BiasSwiGLUFunction", (4, 8), (8,), rest=(False, False))
_local(f"{_fusions}swiglu.SwiGLUFunction", (4, 8), rest=(False, False))
_local(f"{_fusions}swiglu.WeightedSwiGLUFunction", (4, 8), (4, 1), rest=(False,))
_local(f"{_fusions}geglu.BiasGeGLUFunction", (4, 8), (8,))
_local(f"{_fusions}geglu.GeGLUFunction", (4, 8))
_local("fusions.fused_weighted_squared_relu.WeightedSquaredReLUFunction", (4, 8), (4, 1))
_local(f"{_fusions}gelu.GeLUFunction", (4, 8), (8,))


@case(f"{_fusions}geglu.WeightedQuickGeGLUFunction", (4, 8), (4, 1))
def weighted_quick_geglu(group, x, weights):
    name = f"{_fusions}geglu.WeightedQuickGeGLUFunction"
    return function_of(name).apply(x, weights, False, torch.zeros(()))


@case(f"{_fusions}geglu.WeightedBiasQuickGeGLUFunction", (4, 8), (8,), (4, 1))
def weighted_bias_quick_geglu(group, x, bias, weights):
    name = f"{_fusions}geglu.WeightedBiasQuickGeGLUFunction"
    return function_of(name).apply(x, bias, weights, False, torch.zeros(()))


@case("ops.compat.gmm._IntoMainGrad", (4, 6), (2, 6, 3), frozen=(1,))
def into_main_grad(group, x, weight):
    name = "ops.compat.gmm._IntoMainGrad"
    return function_of(name).apply(x, weight, torch.tensor([1, 4]), [weight])


@case("tensor_parallel.random.CheckpointFunction", (4, 8))
def recomputed(group, x):
    from megatron.core.tensor_parallel import checkpoint

    return checkpoint(torch.exp, False, x)


_local("utils.MakeViewlessTensor", (4, 8), rest=(True,))
_local(
    "transformer.moe.moe_utils.RouterGatingLinearFunction",
    (4, 8), (6, 8), rest=(None, torch.float64),
)  # fmt: skip
_local("te.kernels._SumRows", (4, 8), rest=(torch.tensor([1, 0, 1, 2]), (3, 8)))


@case("te.grouped._GroupedLinear", (4, 6), (3, 6), (3, 6), (3,), (3,), kinds="abbcc")
def grouped_linear(group, x, *parameters):
    from mindspeed.te.grouped import _GroupedLinear
    from mindspeed.te.weight_gradient import WgradOptions

    return _GroupedLinear.apply(
        x, [1, 3], x.dtype, WgradOptions(False), (), 2, None, False, *parameters
    )


@case("te.grouped._GroupedLinear", (4, 6), (3, 6), (3, 6), kinds="abb")
def sliced_grouped_linear(group, x, *weights):
    """Of two slices of an expert, row layers: each has a term of the product."""
    for weight in weights:
        weight.routed_expert, weight.partition_dim = True, 1
    return grouped_linear_without_bias(group, x, *weights)


@case("te.grouped._GroupedLinear", (4, 6), (3, 6), (3, 6), kinds="abb")
def grouped_linear_without_bias(group, x, *weights):
    from mindspeed.te.grouped import _GroupedLinear
    from mindspeed.te.weight_gradient import WgradOptions

    return _GroupedLinear.apply(
        x, [1, 3], x.dtype, WgradOptions(False), (), 2, None, False, *weights
    )


@case("te.grouped_gemm._GroupedMatmul", (4, 6), (2, 6, 3))
def grouped_matmul(group, x, weight):
    from mindspeed.te.grouped_gemm import gmm

    return gmm(x, weight, torch.tensor([1, 3]))


@case("te.grouped_gemm._GroupedMatmul", (4, 6), (2, 6, 3))
def sliced_grouped_matmul(group, x, weight):
    weight.routed_expert, weight.partition_dim = True, 0
    return grouped_matmul(group, x, weight)


@case("moe.hot_experts._OwnWeights", (2, 3), (2, 3), (3, 2), (3, 2), kinds="aaaa")
def own_weights(group, *weights):
    return function_of("moe.hot_experts._OwnWeights").apply([1], False, *weights)


@case("moe.dispatch.padded._SelectRows", (3, 8))
def select_rows(group, x):
    index, inverse = torch.tensor([[1, 0], [2, -1]]), torch.tensor([[0], [0], [1]])
    return function_of("moe.dispatch.padded._SelectRows").apply(x, index, inverse)


@case("moe.packing._Pack moe.packing._Unpack", (4, 8), (4,))
def packed(group, rows, probs):
    from mindspeed.moe.packing import Packing

    packing = Packing.of(rows, probs)
    return packing.unpack(packing.pack(packing.widen(rows), probs))


# Functions that only order passes.
@case("moe.ampipe.rows._First moe.ampipe.rows._Collect", (4, 8))
def prefixes(group, x):
    from mindspeed.moe.ampipe.rows import Prefixes

    rows = Prefixes(x)
    return rows.first(2), rows.first(3)


@case("moe.anchor._Place moe.anchor._Join", (4, 8), (6, 8))
def anchored(group, x, weight):
    from mindspeed.moe.anchor import Anchor

    anchor = Anchor()
    return anchor.join(x, anchor.place([weight]))


@case("moe.events._Mark", (4, 8))
def marked(group, x):
    from mindspeed.moe.events import EventLog, mark

    return mark(x, EventLog(), "", 0)


@case("moe.save.refetch._Tie", (4, 8))
def tied(group, x):
    from mindspeed.moe.save.refetch import Refetch

    return Refetch([], x).tie(x, x)


SCALE = 0.5


@case("transformer.moe.moe_utils.MoEAuxLossAutoScaler", (4, 8), (1,), attached=SCALE)
def attached_balancing_loss(group, x, loss):
    function = function_of("transformer.moe.moe_utils.MoEAuxLossAutoScaler")
    function.main_loss_backward_scale = torch.tensor(SCALE)
    return function.apply(x, loss)


@case("transformer.multi_token_prediction.MTPLossAutoScaler", (4, 8), (4, 1), attached=SCALE)
def attached_prediction_loss(group, x, loss):
    function = function_of("transformer.multi_token_prediction.MTPLossAutoScaler")
    function.main_loss_backward_scale = torch.tensor(SCALE)
    return function.apply(x, loss)


_HELD = "returns an empty tensor, whose backward is never asked for"
NOT_MEASURED = {
    "compare.forced.Replace": "it has no rule: values of another run take the place of this one's",
    "memory.saved._Hold": _HELD,
    "planner.count.bare._Passed": "it has no rule: it stands for a layer in a plan",
} | dict.fromkeys(
    (
        "fusions.fused_softmax.ScaledUpperTriangMaskedSoftmax",
        "fusions.fused_softmax.ScaledMaskedSoftmax",
        "fusions.fused_softmax.ScaledSoftmax",
    ),
    "kernels of a CUDA extension",
)
"""Function with a rule -> why no call of it is measured."""


def case_names() -> list[str]:
    """A name for each case: its function, numbered."""
    names = [one.names[0].rpartition(".")[2].lstrip("_") for one in CASES]
    return [f"{name}-{names[:i].count(name)}" for i, name in enumerate(names)]


@dataclass(frozen=True)
class Direction:
    """A call with types that the checker accepts.

    Attributes:
        types: of the inputs, as letters.
        left: the pairing of the outputs.
        right: that of the inputs.
        typed: the outputs have the types that the rule says, and so have the gradients.
        ran: the functions of the case are in the graph of the outputs.
    """

    types: str
    left: float
    right: float
    typed: bool
    ran: bool

    @property
    def true(self) -> bool:
        """What the rule says of the types is so."""
        return self.typed and self.left == pytest.approx(self.right, rel=TOLERANCE, abs=TOLERANCE)


@dataclass(frozen=True)
class Measured:
    """What one of two ranks has found.

    Attributes:
        cases: all accepted directions of each case, or the error of its call.
        hidden: for each of :data:`tests.type_check.faults.HIDDEN`, whether a direction of its
            function is no longer true.
        functions: on the first rank, all autograd functions of the library and those of Megatron
            that have a rule.
        without_rule: on the first rank, those of the library that have none.
    """

    cases: list[list[Direction] | str]
    hidden: list[bool]
    functions: set[str]
    without_rule: set[str]


def measured() -> Measured:
    """Measure everything, once for a process; for two ranks."""
    from megatron.core import parallel_state
    from spmd_types import MeshAxis

    import mindspeed.megatron_adaptor  # noqa: F401  (Megatron asks for the CUDA device)
    from mindspeed.journal import Journal
    from mindspeed.spmd import rule_of
    from mindspeed.type_check import megatron, rules
    from tests.type_check import faults, planted

    parallel_state.initialize_model_parallel(2, create_gloo_process_groups=False)
    group = parallel_state.get_tensor_model_parallel_group()
    for one in CASES:  # ranks must know the same rules
        for name in one.names:
            function_of(name)
    if group.rank() == 0:
        import_all()
    journal = Journal()
    rules.install(journal)
    world = _World(group, MeshAxis.of(group))
    found = [_tried(one, world) for one in CASES]
    hidden = []
    planted.remember()
    for fault in faults.HIDDEN:
        chosen = [one for one in CASES if fault.function in one.names]
        with fault.planted():
            tried = [_tried(one, world) for one in chosen]
        hidden.append(any(not each.true for one in tried if isinstance(one, list) for each in one))
    journal.undo()
    parallel_state.destroy_model_parallel()
    own = {one for one in _subclasses() if one.__module__.startswith("mindspeed.")}
    without = {name_of(one) for one in own if rule_of(one) is None}
    functions = {name_of(one) for one in {*own, *megatron.rules()}}
    return Measured(found, hidden, functions, without)


def import_all() -> None:
    """Import every module of the library that this machine can import."""
    import mindspeed

    for module in pkgutil.walk_packages(mindspeed.__path__, "mindspeed."):
        if not any(part in module.name for part in ("__main__", ".triton")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


def _subclasses() -> list[type]:
    found = torch.autograd.Function.__subclasses__()
    return [one for one in found if "triton" not in one.__module__]


@dataclass(frozen=True)
class _World:
    group: Any
    axis: Any


def _tried(one: Case, world: _World) -> list[Direction] | str:
    try:
        with one.within():
            tried = [_direction(one, world, each) for each in one.directions()]
    except Exception:
        return traceback.format_exc()
    return [each for each in tried if each is not None]


def _direction(one: Case, world: _World, kinds: tuple[str, ...]) -> Direction | None:
    import spmd_types
    from spmd_types import SpmdTypeError
    from spmd_types.checker import typecheck

    from mindspeed.spmd import Type
    from mindspeed.type_check.tensor_types import give, types_of

    group, axis = world.group, world.axis
    numbered = list(enumerate(zip(kinds, one.shapes, strict=True)))
    values = [_value(kind, shape, 10 + i) for i, (kind, shape) in numbered]
    steps = [_value(kind, shape, 20 + i) for i, (kind, shape) in numbered]
    for i in one.frozen:
        steps[i].zero_()
    inputs = [x.clone().requires_grad_(i not in one.frozen) for i, x in enumerate(values)]
    try:
        with spmd_types.set_current_mesh({"ranks": axis}), typecheck("strict", local=True):
            for x, kind in zip(inputs, kinds, strict=True):
                give(x, {axis: Type[kind]})
            outs = _all(one.run(group, *(x * 1.0 for x in inputs)))
            results = [types_of(out)[axis].name for out in outs]
    except SpmdTypeError:
        return None
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    outs = _all(one.run(group, *(x * 1.0 for x in inputs)))
    cotangents = [
        _value(PAIRED[kind], out.shape, 30 + i)
        for i, (kind, out) in enumerate(zip(results, outs, strict=True))
    ]
    given = [c.clone().to(o.dtype) for c, o in zip(cotangents, outs, strict=True)]
    torch.autograd.backward(outs, given)  # which may reduce them in place
    ends = []
    for sign in (1, -1):
        moved = [x + sign * STEP * step for x, step in zip(values, steps, strict=True)]
        ends.append([out.detach().double() for out in _all(one.run(group, *moved))])
    slopes = [(a - b) / (2 * STEP) for a, b in zip(*ends, strict=True)]
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
    left = sum(map(_pair, results, slopes, cotangents))
    if one.attached is not None:
        left += one.attached * _total(kinds[-1], steps[-1])
    right = sum(map(_pair, kinds, steps, gradients))
    typed = all(map(_is, results, [out.detach() for out in outs]))
    typed &= all(map(_is, [PAIRED[kind] for kind in kinds], gradients))
    ran = {function_of(name) for name in one.names} <= _functions(outs)
    return Direction("".join(kinds), float(left), float(right), typed, ran)


def _all(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else list(out)


def _functions(outs: list[torch.Tensor]) -> set[type]:
    """The autograd functions in the graph of tensors."""
    found: set[type] = set()
    seen, waiting = set(), [out.grad_fn for out in outs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.add(getattr(node, "_forward_cls", type(node)))
        waiting += [following for following, _ in node.next_functions]
    return found


def _value(kind: str, shape: Any, seed: int) -> torch.Tensor:
    """A value of a type: equal on the ranks, or not."""
    import torch.distributed as dist

    rank = 0 if kind in ("R", "I") else 1 + dist.get_rank()
    random = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(tuple(shape), dtype=torch.float64, generator=random)


def _pair(kind: str, x: torch.Tensor, gradient: torch.Tensor) -> float:
    import torch.distributed as dist

    x, gradient = x.clone().double(), gradient.clone().double()
    if kind in ("R", "P"):
        dist.all_reduce(gradient if kind == "R" else x)
    found = (x * gradient).sum()
    if kind == "V":
        dist.all_reduce(found)
    return float(found)


def _total(kind: str, x: torch.Tensor) -> float:
    """The sum of a value's elements, over the ranks that hold parts or terms of it."""
    import torch.distributed as dist

    found = x.sum()
    if kind in ("V", "P"):
        dist.all_reduce(found)
    return float(found)


def _is(kind: str, x: torch.Tensor) -> bool:
    import torch.distributed as dist

    ranks = [torch.empty_like(x).contiguous() for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, x.contiguous())
    return kind in ("V", "P") or all(torch.equal(ranks[0], one) for one in ranks)
