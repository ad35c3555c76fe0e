"""Data sets and micro-batches.

Data sets are Megatron Core's: ``.bin``/``.idx`` files, blended, split and shuffled, with index
files built once by rank 0 and cached. They exist on tensor-parallel rank 0
of first and last pipeline stages, and in all where documents are packed or lengths vary;
:mod:`mindspeed.training.batches` broadcasts each micro-batch.

Batches of conversations (``--is-instruction-dataset``) hold samples of different lengths:

    --variable-seq-lengths   a micro-batch is as long as its longest sequence, rounded up
    --pack-sequences         a sequence holds several samples that do not see each other

A sample of preferences is a pair: two sequences of a micro-batch, or packed with others in one.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    BlendedMegatronDatasetConfig,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.transformer import TransformerConfig

from mindspeed import device, session
from mindspeed.adaptor.pipeline_ends import pipeline_ends
from mindspeed.adaptor.repairs.data.dataset_helpers import ensure_helper
from mindspeed.adaptor.versions.trainer import known_options, predicts_tokens, surplus_option
from mindspeed.data.instruction_dataset import InstructionConfig, InstructionDataset, part_prefixes
from mindspeed.data.megatron import (
    InOrderDataset,
    InOrderMockDataset,
    LastTokenDataset,
    TextConfig,
    WeightedSplit,
    WeightedSplitBuilder,
    weighted_splits,
)
from mindspeed.data.packing import rounded_up
from mindspeed.data.preference_dataset import PreferenceConfig, PreferenceDataset
from mindspeed.data.tokenizer_types import TextTokenizer
from mindspeed.errors import DataError
from mindspeed.flags import read
from mindspeed.job import Batch, Parallel, Schedule
from mindspeed.preference.options import PreferenceOptions
from mindspeed.training.batches import (
    CyclicSampler,
    MicroBatch,
    MicroBatches,
    SamplerConfig,
    SequentialSampler,
    SizedSampler,
)
from mindspeed.training.options import DataOptions, ModelOptions, TrainingOptions
from mindspeed.training.token_counts import TokenCounter, keys_of_a_query, sample_counts

Reader = Iterator[MicroBatch]
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class DataSets:
    """The three splits; None where this rank needs none of a split, or it has no samples."""

    train: Any
    valid: Any
    test: Any


def weighted_parts(options: DataOptions) -> list[list[WeightedSplit] | None]:
    found: list[list[WeightedSplit] | None] = []
    for split in SPLITS:
        flag = f"{split}_weighted_split_paths"
        given = getattr(options, flag)
        found.append(given and weighted_splits(f"--{flag.replace('_', '-')}", given))
    return found


def build_datasets(
    args: argparse.Namespace,
    config: TransformerConfig,
    tokenizer: TextTokenizer,
    references: Mapping[str, str] | None = None,
) -> DataSets:
    """Build the three splits; collective, rank 0 writes missing index files first.

    ``references`` are files of log-probabilities by data set, where they are known.
    """
    # Megatron's training script does it at its start.
    ensure_helper(Path(inspect.getfile(GPTDataset)).parent)
    options = read(DataOptions, args)
    if options.is_instruction_dataset:
        dataset_config = _instruction_config(args, options, references)
    else:
        dataset_config = _gpt_config(args, options, tokenizer)
    counts = list(samples_by_split(args))
    if dataset_config.split_matrix:
        _leave_out_unused_splits(dataset_config, counts)
        _check_splits(options, dataset_config)
    reads = _reads_data(options, config)
    objective = read(PreferenceOptions, args).objective
    what = (_kind(options, objective), counts, lambda: reads, dataset_config)
    parts = weighted_parts(options)
    builder = (
        WeightedSplitBuilder(parts, *what) if any(parts) else BlendedMegatronDatasetBuilder(*what)
    )
    return DataSets(*builder.build())


def _kind(options: DataOptions, objective: str) -> type:
    if objective != "next_token":
        return PreferenceDataset
    if options.is_instruction_dataset:
        return InstructionDataset
    if not options.shuffle:
        return InOrderMockDataset if options.mock_data else InOrderDataset
    if options.mock_data:
        return MockGPTDataset
    return LastTokenDataset if options.keep_last_token else GPTDataset


def _shared_config(args: argparse.Namespace, options: DataOptions) -> dict[str, Any]:
    """Configuration of both kinds of data sets."""
    per_split = [options.train_data_path, options.valid_data_path, options.test_data_path]
    blends = [get_blend_from_list(list(paths)) if paths else None for paths in per_split]
    return {
        "random_seed": read(TrainingOptions, args).seed,
        "sequence_length": options.seq_length,
        "vocab_size": read(ModelOptions, args).padded_vocab_size,
        "blend": get_blend_from_list(list(options.data_path)) if options.data_path else None,
        "blend_per_split": blends if any(blends) else None,
        "split": None if any(blends) else options.split,
        "num_dataset_builder_threads": options.num_dataset_builder_threads,
        "path_to_cache": options.data_cache_path,
        "mmap_bin_files": options.mmap_bin_files,
        **surplus_option(options.mid_level_dataset_surplus),
    }


def _gpt_config(
    args: argparse.Namespace, options: DataOptions, tokenizer: TextTokenizer
) -> GPTDatasetConfig:
    return TextConfig(
        **_shared_config(args, options),
        tokenizer=tokenizer,
        **known_options(
            GPTDatasetConfig, allow_ambiguous_pad_tokens=options.allow_ambiguous_pad_tokens
        ),
        reset_position_ids=False,  # documents are found in the batch (training.batches)
        reset_attention_mask=False,
        eod_mask_loss=options.eod_mask_loss,
        create_attention_mask=False,
        add_extra_token_to_sequence=not options.keep_last_token,
    )


def _instruction_config(
    args: argparse.Namespace, options: DataOptions, references: Mapping[str, str] | None
) -> InstructionConfig:
    samples_of_all_ranks = Batch.of(args).samples_of(micro_batches=1) // rows_of_a_sample(args)
    kind: Any = InstructionConfig
    objective = read(PreferenceOptions, args).objective
    if objective != "next_token":
        kind = partial(PreferenceConfig, references=references)
    config: InstructionConfig = kind(
        **_shared_config(args, options),
        pack=options.pack_sequences,
        group=samples_of_all_ranks if options.length_grouped else None,
        shuffle=options.shuffle,
        # The reward of an answer is that of its last token.
        keep_last_token=options.keep_last_token or objective == "reward",
    )
    return config


def _leave_out_unused_splits(config: BlendedMegatronDatasetConfig, counts: Sequence[int]) -> None:
    """Build only splits that are used: Megatron would search an empty one forever."""
    config.split_matrix = [
        part if count else None for part, count in zip(config.split_matrix, counts, strict=True)
    ]


def _check_splits(options: DataOptions, config: BlendedMegatronDatasetConfig) -> None:
    """Check that each used split has documents in every data set.

    Raises:
        DataError: names the data set, the split and --split.
    """
    for prefix in config.blend[0] if config.blend else ():
        path = part_prefixes(prefix)[0] if options.is_instruction_dataset else prefix
        documents = len(IndexedDataset(path, mmap=options.mmap_bin_files).document_indices) - 1
        for name, part in zip(("training", "validation", "test"), config.split_matrix, strict=True):
            if part and round(part[1] * documents) <= round(part[0] * documents):
                raise DataError(
                    f"{prefix} has {documents} documents: --split {options.split!r} leaves none "
                    f"for {name}; give that part more, or set --eval-iters 0"
                )


def samples_by_split(args: argparse.Namespace) -> tuple[int, int, int]:
    """Samples of training, validation and test over the whole run."""
    schedule, rows = Schedule.of(args), rows_of_a_sample(args)
    if not schedule.evaluation_steps or schedule.evaluation_interval is None:
        return schedule.samples // rows, 0, 0
    once = schedule.evaluation_steps * Batch.of(args).whole // rows
    evaluations = schedule.iterations // schedule.evaluation_interval + 1
    return schedule.samples // rows, evaluations * once, once


def rows_of_a_sample(args: argparse.Namespace) -> int:
    """Sequences of a micro-batch that one item of the data set fills."""
    pairs = read(PreferenceOptions, args).objective != "next_token"
    return 2 if pairs and not read(DataOptions, args).pack_sequences else 1


def has_test(args: argparse.Namespace) -> bool:
    """Whether the split leaves data for the final test."""
    options = read(DataOptions, args)
    if options.train_data_path or not options.split:
        return bool(options.test_data_path)
    return parse_and_normalize_split(options.split)[2] > 0


def micro_batches(
    args: argparse.Namespace,
    config: TransformerConfig,
    dataset: Any,
    consumed: int,
    tokenizer: TextTokenizer,
    counter: TokenCounter | None = None,
    sizes: Sequence[int] | None = None,
) -> list[Reader | None]:
    """One reader per virtual pipeline stage of this rank, None where a stage needs no data.

    ``counter`` counts on one of the ranks that read the same batches. ``sizes`` are those of the
    micro-batches of a step, where they differ.
    """
    readers: list[Reader | None] = []
    options, collate = read(DataOptions, args), None
    pairs = read(PreferenceOptions, args).objective != "next_token"
    if options.is_instruction_dataset:
        assert options.seq_length is not None
        multiple = None
        if options.variable_seq_lengths:
            multiple = _length_multiple(Parallel.of(args), options.pad_to_multiple_of)
        collate = Collate(
            tokenizer.pad,
            options.seq_length,
            multiple,
            keys_of_a_query(args),
            apart=rows_of_a_sample(args) > 1,
        )
    for vp_stage in Parallel.of(args).vp_stages:
        pre_process, post_process = pipeline_ends(session.install().seams, vp_stage)
        counts = post_process
        if config.mtp_num_layers and predicts_tokens(config, vp_stage):
            pre_process = post_process = True  # its layers need the embedding and the labels
        if not (pre_process or post_process or _read_everywhere(options)):
            readers.append(None)
            continue
        loader = None
        if _is_tensor_rank_0():
            loader = _loader(args, options, dataset, consumed, collate, sizes)
        counts = counts and parallel_state.get_context_parallel_rank() == 0
        trained = None
        if loader is not None and counter is not None and counts:
            loader, trained = counter.watch(loader), counter.count
        readers.append(
            MicroBatches(
                args,
                loader,
                tokenizer,
                pre_process=pre_process,
                post_process=post_process,
                trained=trained,
                sizes=sizes,
                more=NUMBERS_OF_ANSWERS if pairs else (),
            )
        )
    return readers


def _loader(
    args: argparse.Namespace,
    options: DataOptions,
    dataset: Any,
    consumed: int,
    collate: Collate | None,
    sizes: Sequence[int] | None,
) -> Iterator[Any]:
    if dataset is None:
        raise DataError("a data split is empty: check --split and the size of the data set")
    rows = rows_of_a_sample(args)
    sampler_config = SamplerConfig(
        total=len(dataset),
        consumed=consumed // rows,
        micro_batch_size=Batch.of(args).micro // rows,
        rank=parallel_state.get_data_parallel_rank(),
        ranks=parallel_state.get_data_parallel_world_size(),
    )
    sampler: SequentialSampler | CyclicSampler = (
        SequentialSampler(sampler_config)
        if options.dataloader_type == "single"
        else CyclicSampler(sampler_config, sharding=options.data_sharding)
    )
    here = device.current()
    workers = options.num_workers
    if workers is None:  # forked readers only compete with the computation on a CPU
        workers = 0 if here.on_host else 2
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_sampler=sampler if sizes is None else SizedSampler(sampler, sizes),
        collate_fn=collate,
        num_workers=workers,
        pin_memory=here.has("pinned_memory"),
        persistent_workers=workers > 0,
        # Its own generator: only some ranks read, and the default one must stay equal on all.
        generator=torch.Generator().manual_seed(read(TrainingOptions, args).seed),
    )
    return iter(loader)


def _is_tensor_rank_0() -> bool:
    return parallel_state.get_tensor_model_parallel_rank() == 0


def _reads_data(options: DataOptions, config: TransformerConfig) -> bool:
    edge = pipeline_ends(session.install().seams, None)
    here = any(edge) or _read_everywhere(options) or predicts_tokens(config, None)
    return here and _is_tensor_rank_0()


def _read_everywhere(options: DataOptions) -> bool:
    """Whether every stage needs document boundaries or the lengths of micro-batches."""
    return options.variable_seq_lengths or bool(session.install().seams.documents.functions)


_WORDS = ("tokens", "labels", "loss_mask", "position_ids")
NUMBERS_OF_ANSWERS = ("answers", "values", "references")
"""Tensors of preferences that the loss reads (:mod:`mindspeed.data.preference_dataset`)."""


def _length_multiple(parallel: Parallel, given: int) -> int:
    """Lengths of micro-batches are multiples of this."""
    context = 2 * parallel.context if parallel.context > 1 else 1
    return math.lcm(given, parallel.sequence, context)


class Collate:
    """Pads samples to one length; called in the reader processes.

    Args:
        pad: token id of padding.
        seq_length: longest sequence.
        multiple: lengths are rounded up to a multiple of this; None: always ``seq_length``.
        keys: :func:`mindspeed.training.token_counts.keys_of_a_query`.
        apart: documents of a sample are sequences of their own.
    """

    def __init__(
        self,
        pad: int,
        seq_length: int,
        multiple: int | None,
        keys: Callable[[int], float],
        *,
        apart: bool = False,
    ) -> None:
        self._pad = pad
        self._seq_length = seq_length
        self._multiple = multiple
        self._keys = keys
        self._apart = apart

    def __call__(self, items: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Pad samples to one length.

        Args:
            items: tensors [s_i] with the dtypes below.

        Returns:
            ``tokens``, ``labels``, ``position_ids`` int64 [b, s], ``loss_mask`` fp32 [b, s], and
            those of :data:`NUMBERS_OF_ANSWERS` that items have, answers numbered on; positions of
            padding count from 0, as those of a sample. ``counts`` int64 [2] are
            :func:`mindspeed.training.token_counts.sample_counts`.
        """
        counts = sample_counts(items, self._keys)
        if "answers" in items[0]:
            items = _numbered_on(items)
        if self._apart:
            items = [part for item in items for part in _documents(item)]
        width = self._seq_length
        if self._multiple is not None:
            width = rounded_up(max(len(item["tokens"]) for item in items), self._multiple)
        batch = {
            name: torch.zeros(len(items), width, dtype=items[0][name].dtype)
            for name in (*_WORDS, *NUMBERS_OF_ANSWERS)
            if name in items[0]
        }
        batch["tokens"] += self._pad
        for index, item in enumerate(items):
            length = len(item["tokens"])
            for name in batch:
                batch[name][index, :length] = item[name]
            batch["position_ids"][index, length:] = torch.arange(width - length)
        return batch | {"counts": counts}


def _numbered_on(items: Sequence[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    """Samples whose answers have numbers that go on from one to the next."""
    found, before = [], 0
    for item in items:
        found.append({**item, "answers": item["answers"] + before})
        before += len(item["cu_seqlens"]) - 1
    return found


def _documents(item: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """The documents of a sample, one each."""
    for start, end in pairwise(item["cu_seqlens"].tolist()):
        yield {name: item[name][start:end] for name in item if name != "cu_seqlens"}
