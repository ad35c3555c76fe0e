"""Load a Hugging Face model with a bridge to Megatron, train it and export it, in fp32.

torchrun --nproc_per_node 2 bridge_updates.py mbridge MODEL --layout tensor_model_parallel_size=2
python bridge_updates.py mbridge MODEL --plain

``--plain`` is transformers and torch. Otherwise logits must be those of ``--equal-to``, the
weights exported before the training those of the model, bit for bit, and after it those of
``--equal-to``. Writes the weights in Hugging Face's names to ``--output``, next to it as JSON the
losses and gradient norms of five steps of Adam.
"""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from updates import refuse_others, saved_weights, stepped, write

import mindspeed.megatron_adaptor  # noqa: F401 (before anything of Megatron)
from mindspeed import device

device.treat_as_megatron("mbridge", "mcore_bridge", "megatron.bridge")

SEQUENCES, LENGTH, TOGETHER, STEPS = 8, 24, 2, 5
RATE, DECAY, EPSILON = 1e-3, 0.01, 1e-5
"""Without a large epsilon the rounding of a tiny gradient decides the sign of its step."""
ADAPTERS = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none"}
UNBIASED = {"moe_router_load_balancing_type": "none", "moe_router_bias_update_rate": 0.0}
"""transformers has no loss that balances experts, and never changes their bias."""
Export = Callable[[], Iterable[tuple[str, torch.Tensor]]]


def batch(vocabulary: int) -> torch.Tensor:
    """Token ids ``[sequences, length + 1]``."""
    drawn = torch.Generator().manual_seed(3)
    return torch.randint(4, vocabulary, (SEQUENCES, LENGTH + 1), generator=drawn)


def mbridge(path: Path, layout: dict[str, int], adapters: Path | None) -> tuple[list[Any], Export]:
    """Model chunks of this rank with weights, and their export."""
    from mbridge import AutoBridge

    config = AutoConfig.from_pretrained(path)
    # mbridge/core/llm_bridge.py:119 reads it where transformers 4 had it.
    config.rope_theta = config.rope_parameters["rope_theta"]
    bridge = AutoBridge.from_config(config, dtype=torch.float32)
    bridge.set_extra_args(attention_backend="unfused", **UNBIASED)
    chunks = bridge.get_model(weight_path=str(path), bf16=False)
    return chunks, lambda: bridge.export_weights(chunks)


def mcore_bridge(
    path: Path, layout: dict[str, int], adapters: Path | None
) -> tuple[list[Any], Export]:
    """The same with mcore-bridge, which also has adapters."""
    from mcore_bridge import ModelConfig, get_mcore_model, hf_to_mcore_config

    of_model = hf_to_mcore_config(AutoConfig.from_pretrained(path))
    config = ModelConfig(
        **of_model | UNBIASED | layout,
        sequence_parallel=layout.get("tensor_model_parallel_size", 1) > 1,
        params_dtype=torch.float32,
        attention_backend="unfused",
        overlap_p2p_comm=False,  # its default; Megatron's schedule of one chunk refuses it
    )
    chunks = [chunk.to(device.current().torch_device()) for chunk in get_mcore_model(config)]
    config.bridge.load_weights(chunks, str(path))
    if adapters is None:
        return chunks, lambda: config.bridge.export_weights(chunks)
    from peft import LoraConfig, get_peft_model

    targets = ["linear_proj", "linear_fc2"]
    chunks = [get_peft_model(one, LoraConfig(target_modules=targets, **ADAPTERS)) for one in chunks]
    config.bridge.load_weights(chunks, str(adapters), peft_format=True)
    return chunks, lambda: config.bridge.export_weights(chunks, peft_format=True)


def megatron_bridge(
    path: Path, layout: dict[str, int], adapters: Path | None
) -> tuple[list[Any], Export]:
    """The same with Megatron-Bridge."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(path, torch_dtype=torch.float32)
    provider = bridge.to_megatron_provider()
    options = {
        "sequence_parallel": layout.get("tensor_model_parallel_size", 1) > 1,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "bf16": False,
        "variable_seq_lengths": False,
        "seq_length": LENGTH,
    }
    for name, value in (options | UNBIASED | layout).items():
        setattr(provider, name, value)
    provider.finalize()
    chunks = provider.provide_distributed_model(wrap_with_ddp=False)
    return chunks, lambda: bridge.export_hf_weights(chunks, cpu=True, show_progress=False)


BRIDGES = {"mbridge": mbridge, "mcore-bridge": mcore_bridge, "megatron-bridge": megatron_bridge}


def with_bridge(args: argparse.Namespace) -> None:
    """Write what the bridge's model computes."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    here = device.current()
    here.set_index(int(os.environ["LOCAL_RANK"]) % here.count())
    dist.init_process_group(here.backend)
    layout = {name: int(size) for name, size in (pair.split("=") for pair in args.layout)}
    parallel_state.initialize_model_parallel(**layout)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    chunks, export = BRIDGES[args.bridge](args.model, layout, args.adapters)
    source = args.adapters / "adapter_model.safetensors" if args.adapters else None
    refuse_others(collected(export), load_file(source or args.model / "model.safetensors"), 0.0)

    replicas = parallel_state.get_data_parallel_world_size()
    mine = batch(AutoConfig.from_pretrained(args.model).vocab_size).chunk(replicas)
    tokens = mine[parallel_state.get_data_parallel_rank()].to(here.torch_device())
    positions = torch.arange(LENGTH, device=here.torch_device()).expand(TOGETHER, LENGTH)
    config = get_model_config(chunks[0])

    def loss_of(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        if non_loss_data:
            return tensor_parallel.gather_from_tensor_model_parallel_region(output)
        return output.mean(), output.detach().mean()

    def run(models: list[Any], logits: bool) -> list[torch.Tensor]:
        def forward_step(data: Iterator[torch.Tensor], model: Any) -> tuple[Any, Any]:
            ids = next(data)
            labels = {} if logits else {"labels": ids[:, 1:].contiguous()}
            given = ids[:, :-1].contiguous()
            return model(given, position_ids=positions, attention_mask=None, **labels), loss_of

        found: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(tokens.split(TOGETHER)),
            model=models,
            num_microbatches=len(tokens) // TOGETHER,
            seq_length=LENGTH,
            micro_batch_size=TOGETHER,
            forward_only=logits,
            collect_non_loss_data=logits,
        )
        return found

    with torch.no_grad():
        logits = run(chunks, logits=True)
    if logits:
        expected = torch.load(args.equal_to.with_suffix(".logits"))
        found = torch.cat(logits).cpu()
        part = expected.chunk(replicas)[parallel_state.get_data_parallel_rank()]
        if (error := (found - part).abs().max() / part.abs().max()) > 1e-5:
            raise ValueError(f"logits differ by {error:.1e}, relative, from plain torch")

    wrapped = [
        DistributedDataParallel(
            config, DistributedDataParallelConfig(use_distributed_optimizer=True), chunk
        )
        for chunk in chunks
    ]
    rule = {"lr": RATE, "weight_decay": DECAY, "adam_eps": EPSILON}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**rule, use_distributed_optimizer=True), wrapped
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    numbers = []
    for _ in range(STEPS):
        for one in wrapped:
            one.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run(wrapped, logits=False)
        _, norm, _ = optimizer.step()
        if losses:
            loss = torch.stack(losses).mean()
            dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
            numbers += [loss.item() / replicas, float(norm)]
    weights = collected(export)
    refuse_others(weights, torch.load(args.equal_to), 1e-2 * STEPS * RATE)
    if numbers:
        write(args.output, numbers, weights)


def collected(export: Export) -> dict[str, torch.Tensor]:
    """Exported weights, which reuse memory, on the host."""
    return {name: weight.detach().cpu().clone() for name, weight in export()}


def plain(args: argparse.Namespace) -> None:
    """Write what transformers and torch compute, and with ``--adapters`` a start of adapters."""
    trained = AutoModelForCausalLM.from_pretrained(
        args.model, attn_implementation="eager", torch_dtype=torch.float32
    )
    if args.adapters:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        targets = {"target_modules": ["o_proj", "down_proj"], "task_type": "CAUSAL_LM"}
        trained = get_peft_model(
            trained, LoraConfig(init_lora_weights=False, **targets, **ADAPTERS)
        )
        trained.save_pretrained(args.adapters)
    tokens = batch(trained.config.vocab_size)

    def logits() -> torch.Tensor:
        return trained(input_ids=tokens[:, :-1]).logits

    with torch.no_grad():
        torch.save(logits(), args.output.with_suffix(".logits"))
    # Norms decay, too: that they do not is up to Megatron's scheduler, which does not run.
    optimizer = torch.optim.AdamW(trained.parameters(), RATE, eps=EPSILON, weight_decay=DECAY)

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits().flatten(0, 1), tokens[:, 1:].flatten())

    numbers = stepped(trained, optimizer, loss, STEPS)
    write(
        args.output, numbers, saved_weights(trained, "adapter_model" if args.adapters else "model")
    )


def main() -> None:
    """Run one bridge."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("bridge", choices=BRIDGES)
    parser.add_argument("model", type=Path, help="folder of a Hugging Face model")
    parser.add_argument("--layout", nargs="*", default=[], metavar="SIZE=N")
    parser.add_argument("--adapters", type=Path, metavar="DIR", help="LoRA; --plain writes them")
    parser.add_argument("--plain", action="store_true", help="transformers and torch")
    parser.add_argument("--equal-to", type=Path, metavar="FILE", help="an --output of --plain")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    plain(args) if args.plain else with_bridge(args)


if __name__ == "__main__":
    main()
