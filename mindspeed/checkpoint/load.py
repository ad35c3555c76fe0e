"""Loading: the latest good checkpoint, whatever layout and trainer wrote it.

Names, sizes and small files are checked before anything is read, tensors while they are read; a
checkpoint that turns out damaged is given up by all ranks together, and the one before it is taken,
with a warning.

Other files (Hugging Face, legacy, safetensors) hold a whole model without an optimizer: each rank
reads the rows and columns of its shards.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from mindspeed.adaptor.printing import print_rank_0
from mindspeed.adaptor.versions.checkpoints import contents_of, reads, reshardable_kinds
from mindspeed.built_model import BuiltModel, TrainedModel
from mindspeed.checkpoint import fsdp_state
from mindspeed.checkpoint.architecture import check_architecture
from mindspeed.checkpoint.contents import Contents, model_at
from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.checkpoint.state import model_key, restore_rng, sharding_metadata, state_dict
from mindspeed.checkpoint.weights.convert import open_weights
from mindspeed.errors import CheckpointError, DamagedCheckpoint
from mindspeed.features.registry import lacking_states
from mindspeed.flags import read
from mindspeed.job import Parallel, Sharding, TrainState
from mindspeed.lora.load import check_adapter
from mindspeed.models.hf_load import load_hf, local_shards
from mindspeed.models.shape import shape_of
from mindspeed.models.weight_source import TransformedWeights, check_finite
from mindspeed.storage import digests, directory
from mindspeed.storage.safe_metadata import common_state, read_index
from mindspeed.storage.sharded_load import on_all_ranks, read_sharded


@dataclass(frozen=True)
class Loaded:
    """The point at which training continues."""

    path: Path
    state: TrainState


def load(args: argparse.Namespace, model: BuiltModel, *, adapter: bool = False) -> Loaded | None:
    """Load the latest good checkpoint of ``--load``, of a model or of an ``adapter``. Collective.

    Optimizer and generators are loaded where the checkpoint has them and ``model`` and the flags
    want them.

    Returns:
        Where training continues; None if there is no checkpoint yet.

    Raises:
        CheckpointError: checkpoints exist, but none can be loaded, or they hold another model.
    """
    options = read(CheckpointOptions, args)
    root, step = options.load, options.ckpt_step
    assert root is not None
    if not adapter:
        if fsdp_state.is_sharded(model.chunks[0]) and needs_whole_stages(args):
            return Loaded(Path(root), TrainState())  # as they were when the model was built
        if (weights := load_weights(args, model)) is not None:
            return Loaded(weights, TrainState())
    tried: dict[Path, str] = {}
    candidates, doubt = _agreed_candidates(root, step)
    if doubt is not None:
        print_rank_0(f" WARNING {doubt}")
    for place, path in enumerate(candidates, start=1):
        try:
            return _load_one(args, options, model, path, adapter)
        except DamagedCheckpoint as error:
            tried[path] = str(error).removeprefix(f"{path}: ")
        more = "; trying the one before" if place < len(candidates) else ""
        print_rank_0(f" WARNING {path} cannot be loaded ({tried[path]}){more}")
    directory.require_some(root, tried)
    if options.exit_on_missing_checkpoint or step is not None:
        raise CheckpointError(f"--load {root}: there is no checkpoint")
    if root != options.save:
        print_rank_0(f" WARNING --load {root}: there is no checkpoint, starting fresh")
    return None


def _agreed_candidates(root: str, step: int | None) -> tuple[list[Path], str | None]:
    """What rank 0 sees, so that all ranks try the same ones; and what is odd about it."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        paths = [str(path) for path in directory.candidates(root, step)]
        doubt = directory.tracker_problem(root) if step is None else None
        found = [(paths, doubt if paths else None)]
    dist.broadcast_object_list(found, src=0)
    paths, doubt = found[0]
    return [Path(path) for path in paths], doubt


def _read_small_files(path: Path) -> tuple[Metadata, dict[str, Any], bool]:
    """The index and the common part of a checkpoint, and whether it has digests.

    Raises:
        DamagedCheckpoint: A file of it is missing or damaged.
    """
    if (problem := directory.problem_with(path)) is not None:
        raise DamagedCheckpoint(problem)
    return read_index(path), common_state(path), (path / digests.NAME).is_file()


def _load_one(
    args: argparse.Namespace,
    options: CheckpointOptions,
    model: BuiltModel,
    path: Path,
    adapter: bool,
) -> Loaded:
    index, common, with_digests = on_all_ranks(lambda: _read_small_files(path))
    saved = common.get("args", argparse.Namespace())
    check_architecture(args, saved, str(path))
    weights_only = options.finetune or path.name == directory.RELEASE
    if adapter:
        sharded = [chunk for chunk in model.chunks if fsdp_state.is_sharded(chunk)]
        check_adapter(model.modules, path, fsdp_state.tensors(sharded) if sharded else None)
    with_optimizer = (
        isinstance(model, TrainedModel)
        and "opt_param_scheduler" in common  # saved with every optimizer
        and not (weights_only or options.no_load_optim)
    )
    metadata = contents_of(common)
    metadata = sharding_metadata(args) if metadata is None else metadata
    same_layout = _same_layout(Parallel.of(args), saved)
    if with_optimizer:
        _check_optimizer(args, saved, metadata, same_layout, path)
    with_rng = (
        same_layout
        and any(key.startswith("rng_state") for key in index.state_dict_metadata)
        and not (weights_only or options.no_load_rng)
    )
    wanted = state_dict(
        args,
        model,
        metadata,
        optimizer=with_optimizer,
        rng=with_rng,
        is_loading=True,
        adapter=adapter,
    )
    state = read_sharded(wanted, path, strict=options.dist_ckpt_strictness)
    on_all_ranks(lambda: _check_finite(state, len(model.modules), path))
    _apply(model, state, with_optimizer, path)
    if with_rng:
        restore_rng(state["rng_state"])
    done = TrainState() if weights_only else TrainState.of(int(state["iteration"]), saved)
    _say(path, done.iteration, with_optimizer, same_layout, with_digests)
    return Loaded(path, done)


def _apply(model: BuiltModel, state: dict[str, Any], optimizer: bool, path: Path) -> None:
    modules = model.modules
    sharded = fsdp_state.is_sharded(model.chunks[0])
    for index, (chunk, module) in enumerate(zip(model.chunks, modules, strict=True)):
        key = model_key(index, len(modules))
        if key not in state:  # a stage without layers has no entry
            continue
        if sharded:
            fsdp_state.load_model_state(chunk, state[key])
        else:
            module.load_state_dict(state[key], strict=False)
    if not isinstance(model, TrainedModel):
        return
    if optimizer and not model.optimizer.is_stub_optimizer:
        if sharded:
            fsdp_state.load_optimizer_state(model.chunks, model.optimizer, state["optimizer"])
        else:
            model.optimizer.load_state_dict(state["optimizer"])
    if sharded:
        fsdp_state.distribute(model.chunks, to_optimizer=not optimizer)
    elif not optimizer:
        model.optimizer.reload_model_params()  # fp32 copies of bf16 and fp16 weights
    if not optimizer:
        return
    try:
        model.schedule.load_state_dict(state["opt_param_scheduler"])
    except AssertionError as error:
        raise CheckpointError(
            f"{path}: the learning rate schedule differs ({error}); take the new one with "
            "--override-opt-param-scheduler, the old one with --use-checkpoint-opt-param-scheduler"
        ) from error


def _check_finite(state: dict[str, Any], chunks: int, path: Path) -> None:
    """See that the weights that this rank has read are finite numbers.

    Raises:
        CheckpointError: Names the first tensor that is not.
    """
    for index in range(chunks):
        for name, value in state.get(model_key(index, chunks), {}).items():
            if isinstance(value, torch.Tensor):
                check_finite(value, name, path)


def _same_layout(parallel: Parallel, saved: argparse.Namespace) -> bool:
    """Generators belong to positions in the model, so tensor and pipeline sizes must be equal."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return [getattr(saved, name, 1) for name in names] == [parallel.tensor, parallel.pipeline]


def _check_optimizer(
    args: argparse.Namespace,
    saved: argparse.Namespace,
    metadata: dict[str, Any],
    same_layout: bool,
    path: Path,
) -> None:
    """See that this run can read the optimizer of a checkpoint.

    Raises:
        CheckpointError: It cannot; says what can.
    """
    if states := lacking_states(vars(saved), vars(args)):
        raise CheckpointError(
            f"{path}: its optimizer has no {' and no '.join(states)}; load without its states "
            "(--no-load-optim)"
        )
    kind, sharding = metadata.get("distrib_optim_sharding_type"), Sharding.of(args)
    if kind is None:
        readable, instead = not sharding.distributed_optimizer, "continue with --zero-stage 0"
    elif not sharding.distributed_optimizer:
        # The fp32 copies of 16-bit parameters have another name in each of the two optimizers.
        half = any(getattr(run, name, False) for run in (args, saved) for name in ("bf16", "fp16"))
        readable = kind == fsdp_state.SHARDING and not half
        instead = "continue with --use-distributed-optimizer (--zero-stage 1)"
    elif sharding.fsdp:
        readable = kind == fsdp_state.SHARDING
        instead = (
            "continue with --zero-stage 1, or save it with --dist-ckpt-optim-fully-reshardable"
        )
    else:
        readable = same_layout or kind in reshardable_kinds()
        instead = (
            "continue at its tensor and pipeline parallel sizes, or save it with "
            "--dist-ckpt-optim-fully-reshardable"
        )
    if not reads(kind):
        readable, instead = False, "save it with megatron-core 0.12, or install 0.16.1"
    if not readable:
        raise CheckpointError(
            f"{path}: the states of its optimizer ({kind or 'not distributed'}) cannot be loaded "
            f"into this one; {instead}, or load without them (--no-load-optim)"
        )


def _say(
    path: Path, iteration: int, optimizer: bool, same_layout: bool, with_digests: bool
) -> None:
    if dist.get_rank() != 0:
        return
    notes = [] if optimizer else ["without optimizer"]
    if not same_layout:
        notes.append("other parallel sizes: random number generators are seeded afresh")
    if not with_digests:
        notes.append("no digests: damage inside its tensors would not be noticed")
    print(
        f" loaded {path} at iteration {iteration}" + (f" ({', '.join(notes)})" if notes else ""),
        flush=True,
    )


def needs_whole_stages(args: argparse.Namespace) -> bool:
    """Whether ``--load`` must be read before FSDP shards the stages: it is no ``torch_dist``."""
    found = _named(args)
    return found.kind == "hf" or found.has_whole_weights


def load_weights(args: argparse.Namespace, model: BuiltModel) -> Path | None:
    """Load the weights of ``--load``. Collective.

    Returns:
        Where they were read; None if ``--load`` is a ``torch_dist`` checkpoint, or nothing.

    Raises:
        CheckpointError: They belong to another model, or a tensor is missing.
    """
    found = _named(args)
    if found.kind == "hf":
        path = _load_hf(args, model, found.folder)
    elif found.has_whole_weights and found.checkpoint is not None:
        path = _load_whole_weights(args, model, found.checkpoint)
    else:
        return None
    if isinstance(model, TrainedModel) and not fsdp_state.is_sharded(model.chunks[0]):
        model.optimizer.reload_model_params()
    return path


def _named(args: argparse.Namespace) -> Contents:
    """What ``--load`` names."""
    options = read(CheckpointOptions, args)
    assert options.load is not None
    return model_at(options.load, options.ckpt_step)


def _load_hf(args: argparse.Namespace, model: BuiltModel, folder: Path) -> Path:
    unused = load_hf(args, model.modules, str(folder))
    note = f"; not used: {', '.join(unused[:5])}" if unused else ""
    print_rank_0(f" loaded {folder} (Hugging Face){note}")
    return folder


@torch.no_grad()
def _load_whole_weights(args: argparse.Namespace, model: BuiltModel, checkpoint: Path) -> Path:
    """Read one parameter at a time, whatever the parallel sizes of the files."""
    source = open_weights(checkpoint)
    check_architecture(args, source.args, str(checkpoint))
    shape = shape_of(args)
    weights = TransformedWeights(source, padded_vocab=shape["padded_vocab"])
    table = {parameter.name: parameter for parameter in weights.table}
    for part in local_shards(model.modules, source.family, shape):
        if part.parameter.name not in table:  # of multi-token prediction
            raise CheckpointError(
                f"{checkpoint} has no {part.parameter.name}; leave out --mtp-num-layers"
            )
        whole = weights.read(table[part.parameter.name])
        bounds = zip(part.start, part.data.shape, strict=True)
        part.data.copy_(whole[tuple(slice(first, first + size) for first, size in bounds)])
    print_rank_0(f" loaded {checkpoint} (weights only)")
    return checkpoint
