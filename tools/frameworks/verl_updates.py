"""Update an actor, a critic or a reference with verl's Megatron engine, or in plain torch, in fp32.

torchrun --nproc_per_node 2 verl_updates.py ROLE MODEL --layout tensor_model_parallel_size=2
python verl_updates.py ROLE MODEL --plain

Writes the weights in Hugging Face's names, as a rollout gets them, to ``--output``, and next to it
as JSON the losses and gradient norms of three updates, or the log-probabilities of a reference.
Parameters and optimizer are offloaded between the updates. The third update runs twice: the second
time after the checkpoint of the second one was loaded, which must change nothing.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM
from updates import refuse_others, saved_weights, stepped, write

import mindspeed.megatron_adaptor  # noqa: F401 (before anything of Megatron)
from mindspeed.device import treat_as_megatron

treat_as_megatron("verl", "mbridge")

SEQUENCES, LENGTH, RESPONSE, STEPS = 8, 24, 12, 3
RATE, DECAY, CLIP_RATIO, CLIP_VALUE = 1e-3, 0.01, 0.2, 0.5


def batch(vocabulary: int) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, responses padded on the right, and what a rollout adds."""
    drawn = torch.Generator().manual_seed(3)
    shape = (SEQUENCES, RESPONSE)

    def numbers() -> torch.Tensor:
        return torch.rand(shape, generator=drawn)

    tokens = torch.randint(4, vocabulary, (SEQUENCES, LENGTH), generator=drawn)
    prompts = torch.randint(4, LENGTH - RESPONSE + 1, (SEQUENCES, 1), generator=drawn)
    responses = torch.randint(4, RESPONSE + 1, (SEQUENCES, 1), generator=drawn)
    places = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    start = LENGTH - RESPONSE
    mask = ((places >= start - prompts) & (places < start + responses)).long()
    return {
        "input_ids": tokens * mask,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "prompts": (tokens * mask)[:, :start],
        "responses": (tokens * mask)[:, start:],
        "response_mask": mask[:, start:],
        "old_log_probs": -5 - numbers(),
        "advantages": numbers() - 0.5,
        "values": numbers(),
        "returns": numbers() * 2,
    }


def with_verl(args: argparse.Namespace) -> None:
    """Write what verl's worker computes."""
    from verl import DataProto
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.utils.distributed import initialize_global_process_group
    from verl.workers.config import (
        ActorConfig,
        CriticConfig,
        HFModelConfig,
        McoreEngineConfig,
        McoreOptimizerConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss, value_loss
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    role, output = args.role, args.output
    layout = {name: int(size) for name, size in (pair.split("=") for pair in args.layout)}
    options = {name: yaml.safe_load(value) for name, value in (o.split("=") for o in args.options)}
    initialize_global_process_group()
    engine = McoreEngineConfig(
        vanilla_mbridge=True,
        forward_only=role == "reference",
        param_offload=True,
        optimizer_offload=True,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        infer_micro_batch_size_per_gpu=2,
        override_transformer_config={"attention_backend": "unfused", **options},
        **layout,
    )
    object.__setattr__(engine, "dtype", "float32")  # its own check knows half precision alone
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model" if role == "critic" else "language_model",
            model_config=HFModelConfig(path=args.model, use_remove_padding=not args.padded),
            engine_config=engine,
            optimizer_config=McoreOptimizerConfig(
                lr=RATE, weight_decay=DECAY, lr_decay_style="constant", lr_decay_steps=STEPS
            ),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    tensors = batch(worker.model_config.hf_config.vocab_size)
    data = left_right_2_no_padding(DataProto.from_single_dict(tensors).to_tensordict())
    tu.assign_non_tensor(data, global_batch_size=SEQUENCES, temperature=1.0)
    size = worker.engine.get_data_parallel_size()
    data = tu.chunk_tensordict(data, size)[worker.engine.get_data_parallel_rank()]
    if role == "reference":
        tu.assign_non_tensor(data, compute_loss=False)
        found = worker.infer_batch(data)
        if found is not None:
            padded = no_padding_2_padding(found["log_probs"], data) * data["response_mask"]
            write(output, padded.flatten().tolist())
        return
    settings = {"strategy": "megatron", "ppo_micro_batch_size_per_gpu": 2}
    if role == "critic":
        loss = partial(value_loss, config=CriticConfig(cliprange_value=CLIP_VALUE, **settings))
    else:
        loss = partial(ppo_loss, config=ActorConfig(rollout_n=1, clip_ratio=CLIP_RATIO, **settings))
    worker.set_loss_fn(loss)
    checkpoint = str(output.with_suffix(".checkpoint"))

    def update() -> list[float]:
        found = worker.train_batch(data.clone())
        metrics = {} if found is None else tu.get(found, "metrics")
        return [metrics[name] for name in ("loss", "grad_norm") if name in metrics]

    numbers = update() + update()
    worker.save_checkpoint(checkpoint)
    third = update()
    worker.load_checkpoint(checkpoint, del_local_after_load=False)
    if update() != third:
        raise ValueError("the update after loading differs from the one before")
    exported, _ = worker.engine.get_per_tensor_param()
    weights = {name: weight.clone() for name, weight in exported}
    if args.equal_to:
        # Where a gradient is next to zero, its rounding decides the sign of Adam's step.
        refuse_others(weights, torch.load(args.equal_to), 0.1 * STEPS * RATE)
    if third:
        write(output, numbers + third, weights)


def plain(role: str, model: str, output: Path) -> None:
    """Write what transformers and torch compute."""
    trained = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    data = batch(trained.config.vocab_size)
    mask, start = data["response_mask"].bool(), LENGTH - RESPONSE

    def log_probabilities() -> torch.Tensor:
        names = ("input_ids", "attention_mask", "position_ids")
        logits = trained(**{name: data[name] for name in names}).logits[:, start - 1 : -1]
        return logits.log_softmax(-1).gather(-1, data["responses"][..., None])[..., 0]

    if role == "reference":
        with torch.no_grad():
            write(output, (log_probabilities() * mask).flatten().tolist())
        return
    groups = [
        {"params": [p for p in trained.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in trained.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, RATE)

    def loss() -> torch.Tensor:
        ratio = (log_probabilities() - data["old_log_probs"]).exp()
        gain, clipped = data["advantages"], ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO)
        losses = torch.maximum(-gain * ratio, -gain * clipped)
        losses = torch.where(gain < 0, torch.minimum(losses, -gain * 3), losses)  # dual clip
        return losses[mask].mean()

    write(output, stepped(trained, optimizer, loss, STEPS), saved_weights(trained))


def main() -> None:
    """Run one role and print its numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("role", choices=("actor", "critic", "reference"))
    parser.add_argument("model", help="folder of a Hugging Face model")
    parser.add_argument("--layout", nargs="*", default=[], metavar="SIZE=N")
    parser.add_argument("--options", nargs="*", default=[], metavar="OPTION=VALUE")
    parser.add_argument("--padded", action="store_true", help="padded instead of packed")
    parser.add_argument("--plain", action="store_true", help="transformers and torch")
    parser.add_argument("--equal-to", metavar="FILE", help="an --output of --plain")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    if args.plain:
        plain(args.role, args.model, args.output)
        return
    with_verl(args)


if __name__ == "__main__":
    main()
