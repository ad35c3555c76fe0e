"""Loading: the latest good checkpoint, whatever layout and trainer wrote it.

Names, sizes and small files are checked before anything is read, tensors while they are read; a
checkpoint that turns out damaged is given up by all ranks together, and the one before it is taken,
with a warning.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.metadata import Metadata

from mindspeed.built_model import BuiltModel, TrainedModel
from mindspeed.checkpoint import fsdp_state
from mindspeed.checkpoint.state import (
    ARCHITECTURE,
    DETAILS,
    SHAPES,
    check_architecture,
    model_key,
    restore_rng,
    sharding_metadata,
    state_dict,
    without_noop_layers,
)
from mindspeed.checkpoint.weights.convert import (
    find_checkpoint,
    holds_whole_weights,
    open_weights,
)
from mindspeed.checkpoint.weights.hugging_face import model_config
from mindspeed.errors import CheckpointError, ConfigError, DamagedCheckpoint
from mindspeed.features.noop_layers import indices_of
from mindspeed.lora.load import check_adapter
from mindspeed.models.finite import check_finite
from mindspeed.models.hf_load import folder_of, is_hf, load_hf, parts
from mindspeed.models.shape import shape_of
from mindspeed.models.weight_source import Adapted
from mindspeed.pipeline.noop_layers import with_noop
from mindspeed.storage import digests, directory
from mindspeed.storage.common_state import common_state
from mindspeed.storage.safe_metadata import read_index
from mindspeed.storage.sharded_load import on_all_ranks, read_sharded


@dataclass(frozen=True)
class Loaded:
    """Where training continues."""

    path: Path
    iteration: int


def load(args: argparse.Namespace, model: BuiltModel, *, adapter: bool = False) -> Loaded | None:
    """Load the latest good checkpoint of ``--load``, of a model or of an ``adapter``. Collective.

    Sets the counters of consumed samples in ``args``. Optimizer and generators are loaded where the
    checkpoint has them and ``model`` and the flags want them.

    Returns:
        Where training continues; None if there is no checkpoint yet.

    Raises:
        CheckpointError: checkpoints exist, but none can be loaded, or they hold another model.
    """
    if fsdp_state.is_sharded(model.chunks[0]) and needs_whole_stages(args):
        return Loaded(Path(args.load), 0)  # as they were when the model was built
    if is_hf(args.load):
        return _load_hf(args, model)
    if (other := _in_another_format(args.load, args.ckpt_step)) is not None:
        return _load_whole_weights(args, model, other)
    tried: dict[Path, str] = {}
    candidates, doubt = _agreed_candidates(args)
    if doubt is not None and dist.get_rank() == 0:
        print(f" WARNING {doubt}", flush=True)
    for place, path in enumerate(candidates, start=1):
        try:
            return _load_one(args, model, path, adapter)
        except DamagedCheckpoint as error:
            tried[path] = str(error).removeprefix(f"{path}: ")
        if dist.get_rank() == 0:
            more = "; trying the one before" if place < len(candidates) else ""
            print(f" WARNING {path} cannot be loaded ({tried[path]}){more}", flush=True)
    directory.require_some(args.load, tried)
    if args.exit_on_missing_checkpoint or args.ckpt_step is not None:
        raise CheckpointError(f"--load {args.load}: there is no checkpoint")
    if dist.get_rank() == 0 and args.load != args.save:
        print(f" WARNING --load {args.load}: there is no checkpoint, starting fresh", flush=True)
    return None


def latest(root: str, step: int | None = None) -> Path:
    """Directory of the latest good checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    tried = {}
    for path in directory.candidates(root, step):
        reason = directory.problem_with(path)
        if reason is None:
            return path
        tried[path] = reason
    directory.require_some(root, tried)
    raise CheckpointError(f"--load {root}: there is no checkpoint")


def saved_args(root: str, step: int | None = None) -> argparse.Namespace:
    """The values of the run that wrote the latest good checkpoint. Reads one file, on any rank.

    Of ``hf:DIR``, values that describe the model there.

    Raises:
        CheckpointError: there is none.
    """
    if is_hf(root):
        return model_config(folder_of(root)).namespace()
    if (other := _in_another_format(root, step)) is not None:
        return open_weights(other).args
    return common_state(latest(root, step))["args"]


def take_architecture(
    args: argparse.Namespace, saved: argparse.Namespace, given: Collection[str] = ()
) -> None:
    """Give ``args`` the model's shape of a checkpoint (``--use-checkpoint-args``).

    No-op layers are no part of that shape: those of ``args`` stay, those of ``saved`` don't count.

    Args:
        args: values of the run, changed in place.
        saved: values of the run that wrote the checkpoint.
        given: names that the user has set: they stay as they are.

    Raises:
        ConfigError: one of ``given`` contradicts the shape of the weights in the checkpoint.
    """
    taken = _architecture(saved, indices_of(getattr(args, "noop_layers", None)))
    contradictions = [
        f"--{name.replace('_', '-')} {getattr(args, name)} contradicts the checkpoint, which has "
        f"{theirs}: drop the flag, or load without --use-checkpoint-args"
        for name, theirs in taken.items()
        if name in given
        and name in (*ARCHITECTURE, *SHAPES)
        and _comparable(name, getattr(args, name), taken) != _comparable(name, theirs, taken)
    ]
    if contradictions:
        raise ConfigError("\n".join(contradictions))
    for name, value in taken.items():
        if name not in given:
            setattr(args, name, value)
    for name in ("tokenizer_type", "tokenizer_model", "vocab_size"):
        if getattr(args, name, None) is None:
            setattr(args, name, getattr(saved, name, None))


def _architecture(saved: argparse.Namespace, noop_layers: Collection[int]) -> dict[str, Any]:
    """The shape of a checkpoint's model, with the no-op layers of a run."""
    saved = without_noop_layers(saved)
    taken = {n: getattr(saved, n) for n in (*ARCHITECTURE, *DETAILS) if hasattr(saved, n)}
    if noop_layers:
        taken["num_layers"] += len(noop_layers)
        if isinstance(taken.get("moe_layer_freq"), list):
            taken["moe_layer_freq"] = with_noop(taken["moe_layer_freq"], noop_layers)
    if not taken.get("group_query_attention"):
        taken["num_query_groups"] = None
    return taken


def _comparable(name: str, value: Any, taken: Mapping[str, Any]) -> Any:
    """``4`` and the pattern that it means are the same layers."""
    if name == "moe_layer_freq" and isinstance(value, int):
        return [int(layer % value == 0) for layer in range(taken.get("num_layers", 0))]
    return value


def _load_hf(args: argparse.Namespace, model: BuiltModel) -> Loaded:
    folder = folder_of(args.load)
    unused = load_hf(args, model.modules, folder)
    if isinstance(model, TrainedModel):
        model.optimizer.reload_model_params()
    if dist.get_rank() == 0:
        note = f"; not used: {', '.join(unused[:5])}" if unused else ""
        print(f" loaded {folder} (Hugging Face){note}", flush=True)
    return Loaded(Path(folder), 0)


def needs_whole_stages(args: argparse.Namespace) -> bool:
    """Whether ``--load`` must be read before stages are cut up: it is no checkpoint of Megatron."""
    return is_hf(args.load) or _in_another_format(args.load, args.ckpt_step) is not None


def _in_another_format(root: str, step: int | None) -> Path | None:
    """The checkpoint of ``--load`` if it is a legacy or safetensors one."""
    found = find_checkpoint(Path(root), step)
    return found if found is not None and holds_whole_weights(found) else None


@torch.no_grad()
def _load_whole_weights(args: argparse.Namespace, model: BuiltModel, checkpoint: Path) -> Loaded:
    """Weights without optimizer, from files of any layout; reads one parameter at a time."""
    source = open_weights(checkpoint)
    check_architecture(args, source.args, str(checkpoint))
    weights = Adapted(source, padded_vocab=args.padded_vocab_size)
    table = {parameter.name: parameter for parameter in weights.table}
    for part in parts(model.modules, source.family, shape_of(args)):
        if part.parameter.name not in table:  # of multi-token prediction
            raise CheckpointError(
                f"{checkpoint} has no {part.parameter.name}; leave out --mtp-num-layers"
            )
        whole = weights.read(table[part.parameter.name])
        bounds = zip(part.start, part.data.shape, strict=True)
        part.data.copy_(whole[tuple(slice(first, first + size) for first, size in bounds)])
    if isinstance(model, TrainedModel):
        model.optimizer.reload_model_params()
    if dist.get_rank() == 0:
        print(f" loaded {checkpoint} (weights only)", flush=True)
    return Loaded(checkpoint, 0)


def _agreed_candidates(args: argparse.Namespace) -> tuple[list[Path], str | None]:
    """What rank 0 sees, so that all ranks try the same ones; and what is odd about it."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        paths = [str(path) for path in directory.candidates(args.load, args.ckpt_step)]
        doubt = directory.tracker_problem(args.load) if args.ckpt_step is None else None
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
    args: argparse.Namespace, model: BuiltModel, path: Path, adapter: bool = False
) -> Loaded:
    index, common, with_digests = on_all_ranks(lambda: _read_small_files(path))
    saved = common.get("args", argparse.Namespace())
    check_architecture(args, saved, str(path))
    weights_only = args.finetune or path.name == directory.RELEASE
    if adapter:
        cut = [chunk for chunk in model.chunks if fsdp_state.is_sharded(chunk)]
        check_adapter(model.modules, path, fsdp_state.tensors(cut) if cut else None)
    with_optimizer = (
        isinstance(model, TrainedModel)
        and "opt_param_scheduler" in common  # saved with every optimizer
        and not (weights_only or args.no_load_optim)
    )
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata = sharding_metadata(args) if metadata is None else metadata
    same_layout = _same_layout(args, saved)
    if with_optimizer:
        _check_optimizer(args, saved, metadata, same_layout, path)
    with_rng = (
        same_layout
        and any(key.startswith("rng_state") for key in index.state_dict_metadata)
        and not (weights_only or args.no_load_rng)
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
    state = read_sharded(wanted, path, strict=args.dist_ckpt_strictness)
    on_all_ranks(lambda: _check_finite(state, len(model.modules), path))
    _apply(model, state, with_optimizer, path)
    if with_rng:
        restore_rng(state["rng_state"])
    iteration = 0 if weights_only else int(state["iteration"])
    if not weights_only:
        args.consumed_train_samples = getattr(saved, "consumed_train_samples", 0)
        args.consumed_valid_samples = getattr(saved, "consumed_valid_samples", 0)
    _say(path, iteration, with_optimizer, same_layout, with_digests)
    return Loaded(path, iteration)


def _apply(model: BuiltModel, state: dict[str, Any], optimizer: bool, path: Path) -> None:
    modules = model.modules
    cut = fsdp_state.is_sharded(model.chunks[0])
    for index, (chunk, module) in enumerate(zip(model.chunks, modules, strict=True)):
        key = model_key(index, len(modules))
        if key not in state:  # a stage without layers has no entry
            continue
        if cut:
            fsdp_state.load_model_state(chunk, state[key])
        else:
            module.load_state_dict(state[key], strict=False)
    if not isinstance(model, TrainedModel):
        return
    if optimizer and not model.optimizer.is_stub_optimizer:
        if cut:
            fsdp_state.load_optimizer_state(model.chunks, model.optimizer, state["optimizer"])
        else:
            model.optimizer.load_state_dict(state["optimizer"])
    if cut:
        fsdp_state.distribute(model.chunks, to_optimizer=not optimizer)
    if not optimizer:
        model.optimizer.reload_model_params()  # fp32 copies of bf16 and fp16 weights
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


def _same_layout(args: argparse.Namespace, saved: argparse.Namespace) -> bool:
    """Generators belong to positions in the model, so tensor and pipeline sizes must be equal."""
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return all(getattr(saved, name, 1) == getattr(args, name) for name in names)


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
    kind = metadata.get("distrib_optim_sharding_type")
    if kind is None:
        readable, instead = not args.use_distributed_optimizer, "go on with --zero-stage 0"
    elif not args.use_distributed_optimizer:
        # The fp32 copies of 16-bit parameters have another name in each of the two optimizers.
        half = any(getattr(run, name, False) for run in (args, saved) for name in ("bf16", "fp16"))
        readable = kind == fsdp_state.SHARDING and not half
        instead = "go on with --use-distributed-optimizer (--zero-stage 1)"
    elif args.use_megatron_fsdp:
        readable = kind == fsdp_state.SHARDING
        instead = "go on with --zero-stage 1, or save it with --dist-ckpt-optim-fully-reshardable"
    else:
        reshardable = DistributedOptimizer.checkpoint_fully_reshardable_formats
        readable = same_layout or kind in reshardable
        instead = (
            "go on at its tensor and pipeline parallel sizes, or save it with "
            "--dist-ckpt-optim-fully-reshardable"
        )
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
