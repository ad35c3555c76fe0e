"""The reference model of preferences: what it is, and its log-probabilities before training.

    a frozen second copy        the weights of ``--reference-load``; one more forward pass a step
    adapters switched off       no more weights; one more forward pass a step
    --precompute-reference      neither: a pass over the data set before the model is built; 8 bytes
                                a pair are kept in a file beside the tokens

The name of that file is a digest of data, weights, and the flags of the model: others make another
file. Later runs read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.datasets.utils import Split, get_blend_from_list
from megatron.core.pipeline_parallel import get_forward_backward_func

from mindspeed import device
from mindspeed.built_model import BuiltModel
from mindspeed.checkpoint.contents import model_at
from mindspeed.checkpoint.load import load
from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.data.instruction_dataset import part_prefixes
from mindspeed.data.preference_dataset import PreferenceConfig, PreferenceDataset, PreferenceFiles
from mindspeed.data.tokenizer import build_tokenizer
from mindspeed.data.tokenizer_types import TextTokenizer, TokenizerOptions
from mindspeed.errors import ConfigError, DataError
from mindspeed.files import atomic_writer
from mindspeed.flags import changed, read
from mindspeed.job import Batch
from mindspeed.lora import adapted, switched_off
from mindspeed.models.extra_flags import PLAIN
from mindspeed.models.hf_load import folder_of, is_hf
from mindspeed.models.model_config import ModelConfig
from mindspeed.preference.answers import Answers, answers_of
from mindspeed.preference.losses import PreferenceLoss
from mindspeed.preference.options import PreferenceOptions
from mindspeed.training import data, setup
from mindspeed.training.batches import MicroBatches
from mindspeed.training.configs import transformer_config
from mindspeed.training.model import ModelProvider, build_modules
from mindspeed.training.options import DataOptions, TrainingOptions
from mindspeed.training.step import run_schedule

Chunks = Callable[[], Any]
AT_ONCE = 32
"""Micro-batches between two messages."""


def forward(data_iterator: Any, compute: Any, *, labels: bool = True) -> tuple[dict[str, Any], Any]:
    """A micro-batch, and the output of a stage for it: of the last, losses if it gets labels."""
    if data_iterator is None:  # a stage in the middle
        return {}, compute(None, None, None)
    batch = next(data_iterator)
    names = [*(["labels", "loss_mask"] if labels else []), "packed_seq_params"]
    more = {name: batch[name] for name in names if name in batch}
    output = compute(batch["tokens"], batch["position_ids"], batch["attention_mask"], **more)
    return batch, output


def answers_in(batch: dict[str, Any], losses: torch.Tensor) -> Answers:
    """Sums of a micro-batch by the losses of its next tokens ``[b, s]``. Collective over CP."""
    return answers_of(
        -losses.float(),
        batch["loss_mask"],
        batch["answers"],
        batch["values"],
        batch["references"],
        parallel_state.get_context_parallel_group(),
    )


def reference_step(data_iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
    """Forward step of the reference model, whose "loss" is the sums of its answers."""
    batch, output = forward(data_iterator, model)

    def sums(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return losses.sum(), answers_in(batch, losses).logps

    return output, sums


def unloaded_copy(args: argparse.Namespace, provider: ModelProvider) -> list[Any]:
    """Stages of the reference model, without gradients; their weights are not read."""
    modules = build_modules(args, transformer_config(args), provider)
    for module in modules:
        module.requires_grad_(False)
        module.eval()
    return modules


def frozen_copy(args: argparse.Namespace, provider: ModelProvider) -> list[Any]:
    """Stages of the reference model, without gradients. Collective."""
    modules = unloaded_copy(args, provider)
    source = changed(args, load=_source(args), finetune=True, exit_on_missing_checkpoint=True)
    load(source, BuiltModel(modules[0].config, modules))
    return modules


def runs_in_steps(args: argparse.Namespace) -> bool:
    """Whether a reference model runs in each step of a job."""
    options = read(PreferenceOptions, args)
    preference = options.objective == "preference" and not options.precompute_reference
    return preference and PreferenceLoss.of(options).needs_reference


def reference_of(
    args: argparse.Namespace,
    chunks: list[Any],
    provider: ModelProvider,
    *,
    read_weights: bool = True,
) -> Chunks | None:
    """Context manager of the chunks of a run's reference model; None where none runs in a step.

    Args:
        args: final values.
        chunks: of the model that is trained.
        provider: of the model.
        read_weights: a second copy reads the weights of ``--reference-load``. Collective.
    """
    if not runs_in_steps(args):
        return None
    if adapted(chunks) and read(PreferenceOptions, args).reference_load is None:
        return partial(_without_adapters, chunks)
    copy = frozen_copy if read_weights else unloaded_copy
    return partial(_frozen, copy(args, provider))


@contextmanager
def _without_adapters(chunks: list[Any]) -> Iterator[list[Any]]:
    training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    with switched_off(chunks):
        yield chunks
    for chunk, mode in zip(chunks, training, strict=True):
        chunk.train(mode)


@contextmanager
def _frozen(chunks: list[Any]) -> Iterator[list[Any]]:
    yield chunks


def _source(args: argparse.Namespace) -> str:
    options, files = read(PreferenceOptions, args), read(CheckpointOptions, args)
    return str(options.reference_load or files.load)


def check_tokenizer(args: argparse.Namespace, tokenizer: TextTokenizer) -> None:
    """Check that the reference model has the tokenizer of the data.

    Raises:
        ConfigError: it has another one; names a token that differs.
    """
    preference, options = read(PreferenceOptions, args), TokenizerOptions.from_args(args)
    load = preference.reference_load
    if preference.objective != "preference" or load is None or not is_hf(load):
        return
    if load == read(CheckpointOptions, args).load or options.tokenizer_model is None:
        return
    other = build_tokenizer(dataclasses.replace(options, tokenizer_model=folder_of(load)))
    sizes = tokenizer.vocab_size, other.vocab_size
    differ = (i for i in range(min(sizes)) if tokenizer.piece(i) != other.piece(i))
    number = next(differ, None if sizes[0] == sizes[1] else min(sizes))
    if number is not None:
        raise ConfigError(
            f"--reference-load {load} has another tokenizer: token {number} is "
            f"{_piece(other, number)} there and {_piece(tokenizer, number)} here, so its "
            "log-probabilities are of other texts; take a reference of the same model"
        )


def _piece(tokenizer: TextTokenizer, number: int) -> str:
    return repr(tokenizer.piece(number)) if number < tokenizer.vocab_size else "missing"


def precomputed(
    args: argparse.Namespace, tokenizer: TextTokenizer, provider: ModelProvider
) -> dict[str, str] | None:
    """Files with the reference's log-probabilities by data set; those missing are computed.

    Collective. None where they are not wanted.
    """
    options = read(PreferenceOptions, args)
    if options.objective != "preference" or not options.precompute_reference:
        return None
    paths = {prefix: _file(args, prefix) for prefix in _prefixes(args)}
    missing = [prefix for prefix, path in paths.items() if not path.exists()]
    found: list[Any] = [missing]
    dist.broadcast_object_list(found, src=0)
    if found[0]:
        modules = frozen_copy(args, provider)
        for prefix in found[0]:
            _compute(args, tokenizer, modules, prefix, paths[prefix])
        del modules
        setup.seed_everything(args)  # as in a run that finds them
    for prefix, path in paths.items():
        _check_file(path, len(PreferenceFiles(prefix)))
    return {prefix: str(path) for prefix, path in paths.items()}


def _prefixes(args: argparse.Namespace) -> list[str]:
    options = read(DataOptions, args)
    paths = options.data_path, options.train_data_path, options.valid_data_path
    blends = [get_blend_from_list(list(some)) for some in (*paths, options.test_data_path) if some]
    return list(dict.fromkeys(prefix for blend in blends if blend for prefix in blend[0]))


_OF_THE_MODEL = (
    *("params_dtype", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"),
    *("num_query_groups", "kv_channels", "rotary_base", "norm_epsilon", "padded_vocab_size"),
    *("window_size", "num_experts", "moe_router_topk", "seq_length", "pack_sequences"),
    *("base_weights", "double_quantization", *PLAIN),
)


def _file(args: argparse.Namespace, prefix: str) -> Path:
    """File with the log-probabilities of a data set."""
    folder = model_at(_source(args)).checkpoint or Path(folder_of(_source(args)))
    parts = [f"{part}{end}" for part in part_prefixes(prefix) for end in (".idx", ".bin")]
    files = [*map(Path, parts), *(path for path in sorted(folder.rglob("*")) if path.is_file())]
    values = {name: str(getattr(args, name, None)) for name in _OF_THE_MODEL}
    values["files"] = str([(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files])
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:20]
    return Path(f"{prefix}_reference_{digest}.npy")


def _check_file(path: Path, pairs: int) -> None:
    try:
        shape = np.load(path, mmap_mode="r", allow_pickle=False).shape
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is damaged ({error}): remove it, to compute it again") from error
    if shape != (pairs, 2):
        raise DataError(f"{path} has shape {shape} for {pairs} pairs: remove it")


class _Repeated:
    """A data set that begins again, up to a length."""

    def __init__(self, items: Any, length: int) -> None:
        self._items, self._length = items, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._items[index % len(self._items)]


def _pairs_of(args: argparse.Namespace, tokenizer: TextTokenizer, prefix: str) -> PreferenceDataset:
    """The pairs of a data set, each once, in the order of its files."""
    options = read(DataOptions, args)
    files = PreferenceFiles(prefix, options.mmap_bin_files)
    config = PreferenceConfig(
        random_seed=read(TrainingOptions, args).seed,
        sequence_length=options.seq_length,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=tokenizer,
        vocab_size=read(ModelConfig, args).padded_vocab_size,
        pack=options.pack_sequences,
        shuffle=False,
    )
    return PreferenceDataset(files, prefix, np.arange(len(files)), None, Split.train, config)


def _compute(
    args: argparse.Namespace, tokenizer: TextTokenizer, modules: list[Any], prefix: str, path: Path
) -> None:
    """Run the reference model over a data set and write its log-probabilities. Collective."""
    pairs = _pairs_of(args, tokenizer, prefix)
    ranks = parallel_state.get_data_parallel_group()
    each = Batch.of(args).micro // data.rows_of_a_sample(args)  # items of a micro-batch
    count = -(-len(pairs) // (each * ranks.size()))
    repeated = _Repeated(pairs, count * each * ranks.size())
    model_config = transformer_config(args)
    readers = data.micro_batches(args, model_config, repeated, 0, tokenizer)
    found = np.zeros((len(pairs.dataset), 2), np.float32)
    done = 0
    while done < count:
        now = min(AT_ONCE, count - done)
        for reader in readers:
            if isinstance(reader, MicroBatches):
                reader.announce(count - done)
        with torch.no_grad():
            schedule = get_forward_backward_func()
            sums = run_schedule(
                args, schedule, reference_step, readers, modules, now, forward_only=True
            )
        for number, logps in enumerate(sums, done):
            first = (number * ranks.size() + ranks.rank()) * each
            items = range(first, min(first + each, len(pairs)))
            members = [index for item in items for index in pairs.samples(item)]
            found[members] = logps[: len(members)].cpu().numpy()
        done += now
        if dist.get_rank() == 0:
            print(f" reference model: {done:,} of {count:,} micro-batches", flush=True)
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        total = torch.from_numpy(found).to(device.current().torch_device())
        dist.all_reduce(total, group=ranks)
        found = total.cpu().numpy()
    if dist.get_rank() == dist.get_world_size() - 1:  # of the last stage
        with atomic_writer(path, "wb") as file:
            np.lib.format.write_array(file, found)
    dist.barrier()
