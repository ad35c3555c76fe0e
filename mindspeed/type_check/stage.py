"""One pipeline stage of a job: built as the job builds it, typed, run forward once.

In a process without accelerators and other ranks: torch's fake process groups of the job's size,
FakeTensors, real code of Megatron. The types of the parameters are those of :mod:`.chunk`; those of
the batch and of received activations are what the layout says. The first use of a tensor that does
not fit is the result. Code that needs the values of tensors gets real ones, of short samples, and
weights that take no memory until somebody writes to them.
"""

from __future__ import annotations

import argparse
import inspect
import traceback
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import spmd_types
import torch
from spmd_types import MeshAxis, SpmdTypeError
from spmd_types.checker import typecheck
from torch.utils._python_dispatch import TorchDispatchMode

from mindspeed.built_model import BuiltModel
from mindspeed.errors import ConfigError
from mindspeed.flags import changed, read
from mindspeed.job import Batch, MixtureOfExperts, Parallel
from mindspeed.journal import Journal
from mindspeed.planner.count.balanced_routing import (
    Balance,
    assumed_routing,
    balanced_routing,
    logits_of,
)
from mindspeed.planner.count.fake_world import fake_world
from mindspeed.planner.count.loop import TrainerLoop, loop_of, readers_of
from mindspeed.planner.count.planned_tensors import PlannedTensors
from mindspeed.preference.options import PreferenceOptions
from mindspeed.processes import no_collection
from mindspeed.spmd import I, R, Type, V
from mindspeed.tensor_parallel.two_dimensional.grid import Grid
from mindspeed.training.options import DataOptions
from mindspeed.type_check import megatron, rules
from mindspeed.type_check.chunk import (
    Mesh,
    WrongUse,
    as_term,
    check_loss,
    give_types,
    mesh_of_job,
    wrong_use,
)
from mindspeed.type_check.equal_parts import equal_layers_run_once
from mindspeed.type_check.tensor_types import WrongType, give, types_of


@dataclass(frozen=True)
class StageResult:
    """What was found in a pipeline stage.

    Attributes:
        stage: its number.
        parameters: of each chunk, how many have each type on the tensor-parallel ranks.
        wrong: the first wrong use; None if every gradient is summed as it must be.
    """

    stage: int
    parameters: tuple[dict[Type, int], ...]
    wrong: WrongUse | None


class ProvidedModel(TrainerLoop):
    """The loop of a framework: its model, our groups and forward step.

    Args:
        model_provider: of :func:`mindspeed.type_check.check_model`.
    """

    def __init__(self, model_provider: Callable[..., torch.nn.Module]) -> None:
        self._provider = model_provider

    def build(self, args: argparse.Namespace) -> BuiltModel:  # type: ignore[override]
        """The chunks of this rank in the precision of the job, without optimizer."""
        from megatron.core import parallel_state

        chunks = []
        for vp_stage in Parallel.of(args).vp_stages:
            where: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
            given = {} if vp_stage is None else {"vp_stage": vp_stage}
            chunk = self._provider(
                pre_process=parallel_state.is_pipeline_first_stage(**where),
                post_process=parallel_state.is_pipeline_last_stage(**where),
                **given,
            )
            config: Any = chunk.config
            chunks.append(chunk.to(config.params_dtype))
        return BuiltModel(chunks[0].config, chunks)  # type: ignore[arg-type]


def import_ahead(args: argparse.Namespace) -> None:
    """Import and compute what every stage needs, before their processes are forked.

    Args:
        args: final values, of a dry run.
    """
    with no_collection():
        import torch._dynamo  # noqa: F401  (FakeTensorMode does)

        import mindspeed.training.forward_step
        import mindspeed.training.model
        import mindspeed.training.setup  # noqa: F401

    _routing(args)


def _routing(args: argparse.Namespace) -> list[torch.Tensor]:
    """What routers are given where tensors have no values, computed once."""
    if not MixtureOfExperts.of(args).count:
        return []
    return [logits_of(Balance.of(args), _tokens(args) * Batch.of(args).micro)]


def _tokens(args: argparse.Namespace) -> int:
    """Tokens of a sample that a rank has between the layers."""
    parallel = Parallel.of(args)
    return _length(args) // parallel.context // parallel.sequence


def _length(args: argparse.Namespace) -> int:
    """Tokens of a sample."""
    length = read(DataOptions, args).seq_length
    assert length is not None
    return length


class Unwritten(TorchDispatchMode):
    """Large tensors that are made inside keep the zeros of fresh memory, which take no place."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        tensor, options = args[0] if args else None, kwargs or {}
        if isinstance(tensor, torch.Tensor) and tensor.numel() > _LARGE:
            if func._schema.name.removeprefix("aten::") in _FILLS:
                return tensor
            if func in (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default):
                return torch.empty_like(tensor, dtype=options.get("dtype"))
        return func(*args, **options)


_LARGE = 2**16
_FILLS = ["normal_", "uniform_", "zero_", "fill_", "copy_", "add_", "mul_", "clamp_", "erfinv_"]
_SHORT = 64
"""Tokens of a sample that has values."""


def shortened(args: argparse.Namespace) -> argparse.Namespace:
    """The job with samples as short as its ranks can share them.

    Args:
        args: final values, of a dry run.
    """
    parallel = Parallel.of(args)
    shared = 2 * parallel.context * parallel.tensor
    length = -(-_SHORT // shared) * shared
    given = _length(args)
    if given % shared == 0 and length < given:
        return changed(args, seq_length=length)
    return args


def check_stage(
    args: argparse.Namespace, stage: int, chunks: Sequence[int], *, with_values: bool = False
) -> StageResult:
    """Check chunks of a pipeline stage.

    Args:
        args: final values, of a dry run; this process is not part of a job.
        stage: number of the pipeline rank.
        chunks: their numbers on this rank.
        with_values: run on real tensors, of a job that is :func:`shortened`.

    Raises:
        MindSpeedError: the model cannot be built or run; says which package a layer needs.
    """
    rank = Parallel.of(args).first_rank_of(stage)
    journal = Journal()
    tensors, building = (nullcontext, Unwritten) if with_values else (PlannedTensors, nullcontext)
    routing = balanced_routing if with_values else assumed_routing
    with fake_world(args, rank) as args, tensors(), routing(args):
        try:
            with building():
                model = build_model(args)
                pairs = pairs_of(args, model)
        except ImportError as error:
            reason, _, _ = str(error).partition(" when instantiating ")
            raise ConfigError(f"the check builds the model, which it cannot: {reason}") from error
        rules.install(journal)
        rules.check_shared_counts(journal, model.config.calculate_per_token_loss)
        mesh = mesh_of_job(_grid_of(model))
        try:
            with spmd_types.set_current_mesh(mesh.axes):
                return _check(args, model, pairs, mesh, stage, chunks)
        finally:
            journal.undo()


def build_model(args: argparse.Namespace) -> BuiltModel:
    """Build the chunks of this rank; those of the trainer without optimizer.

    Args:
        args: final values, of a dry run; this process is a rank of the job.
    """
    loop = loop_of(args)
    if type(loop) is not TrainerLoop:
        return loop.build(args)
    from mindspeed.lora.flags import attach_by_flags
    from mindspeed.training.configs import transformer_config
    from mindspeed.training.model import build_modules, gpt_model

    config = transformer_config(args)
    modules = build_modules(args, config, gpt_model)
    attach_by_flags(modules, args)
    return BuiltModel(config, modules)


def pairs_of(args: argparse.Namespace, model: BuiltModel) -> Any:
    """The forward step of a job that trains on pairs of answers; None for the next token."""
    objective = read(PreferenceOptions, args).objective
    if type(loop_of(args)) is not TrainerLoop or objective == "next_token":
        return None
    from mindspeed.training.model import gpt_model
    from mindspeed.training.preference import step_of

    return step_of(args, model.modules, gpt_model, read_weights=False)


def _grid_of(model: Any) -> list[Any]:
    """The groups of 2D tensor parallelism; empty without."""
    modules = (module for chunk in model.modules for module in chunk.modules())
    grids = (vars(module).get("grid") for module in modules)
    return next(([one.x, one.y] for one in grids if isinstance(one, Grid)), [])


def _check(
    args: argparse.Namespace, model: Any, pairs: Any, mesh: Mesh, stage: int, chunks: Sequence[int]
) -> StageResult:
    found = []
    ran: set[Hashable] = set()
    for logits in _routing(args):
        give(logits, mesh.types(R, R))
    readers: list[Any] = list(readers_of(args, model.config))
    for number in chunks:
        chunk, reader = model.modules[number], readers[number]
        if pairs is not None and reader is not None:
            reader = _TypedPairs(reader, mesh)
        frozen = [one for one in chunk.parameters() if not one.requires_grad]
        found.append(give_types(chunk, model.config, mesh))
        try:
            _run(args, chunk, reader, mesh, ran, pairs)
            if frozen:  # the checker exempts them: what they would be if they were trained
                for parameter in frozen:
                    parameter.requires_grad_(True)
                give_types(chunk, model.config, mesh)
                _run(args, chunk, reader, mesh, ran, pairs)
        except SpmdTypeError as error:
            return StageResult(stage, tuple(found), wrong_use(stage, mesh, error))
    return StageResult(stage, tuple(found), None)


def _run(
    args: argparse.Namespace,
    chunk: Any,
    reader: Any,
    mesh: Mesh,
    ran: set[Hashable],
    pairs: Any,
) -> None:
    """Forward and loss of one micro-batch.

    Raises:
        SpmdTypeError: at the first wrong use.
    """
    hidden = mesh.types(V if chunk.config.sequence_parallel else I, V)
    strict = typecheck(strict_mode="strict", local=True)
    if pairs is not None:
        _before(args, chunk, reader, mesh, pairs)
    if not chunk.pre_process:
        chunk.set_input_tensor(_received(args, chunk, hidden))
    with equal_layers_run_once(args, chunk, ran), strict:
        _forward(args, chunk, reader, mesh, hidden, pairs)


def _before(args: argparse.Namespace, chunk: Any, reader: Any, mesh: Mesh, pairs: Any) -> None:
    """What a step of pairs does before its schedule: their number, and the reference model.

    Raises:
        SpmdTypeError: a number of some ranks, or a reference that is trained.
    """
    hidden = mesh.types(V if chunk.config.sequence_parallel else I, V)

    def run_forward(step: Any, readers: Any, references: Any, count: int) -> list[Any]:
        [reference] = [one for one in references if _place_of(one) == _place_of(chunk)]
        give_types(reference, reference.config, mesh)
        if not reference.pre_process:
            reference.set_input_tensor(_received(args, reference, hidden))
        # Of its own: a layer that ran without gradients is not checked.
        with equal_layers_run_once(args, reference, set()):
            output, sums = step(readers[0], reference)
            found = [sums(output)[1]] if reference.post_process else []
        if any(one.requires_grad for one in found):
            what = "the reference's log-probabilities carry a gradient: run it under no_grad"
            raise _at(step, SpmdTypeError(what))
        return found

    with rules.equal_where_reduced(), typecheck(strict_mode="strict", local=True):
        pairs.before([reader], 1, run_forward)
    if chunk.post_process:
        for axis, found in types_of(pairs.totals.pairs).items():
            if found is V:
                what = "the loss: the pairs by which it is divided"
                raise _at(pairs.before, WrongType(what, axis, found, (R,)))


def _place_of(chunk: Any) -> Any:
    """Number of the chunk on its rank."""
    return getattr(chunk, "vp_stage", None)


def _forward(
    args: argparse.Namespace,
    chunk: Any,
    reader: Any,
    mesh: Mesh,
    hidden: dict[MeshAxis, Type],
    pairs: Any,
) -> None:
    from mindspeed.training.forward_step import forward_step

    batches = _typed(reader, mesh) if pairs is None else reader
    output, loss_function = (pairs or forward_step)(batches, chunk)
    if not chunk.post_process:
        _expect("what the stage sends", output, hidden, chunk.forward)
        return
    loss = _normalised(args, chunk, output, loss_function, mesh)
    try:
        check_loss(loss, mesh, whole=pairs is not None)
    except WrongType as error:
        raise _at(loss_function, error) from None


def _normalised(
    args: argparse.Namespace, chunk: Any, output: Any, loss_function: Any, mesh: Mesh
) -> torch.Tensor:
    """The loss as Megatron divides it: a sum over tokens by their number."""

    def summed(output: Any, **options: Any) -> Any:
        loss, *others = loss_function(output, **options)
        if len(others) == 2:  # a sum over this rank's part of the sequence, and its tokens
            loss = as_term(loss, mesh)
        return loss, *others

    with rules.equal_where_reduced():
        return megatron.divided_loss(chunk, output, summed)


def _at(function: Any, error: SpmdTypeError) -> SpmdTypeError:
    """The error of what a function has returned, which no line of it uses any more."""
    function = inspect.unwrap(getattr(function, "func", function))
    code = function.__code__
    place = traceback.FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)
    vars(error)["place"] = place
    return error


def _received(args: argparse.Namespace, chunk: Any, types: dict[MeshAxis, Type]) -> torch.Tensor:
    shape = (_tokens(args), Batch.of(args).micro, chunk.config.hidden_size)
    received = torch.randn(shape, dtype=chunk.config.params_dtype, requires_grad=True)
    return give(received, types)


def _typed(reader: Any, mesh: Mesh) -> Any:
    """The micro-batches of a reader with types: a rank's own tokens, equal on tensor ranks."""
    if reader is None:
        return None
    with spmd_types.no_typecheck():
        batch = next(reader)
    return iter([_with_types(batch, mesh)])


_OF_LOSSES = {"loss_mask", "answers", "values", "references"}


def _with_types(batch: dict[str, Any], mesh: Mesh, on_context: Type = V) -> dict[str, Any]:
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            types = mesh.types(I if name in _OF_LOSSES else R, V)
            give(value, types | dict.fromkeys(mesh.context, on_context))
    return batch


class _TypedPairs:
    """A reader of pairs with types: context ranks have the same ones before they share them."""

    def __init__(self, reader: Any, mesh: Mesh) -> None:
        self._reader, self._mesh = reader, mesh
        self.post_process = reader.post_process

    def ahead(self, count: int) -> Any:
        with spmd_types.no_typecheck():
            batches = self._reader.ahead(count)
        for batch in batches:
            _with_types(batch.tensors, self._mesh, R)
        return batches

    def preview(self, count: int) -> Any:
        with spmd_types.no_typecheck():
            batches = list(self._reader.preview(count))
        return iter([_with_types(batch, self._mesh) for batch in batches])

    def __next__(self) -> dict[str, Any]:
        with spmd_types.no_typecheck():
            batch = next(self._reader)
        return _with_types(batch, self._mesh)


def _expect(what: str, tensor: torch.Tensor, types: dict[MeshAxis, Type], function: Any) -> None:
    for axis, found in types_of(tensor).items():
        if found is not types[axis]:
            raise _at(function, WrongType(what, axis, found, (types[axis],)))
