"""The trainer's own flags, one dataclass per recipe section.

Names and meanings are Megatron-LM's, defaults mostly too. Flags that Megatron Core declares itself
(model, parallel, optimizer) come from its own dataclasses, see :mod:`mindspeed.training.arguments`;
here are those that belong to a training script rather than to the library.

====================== ===================================================
section of a recipe     dataclass here
====================== ===================================================
``model``               :class:`ModelOptions`
``parallel``            :class:`ParallelOptions`
``optimizer``           :class:`OptimizerOptions`
``data``                :class:`DataOptions`
``training``            :class:`TrainingOptions`
``checkpoint``          :class:`mindspeed.checkpoint.options.CheckpointOptions`
``logging``             :class:`LoggingOptions`
``lora``                :class:`LoraOptions`
``preference``          :class:`mindspeed.preference.options.PreferenceOptions`
====================== ===================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.flags import flag
from mindspeed.models.extra_flags import ModelExtras
from mindspeed.preference.options import PreferenceOptions
from mindspeed.ranges import (
    ABOVE_ZERO,
    COUNT,
    LAYERS,
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    RANKS,
    SEED,
    SIZE,
    Range,
)


@dataclass(frozen=True)
class ModelOptions(ModelExtras):
    """Shape of the model, as far as Megatron Core's configuration does not hold it."""

    max_position_embeddings: int | None = flag(
        None, "longest sequence (default: --seq-length)", range=SIZE
    )
    model: str | None = flag(
        None,
        "preset (mindspeed models lists them) or directory with a config.json: the flags "
        "of this model, below those of a recipe and of the command line",
    )
    model_family: str | None = flag(
        None, "how Hugging Face calls the weights (default: found from the other flags)"
    )
    position_embedding_type: Literal["learned_absolute", "rope", "mrope", "alibi", "none"] = flag(
        "learned_absolute", "how positions enter the model"
    )
    use_rotary_position_embeddings: bool = flag(False, "old name of --position-embedding-type rope")
    rotary_base: int = flag(10000, "base of the rotary embedding", range=POSITIVE)
    rotary_percent: float = flag(
        1.0, "part of each head that is rotated", range=Range(0, 1, above=True)
    )
    rotary_seq_len_interpolation_factor: int | None = flag(
        None, "stretch positions by this factor", range=SIZE
    )
    use_rope_scaling: bool = flag(False, "rotary scaling of Llama 3.1")
    rope_scaling_factor: float = flag(8.0, "factor of --use-rope-scaling", range=Range(1))
    rope_type: Literal["rope", "yarn"] | None = flag(None, "default: yarn with MLA, else rope")
    group_query_attention: bool = flag(False, "grouped-query attention with --num-query-groups")
    num_query_groups: int | None = flag(
        None, "key/value heads; turns on grouped-query attention", range=SIZE
    )
    swiglu: bool = flag(False, "gated linear unit with SiLU instead of GeLU")
    squared_relu: bool = flag(False, "squared ReLU instead of GeLU")
    quick_geglu: bool = flag(False, "gated linear unit with quick GeLU")
    openai_gelu: bool = flag(False, "GeLU by its tanh approximation")
    bias_gelu_fusion: bool = flag(True, "fuse bias and GeLU")
    bias_swiglu_fusion: bool = flag(True, "fuse bias and SwiGLU")
    untie_embeddings_and_output_weights: bool = flag(False, "separate output layer weights")
    make_vocab_size_divisible_by: int = flag(
        128, "pad the vocabulary to a multiple of this times TP", range=SIZE
    )
    padded_vocab_size: int | None = flag(
        None, "padded vocabulary size, instead of computing it", range=SIZE
    )
    fp16_lm_cross_entropy: bool = flag(False, "unreduced loss in fp16")
    init_method_xavier_uniform: bool = flag(False, "refused: it does not reach every matrix")
    recompute_activations: bool = flag(
        False,
        "same as --recompute-granularity selective",
    )
    checkpoint_activations: bool = flag(False, "old name of full recompute, one layer at a time")
    checkpoint_policy: Literal["full", "block", "custom"] | None = flag(
        None,
        "old flag: recompute every layer, the first --checkpoint-block-layer of each stage, or the "
        "attention (--recompute-granularity selective)",
    )
    checkpoint_block_layer: int = flag(25, "layers of --checkpoint-policy block", range=LAYERS)


@dataclass(frozen=True)
class ParallelOptions:
    """How the model is sharded over the ranks."""

    devices: int | None = flag(
        None,
        "ranks the values are meant for: --dry-run counts with them, any other number runs",
        range=RANKS,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "layers of one virtual pipeline stage (interleaved schedule)", range=LAYERS
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, "virtual pipeline stages of one rank (interleaved schedule)", range=LAYERS
    )
    zero_stage: int | None = flag(
        None,
        "ranks share 1: optimizer states, 2: gradients too, 3: parameters too (default: as "
        "--use-distributed-optimizer and --use-megatron-fsdp say)",
        range=Range(0, 3),
    )
    ddp_num_buckets: int | None = flag(None, "number of gradient buckets", range=POSITIVE)
    align_grad_reduce: bool = flag(True, "all pipeline stages reduce gradients at the same time")
    use_tp_pp_dp_mapping: bool = flag(False, "order ranks tp-cp-ep-pp-dp, not tp-cp-ep-dp-pp")
    distributed_backend: Literal["auto", "nccl", "hccl", "gloo"] = flag(
        "auto", "communication library; auto, nccl and hccl take what fits the device"
    )
    distributed_timeout_minutes: int = flag(10, "time-out of a collective", range=Range(1, 525_600))
    enable_gloo_process_groups: bool = flag(True, "additional gloo groups on accelerators")
    create_all_gather_group: bool = flag(False, "separate group for parameter all-gather")
    nccl_communicator_config_path: str | None = flag(None, "YAML file with NCCL settings")


@dataclass(frozen=True)
class OptimizerOptions:
    """Learning rate, weight decay and precision of the gradients."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = flag(
        "linear", "shape of the learning rate schedule"
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = flag(
        "exponential", "shape of the last phase of WSD"
    )
    lr_decay_iters: int | None = flag(
        None, "iterations of the decay (default: --train-iters)", range=POSITIVE
    )
    lr_decay_samples: int | None = flag(
        None, "samples of the decay (default: --train-samples)", range=POSITIVE
    )
    lr_wsd_decay_iters: int | None = flag(
        None, "iterations of the last phase of WSD", range=POSITIVE
    )
    lr_wsd_decay_samples: int | None = flag(
        None, "samples of the last phase of WSD", range=POSITIVE
    )
    lr_warmup_fraction: float | None = flag(
        None, "part of the decay spent warming up", range=PROBABILITY
    )
    lr_warmup_iters: int = flag(0, "iterations of warm-up", range=COUNT)
    lr_warmup_samples: int = flag(0, "samples of warm-up", range=COUNT)
    lr_warmup_init: float = flag(0.0, "learning rate the warm-up starts from", range=NOT_NEGATIVE)
    start_weight_decay: float | None = flag(None, "weight decay at the start", range=NOT_NEGATIVE)
    end_weight_decay: float | None = flag(None, "weight decay at the end", range=NOT_NEGATIVE)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "shape of the weight decay schedule"
    )
    override_opt_param_scheduler: bool = flag(
        False,
        "schedule from the command line, not from the checkpoint",
        aliases=("--override-opt_param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "schedule from the checkpoint, not from the command line",
        aliases=("--use-checkpoint-opt_param-scheduler",),
    )
    grad_reduce_in_bf16: bool = flag(False, "reduce gradients in bf16")
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "accumulate and reduce gradients in fp32 (default with --bf16)"
    )


@dataclass(frozen=True)
class DataOptions:
    """Data options: files, and the order of samples."""

    seq_length: int | None = flag(None, "tokens of one sample", range=SIZE)
    data: tuple[str, ...] | None = flag(
        None,
        "files of texts, or of conversations (finetune), to tokenize and train: .jsonl, .json, "
        ".csv, .parquet, .txt, also .gz or .zst; or weight file pairs",
    )
    eval_data: tuple[str, ...] | None = flag(None, "the same, for validation")
    epochs: float = flag(3.0, "--data: passes over conversations", range=ABOVE_ZERO)
    handler_name: str = flag("", "--data: format of its records (default: found by their columns)")
    map_keys: str = flag("{}", "--data: JSON object of column names of the format")
    prompt_type: str | None = flag(
        None, "--data: chat template (default: the tokenizer's, else that of the format)"
    )
    chat_template_kwargs: str = flag(
        "{}", "--data: JSON object of variables of the tokenizer's chat template"
    )
    train_on: Literal["all", "last"] = flag("all", "--data: answers that are trained")
    data_path: tuple[str, ...] | None = flag(
        None, "data set prefix, several prefixes, or weight prefix pairs"
    )
    train_data_path: tuple[str, ...] | None = flag(None, "the same, for training only")
    valid_data_path: tuple[str, ...] | None = flag(None, "the same, for validation only")
    test_data_path: tuple[str, ...] | None = flag(None, "the same, for the final test only")
    train_weighted_split_paths: tuple[str, ...] | None = flag(
        None, '"NAME: WEIGHT START:END PREFIX, ...": parts of data sets for training'
    )
    valid_weighted_split_paths: tuple[str, ...] | None = flag(None, "the same, for validation")
    test_weighted_split_paths: tuple[str, ...] | None = flag(None, "the same, for the final test")
    data_args_path: str | None = flag(None, "file with the value of --data-path")
    split: str | None = flag(None, "parts for training, validation, test (default 969, 30, 1)")
    mock_data: bool = flag(False, "random tokens instead of a data set")
    data_cache_path: str | None = flag(
        None, "directory for index files (default: next to the data)"
    )
    mmap_bin_files: bool = flag(True, "map .bin files into memory")
    dataloader_type: Literal["single", "cyclic"] = flag(
        "single", "read in order, or shuffled anew in every epoch"
    )
    data_sharding: bool = flag(True, "cyclic: each data-parallel rank shuffles its own part")
    num_workers: int | None = flag(
        None, "reader processes per rank (default: 2; on CPU 0)", range=Range(0, 1024)
    )
    shuffle: bool = flag(
        True, "read in random order; --no-shuffle: as the files are, to compare with other trainers"
    )
    keep_last_token: bool = flag(
        False,
        "samples are --seq-length tokens whose last one predicts nothing, not one token more whose "
        "last one is only predicted",
    )
    reset_position_ids: bool = flag(False, "positions start again after each document")
    reset_attention_mask: bool = flag(False, "no attention across documents")
    eod_mask_loss: bool = flag(False, "no loss on end-of-document tokens")
    mid_level_dataset_surplus: float = flag(
        0.005, "samples built beyond what is needed", range=NOT_NEGATIVE
    )
    num_dataset_builder_threads: int = flag(
        1, "threads that build index files", range=Range(1, 1024)
    )
    allow_ambiguous_pad_tokens: bool = flag(False, "treat every token equal to pad as padding")
    is_instruction_dataset: bool = flag(
        False, "data sets are conversations with labels (mindspeed preprocess --handler-name)"
    )
    variable_seq_lengths: bool = flag(
        False, "conversations: a micro-batch is as long as its longest sample, not --seq-length"
    )
    pad_to_multiple_of: int = flag(
        8, "--variable-seq-lengths: round lengths up to this", range=SIZE
    )
    pack_sequences: bool = flag(
        False, "conversations: several in one sequence, without attention between them"
    )
    length_grouped: bool = flag(
        False, "conversations: micro-batches of similar lengths, in random order"
    )


@dataclass(frozen=True)
class TrainingOptions:
    """Duration, batch sizes, validation and reasons to stop."""

    micro_batch_size: int = flag(1, "samples per forward pass and data-parallel rank", range=SIZE)
    global_batch_size: int | None = flag(
        None,
        "samples per optimizer step (default: --micro-batch-size x data-parallel size)",
        range=SIZE,
    )
    rampup_batch_size: tuple[int, ...] | None = flag(
        None, "START INCREMENT SAMPLES: grow the global batch over SAMPLES samples", range=POSITIVE
    )
    gradient_accumulation_steps: int | None = flag(
        None,
        "micro-batches per optimizer step and rank, instead of --global-batch-size",
        range=SIZE,
    )
    decrease_batch_size_if_needed: bool = flag(False, "round the global batch down to what divides")
    train_iters: int | None = flag(None, "optimizer steps, over all runs", range=POSITIVE)
    train_samples: int | None = flag(
        None, "samples, over all runs (instead of --train-iters)", range=POSITIVE
    )
    eval_interval: int | None = flag(None, "iterations between validations", range=POSITIVE)
    eval_iters: int = flag(100, "batches of one validation; 0 for none", range=COUNT)
    exit_interval: int | None = flag(
        None, "stop at the first iteration divisible by this", range=POSITIVE
    )
    exit_duration_in_mins: float | None = flag(
        None, "save and stop after this time", range=NOT_NEGATIVE
    )
    exit_signal_handler: bool = flag(True, "on SIGTERM save, then stop with exit status 0")
    seed: int = flag(1234, "random seed", range=SEED)
    data_parallel_random_init: bool = flag(False, "another seed on each data-parallel rank")
    check_for_nan_in_loss_and_grad: bool = flag(True, "stop when a loss or gradient is not finite")
    max_skipped_nan_iterations: int = flag(
        0,
        "skip the update of up to this many iterations with a loss or gradient that is not finite",
        range=COUNT,
    )
    manual_gc: bool = flag(False, "run the garbage collector at the same iteration on all ranks")
    manual_gc_interval: int = flag(0, "iterations between collections of --manual-gc", range=COUNT)


@dataclass(frozen=True)
class LoggingOptions:
    """Logging options: printed and recorded values."""

    log_interval: int = flag(10, "iterations between log lines", range=POSITIVE)
    features_in_vain: Literal["warn", "refuse"] = flag(
        "refuse", "what to do if a feature whose flag is given has done nothing in the first step"
    )
    tensorboard_dir: str | None = flag(None, "directory for TensorBoard")
    metrics_file: str | None = flag(None, "JSON lines file (default: SAVE/metrics.jsonl)")
    progress_bar: bool = flag(True, "progress bar when the output is a terminal")
    log_params_norm: bool = flag(False, "log the norm of the parameters")
    tensorboard_log_interval: int = flag(
        1, "iterations between points, if --log-interval is less", range=POSITIVE
    )
    tensorboard_queue_size: int = flag(
        1000, "points that TensorBoard holds back at most", range=POSITIVE
    )
    log_memory_to_tensorboard: bool = flag(False, "memory curve in TensorBoard")
    log_loss_scale_to_tensorboard: bool = flag(True, "loss scale curve in TensorBoard")
    log_validation_ppl_to_tensorboard: bool = flag(False, "perplexity curves in TensorBoard")
    wandb_project: str | None = flag(None, "record to this project of Weights & Biases")
    wandb_exp_name: str | None = flag(None, "name of the run there (default: that of --save)")
    wandb_save_dir: str | None = flag(None, "directory of W&B's files (default: --save)")
    wandb_entity: str | None = flag(None, "user or team the project belongs to")


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters of a frozen model; on when targets or a source are given."""

    lora_target_modules: tuple[str, ...] = flag(
        (), "modules that get an adapter: query_key_value dense ..., q_proj ..., or all-linear"
    )
    lora_r: int = flag(16, "rank", range=SIZE)
    lora_alpha: float = flag(32.0, "the correction is multiplied by alpha / r", range=ABOVE_ZERO)
    lora_dropout: float = flag(0.0, "dropout of an adapter's input", range=PROBABILITY)
    lora_init: str = flag(
        "kaiming",
        "A and B at first: kaiming, gaussian (B is 0), orthogonal; factors of the weight, which "
        "are taken out of it: pissa, pissa_niter_N, olora",
    )
    lora_use_rslora: bool = flag(False, "multiply by alpha / sqrt(r)")
    lora_use_dora: bool = flag(False, "train the length of every row of the adapted weights (DoRA)")
    lora_use_bias: bool = flag(False, "train a bias of B, of layers that have a bias")
    lora_ensure_weight_tying: bool = flag(
        False, "of a tied model: the output layer has the adapter of the embedding"
    )
    lora_plus_lr_ratio: float = flag(
        1.0, "learning rate of B, and of DoRA's lengths, over that of A (LoRA+)", range=ABOVE_ZERO
    )
    base_weights: Literal["nf4", "int8", "fp8"] | None = flag(
        None, "store the frozen weights of linear layers in 4 bits (nf4) or 8 (int8, fp8)"
    )
    double_quantization: bool = flag(True, "with nf4, store the scales in 8 bits, too")
    lora_modules_to_save: tuple[str, ...] = flag(
        (), "modules that are trained whole and saved with the adapter"
    )
    lora_register_forward_hook: tuple[str, ...] = flag(
        ("word_embeddings", "input_layernorm"),
        "modules whose output is to carry gradients; the embedding's always does",
    )
    lora_adapter_name: str = flag("default", "name of the adapter in PEFT directories")
    lora_load: str | None = flag(None, "directory of adapter checkpoints, or a PEFT directory")
    lora_export: Literal["peft"] | None = flag(
        None, "write a PEFT directory SAVE/peft with every adapter checkpoint"
    )


SECTIONS: dict[str, type] = {
    "model": ModelOptions,
    "parallel": ParallelOptions,
    "optimizer": OptimizerOptions,
    "data": DataOptions,
    "training": TrainingOptions,
    "checkpoint": CheckpointOptions,
    "logging": LoggingOptions,
    "lora": LoraOptions,
    "preference": PreferenceOptions,
}
