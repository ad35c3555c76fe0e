"""A training script for GPUs, over megatron.core alone, as its users write them.

A small ``pretrain_gpt.py`` for where only the wheel is installed: data set, model with Transformer
Engine layers, data parallelism, distributed optimizer, schedule. It knows nothing of mindspeed:
``test_core_script.py`` adds the import line and runs it.
"""

import argparse
import json
import os
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tokenizers.text.libraries import NullTokenizer
from megatron.core.transformer import TransformerConfig

SEED, VOCABULARY, LENGTH, MICRO_BATCH, GLOBAL_BATCH, STEPS = 1234, 1000, 64, 2, 8, 6


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    parser.add_argument("--losses", required=True, help="file for the losses and gradient norms")
    return parser.parse_args()


def initialize(args):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    )
    seed = SEED + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    init_num_microbatches_calculator(
        torch.distributed.get_rank(),
        None,
        GLOBAL_BATCH,
        MICRO_BATCH,
        parallel_state.get_data_parallel_world_size(),
    )


def build_model(args):
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=176,
        num_attention_heads=8,
        num_query_groups=2,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        sequence_parallel=args.tensor_model_parallel_size > 1,
        pipeline_dtype=torch.float32,
        finalize_model_grads_func=finalize_model_grads,
    )
    multiple = 128 * args.tensor_model_parallel_size
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=-(-VOCABULARY // multiple) * multiple,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    ).cuda()
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(config, ddp, model)


def build_optimizer(args, model):
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        min_lr=0.0,
        weight_decay=0.01,
        clip_grad=1.0,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    overrides = get_standard_config_overrides(config=config)  # no weight decay of norms
    optimizer = get_megatron_optimizer(config, [model], config_overrides=overrides)
    model.config.grad_scale_func = optimizer.scale_loss
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=0.0,
        lr_warmup_steps=0,
        lr_decay_steps=STEPS * GLOBAL_BATCH,
        lr_decay_style="linear",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=STEPS * GLOBAL_BATCH,
        wd_incr_style="constant",
    )
    return optimizer, schedule


def build_dataset():
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=None,
        split="969,30,1",
        tokenizer=NullTokenizer(VOCABULARY),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    sizes = [STEPS * GLOBAL_BATCH, None, None]
    return BlendedMegatronDatasetBuilder(MockGPTDataset, sizes, lambda: True, config).build()[0]


def batches(dataset):
    rank = parallel_state.get_data_parallel_rank()
    stride = MICRO_BATCH * parallel_state.get_data_parallel_world_size()
    for start in range(rank * MICRO_BATCH, STEPS * GLOBAL_BATCH, stride):
        samples = [dataset[index] for index in range(start, start + MICRO_BATCH)]
        yield {
            name: torch.stack([sample[name] for sample in samples]).cuda(non_blocking=True)
            for name in ("tokens", "labels", "loss_mask", "position_ids")
        }


def forward_step(iterator, model):
    batch = next(iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(mean_loss, batch["loss_mask"])


def mean_loss(loss_mask, losses):
    mask = loss_mask.view(-1)
    loss, tokens = torch.sum(losses.view(-1) * mask), mask.sum()
    return loss, tokens.int(), {"lm loss": torch.stack((loss.detach(), tokens))}


def main():
    args = parse_arguments()
    initialize(args)
    model = build_model(args)
    optimizer, schedule = build_optimizer(args, model)
    forward_backward = get_forward_backward_func()
    iterator = batches(build_dataset())
    printed = []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reports = forward_backward(
            forward_step_func=forward_step,
            data_iterator=iterator,
            model=model,
            num_microbatches=get_num_microbatches(),
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        schedule.step(GLOBAL_BATCH)
        if reports:
            loss = sum(report["lm loss"] for report in reports)
            torch.distributed.all_reduce(loss, group=parallel_state.get_data_parallel_group())
            printed.append(((loss[0] / loss[1]).item(), norm))
    if printed and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        with open(args.losses, "w") as file:
            json.dump(printed, file)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
