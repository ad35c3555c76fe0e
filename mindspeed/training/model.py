"""Model, optimizer and schedule, built from Megatron Core's parts; adapters and what they resume.

With adapters, flags mean:

    --load BASE                  weights of the frozen model, of any format --load takes
    --lora-target-modules ...    new adapters
    --lora-load ADAPTER          adapters of a checkpoint (its optimizer and iteration too), or
                                 of a PEFT directory; its targets, rank and alpha as well
    --save OUT                   holds the adapters only
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from mindspeed import device, session
from mindspeed.adaptor.pipeline_ends import pipeline_ends
from mindspeed.adaptor.versions.trainer import (
    last_decoder_layer,
    muon_builder,
    optimizer_overrides,
    with_rate,
)
from mindspeed.built_model import BuiltModel, TrainedModel
from mindspeed.checkpoint.fsdp_state import is_sharded
from mindspeed.checkpoint.load import Loaded, load, needs_whole_stages
from mindspeed.checkpoint.options import CheckpointOptions
from mindspeed.flags import changed, read
from mindspeed.job import Parallel, Precision, Schedule, Sharding
from mindspeed.lora import adapted, initial
from mindspeed.lora.config import is_adapter_weight
from mindspeed.lora.flags import attach_by_flags
from mindspeed.lora.linear import summed_over_tp
from mindspeed.lora.load import is_peft
from mindspeed.lora.load import load as load_adapter
from mindspeed.models import model_extras
from mindspeed.models.model_config import ModelConfig
from mindspeed.preference.megatron_head import ScoreHead
from mindspeed.preference.options import PreferenceOptions
from mindspeed.storage.directory import root_and_iteration
from mindspeed.te.quantized_weight import QuantizedFormat, quantized_weights, store
from mindspeed.training import sharded_init, zero
from mindspeed.training.configs import ddp_config, optimizer_config, transformer_config
from mindspeed.training.options import (
    LoraOptions,
    ModelOptions,
    OptimizerOptions,
    ParallelOptions,
    TrainingOptions,
)

ModelProvider = Callable[[argparse.Namespace, TransformerConfig, bool, bool, int | None], Any]


def gpt_model(
    args: argparse.Namespace,
    config: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> GPTModel:
    """One pipeline stage of a GPT; the default model provider."""
    model = GPTModel(**gpt_options(args, config, pre_process, post_process, vp_stage))
    model_extras.change_model(args, model)
    if post_process and _scores(args):
        model.output_layer = ScoreHead(config, read(TrainingOptions, args).seed)
    return model


def gpt_options(
    args: argparse.Namespace,
    config: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> dict[str, Any]:
    """Arguments of Megatron's ``GPTModel``."""
    spec = model_extras.change_spec(args, layer_spec(args, config, vp_stage))
    model = read(ModelOptions, args)
    positions: str = model.position_embedding_type
    return dict(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=model.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=model.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not (
            model.untie_embeddings_and_output_weights or _scores(args)
        ),
        # ALiBi belongs to the attention.
        position_embedding_type="none" if positions == "alibi" else positions,
        rotary_percent=model.rotary_percent,
        rotary_base=model.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        mtp_block_spec=_mtp_spec(args, config, spec, vp_stage),
        vp_stage=vp_stage,
    )


def _scores(args: argparse.Namespace) -> bool:
    """Whether the model has a head of scores in the place of its output layer."""
    return read(PreferenceOptions, args).objective == "reward"


@dataclass(frozen=True)
class _LayerKind:
    """Options of Megatron's layer specs, by its names for them."""

    use_transformer_engine: bool
    normalization: str
    qk_l2_norm: bool

    @classmethod
    def of(cls, model: ModelConfig) -> _LayerKind:
        engine = model.transformer_impl == "transformer_engine"
        return cls(engine, model.normalization, model.qk_l2_norm)


def layer_spec(args: argparse.Namespace, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Megatron's layer spec; features change it (seam ``layer_spec``)."""
    model = read(ModelConfig, args)
    kind = _LayerKind.of(model)
    if model.num_experts:
        return get_gpt_decoder_block_spec(config, **vars(kind), vp_stage=vp_stage)
    shared: dict[str, Any] = {
        "qk_layernorm": model.qk_layernorm,
        "multi_latent_attention": model.multi_latent_attention,
        "qk_l2_norm": kind.qk_l2_norm,
    }
    if kind.use_transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(**shared)
    return get_gpt_layer_local_spec(normalization=kind.normalization, **shared)


def _mtp_spec(
    args: argparse.Namespace, config: TransformerConfig, spec: Any, vp_stage: int | None
) -> Any:
    model = read(ModelConfig, args)
    if not model.mtp_num_layers:
        return None
    kind = _LayerKind.of(model)
    if model.num_experts:
        spec = last_decoder_layer(config, **vars(kind))
    engine = kind.use_transformer_engine
    return get_gpt_mtp_block_spec(config, spec, use_transformer_engine=engine, vp_stage=vp_stage)


def build(args: argparse.Namespace, provider: ModelProvider = gpt_model) -> TrainedModel:
    """Build this rank's stages, wrap them for data parallelism and create their optimizer."""
    config = transformer_config(args)
    modules = build_modules(args, config, provider, sharded=_never_whole(args))
    attach_by_flags(modules, args)
    num_parameters = sum(p.numel() for module in modules for p in module.parameters())
    ddp = ddp_config(args, num_parameters)
    sharding = Sharding.of(args)
    if sharding.fsdp:
        _load_unsharded(args, config, modules)
    chunks = [
        zero.shard(config, ddp, module)
        if sharding.fsdp
        else DistributedDataParallel(
            config=config,
            ddp_config=ddp,
            module=module,
            # Later chunks communicate while earlier ones compute: buckets would only split that.
            disable_bucketing=index > 0 or sharding.gather_in_step,
        )
        for index, module in enumerate(modules)
    ]
    if read(TrainingOptions, args).data_parallel_random_init:
        for chunk in chunks:
            chunk.broadcast_params()
    optimizer = build_optimizer(args, chunks)
    connect(args, config, chunks, optimizer.scale_loss)
    return TrainedModel(config, chunks, optimizer, learning_rate_schedule(args, optimizer))


def _load_unsharded(
    args: argparse.Namespace, config: TransformerConfig, modules: list[Any]
) -> None:
    """Load formats that need unsharded stages, before Megatron-FSDP shards them."""
    if not read(CheckpointOptions, args).load:
        return  # a planned job reads no weights, those of its adapters' base neither
    if adapted(modules):
        load_base(args, BuiltModel(config, modules))
    elif needs_whole_stages(args):
        load(args, BuiltModel(config, modules))


def _never_whole(args: argparse.Namespace) -> bool:
    """Whether nothing needs the weights of a stage before Megatron-FSDP shards them."""
    adapters = read(LoraOptions, args)
    return Sharding.of(args).fsdp and not (
        adapters.lora_target_modules
        or adapters.lora_load
        or read(TrainingOptions, args).data_parallel_random_init
        or (read(CheckpointOptions, args).load and needs_whole_stages(args))
    )


def _replicas(parameter: torch.Tensor) -> Any:
    """The ranks that have the same parameter."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def build_modules(
    args: argparse.Namespace,
    config: TransformerConfig,
    provider: ModelProvider,
    *,
    sharded: bool = False,
) -> list[Any]:
    """This rank's stages, on its device and in its precision, without data parallelism.

    Args:
        args: final values.
        config: the model's configuration.
        provider: builds one stage.
        sharded: keep only shards of parameters (:mod:`mindspeed.training.sharded_init`).
    """
    modules = []
    for vp_stage in Parallel.of(args).vp_stages:
        ends = pipeline_ends(session.install().seams, vp_stage)
        with sharded_init.construction(_replicas) if sharded else nullcontext(), left_out(args):
            module = provider(args, config, *ends, vp_stage)
        if sharded:
            sharded_init.shard_rest(module, _replicas)
        module.model_type = ModelType.encoder_or_decoder
        module.vp_stage = vp_stage
        modules.append(module)
    for module in modules:
        for parameter in module.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        sharded_init.move(module, device.current().torch_device())
    if Precision.of(args).narrow:
        modules = [Float16Module(config, module) for module in modules]
    for module in modules:
        store_weights(args, module, device.current().torch_device())
    return modules


def build_optimizer(args: argparse.Namespace, chunks: list[Any]) -> MegatronOptimizer:
    """Megatron's optimizer; features choose its arguments and wrap it (seam ``optimizer``)."""
    config, ratio = optimizer_config(args), read(LoraOptions, args).lora_plus_lr_ratio
    shared = optimizer_overrides(config)
    if ratio != 1:
        with_rate(shared, config, ratio, "lora_plus", _is_faster)
    shared["use_gloo_process_groups"] = read(ParallelOptions, args).enable_gloo_process_groups
    if "muon" not in config.optimizer:
        return get_megatron_optimizer(config, chunks, **shared)
    by_layer = config.optimizer == "dist_muon"  # each rank updates some of the layers
    shared["layer_wise_distributed_optimizer"] = by_layer
    construction = session.install().seams.optimizer_construction
    return construction.build(muon_builder(), config, chunks, **shared)  # type: ignore[no-any-return]


def _is_faster(parameter: torch.Tensor, name: str) -> bool:
    """Whether LoRA+ gives a parameter the other rate (as peft's ``create_loraplus_optimizer``)."""
    return ".lora_B." in name or (is_adapter_weight(name) and parameter.dim() == 1)


def learning_rate_schedule(
    args: argparse.Namespace, optimizer: MegatronOptimizer
) -> OptimizerParamScheduler:
    """Learning rate and weight decay over samples."""
    schedule, options = Schedule.of(args), read(OptimizerOptions, args)
    rates = optimizer_config(args)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=options.lr_warmup_init,
        max_lr=rates.lr,
        min_lr=rates.min_lr,
        lr_warmup_steps=schedule.warmup,
        lr_decay_steps=schedule.decay,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.start_weight_decay,
        end_wd=options.end_weight_decay,
        wd_incr_steps=schedule.samples,
        wd_incr_style=options.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=options.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=options.override_opt_param_scheduler,
        wsd_decay_steps=schedule.last_decay,
        lr_wsd_decay_style=options.lr_wsd_decay_style,
    )


def connect(
    args: argparse.Namespace,
    config: TransformerConfig,
    chunks: list[Any],
    scale_loss: Callable[[torch.Tensor], torch.Tensor] | None,
) -> None:
    """Tell the schedule when to scale the loss, reduce gradients and gather parameters.

    Args:
        args: final values.
        config: the model's configuration, which the schedule reads.
        chunks: this rank's chunks, wrapped for data parallelism.
        scale_loss: from the loss (scalar, fp32) to the value whose gradient is taken.
    """
    config.grad_scale_func = scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if adapted(chunks):
        config.finalize_model_grads_func = summed_over_tp(finalize_model_grads)
    single = partial(_one_or_all, len(chunks) == 1)
    sharding = Sharding.of(args)
    if sharding.overlap_gradients:
        config.no_sync_func = single([chunk.no_sync for chunk in chunks])
        if sharding.align_gradients:
            config.grad_sync_func = single([chunk.start_grad_sync for chunk in chunks])
    if sharding.overlap_parameters and sharding.align_parameters:
        config.param_sync_func = single([chunk.start_param_sync for chunk in chunks])


def _one_or_all(single: bool, functions: list[Any]) -> Any:
    return functions[0] if single else functions


def load_base(args: argparse.Namespace, model: BuiltModel) -> None:
    """Load the frozen model, and adapters that are new or have no optimizer. Collective."""
    load(changed(args, finetune=True, exit_on_missing_checkpoint=True), model)
    adapter = read(LoraOptions, args).lora_load
    if adapter is None:
        initial.begin(model.chunks)
    elif is_peft(adapter):
        load_adapter(model.chunks, adapter)


def resume_adapters(args: argparse.Namespace, model: TrainedModel) -> Loaded | None:
    """Load the frozen model, then the adapters of ``--lora-load``. Collective.

    Returns:
        Where training continues; None if the adapters are new.
    """
    if not is_sharded(model.chunks[0]):  # there it was loaded while it was whole
        load_base(args, model)
        model.optimizer.reload_model_params()
    adapter = read(LoraOptions, args).lora_load
    if adapter is None or is_peft(adapter):
        return None
    root, iteration = root_and_iteration(adapter)
    own = changed(args, load=root, ckpt_step=iteration, exit_on_missing_checkpoint=True)
    loaded = load(own, model, adapter=True)
    for module in model.modules:
        initial.take_out(module)
    return loaded


def left_out(args: argparse.Namespace) -> AbstractContextManager[Any]:
    """A region that builds linear layers without weights, if they get fewer bits."""
    return quantized_weights() if read(LoraOptions, args).base_weights else nullcontext()


def store_weights(args: argparse.Namespace, module: torch.nn.Module, place: torch.device) -> None:
    """Give the linear layers of a stage their weights, in the form of the flags."""
    adapters = read(LoraOptions, args)
    if adapters.base_weights:
        form = QuantizedFormat(adapters.base_weights, adapters.double_quantization)
        store(module, form, place)
