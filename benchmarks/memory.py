"""Activation memory and step time: the library's flags, Megatron's recomputation, torch's.

    python benchmarks/memory.py [--layers 4] [--hidden 512] [--sequence 2048] [--out FILE]
    python benchmarks/memory.py --quick

One LLaMA-like bf16 model with fused operators; every way of saving memory trains it from the same
weights. For each: bytes that autograd keeps on the device and on the host at the end of forward,
peak bytes of the accelerator (not on a CPU), seconds of a step (median, forward and backward), and
whether loss and gradients equal, bit for bit, those of the model that keeps everything. Writes
FILE.json and FILE.png.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mindspeed
import mindspeed.megatron_adaptor  # the line that a script needs
from mindspeed import device, session
from mindspeed.instruments import saved_for_backward

FUSED = {
    "use_fused_rmsnorm": True,
    "use_fused_swiglu": True,
    "use_fused_rotary_pos_emb": True,
    "use_flash_attn": True,
}
SELECTIVE = {"recompute_granularity": "selective"}
# Name -> flags of mindspeed, options of Megatron's config.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "keep everything": ({}, {}),
    "--recompute-norm": ({"recompute_norm": True}, {}),
    "--recompute-activation-function": ({"recompute_activation_function": True}, {}),
    "--swap-attention": ({"swap_attention": True}, {}),
    "both": ({"recompute_norm": True, "recompute_activation_function": True}, {}),
    "plan: attention on the host, mlp recomputed": (
        {"activation_plan": {"all": {"self_attention": "offload", "mlp": "recompute"}}},
        {},
    ),
    "plan: layers recomputed": ({"activation_plan": {"all": {"layer": "recompute"}}}, {}),
    "Megatron: selective core_attn": ({}, SELECTIVE | {"recompute_modules": ["core_attn"]}),
    "Megatron: selective mlp": ({}, SELECTIVE | {"recompute_modules": ["mlp"]}),
    "Megatron: full": (
        {},
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
    "torch: checkpoint of every layer": ({}, {}),
}


def main() -> None:
    """Measure every way, print a table, write JSON and a picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512, help="FFN: 2.75 times")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two steps")
    parser.add_argument("--out", type=Path, default=Path("memory"), help="without suffix")
    args = parser.parse_args()
    if args.quick:
        args.layers, args.hidden, args.sequence, args.steps = 2, 64, 32, 2
    start()
    rows, truth = [], None
    with contextlib.suppress(KeyboardInterrupt):  # what was measured until then is written
        for name in WAYS:
            row, results = measure(name, args)
            truth = results if truth is None else truth
            row["equal"] = all(map(torch.equal, results, truth))
            rows.append(row)
            print_row(row)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "device": device.current().name,
        "model": {name: getattr(args, name) for name in ("layers", "hidden", "sequence", "batch")},
        "rows": rows,
    }
    args.out.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(rows, args.out.with_suffix(".png"))


def start() -> None:
    """One rank."""
    from megatron.core import parallel_state

    dist.init_process_group(device.current().backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def measure(name: str, args: argparse.Namespace) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """One way: its figures, and loss and gradients of a step."""
    flags, options = WAYS[name]
    with features(flags, args):
        model = build(args, options)
    if name.startswith("torch"):
        checkpoint_layers(model)
    step = step_of(model, args)
    with saved_for_backward(model) as saved:
        loss = step.forward()
        kept, host = saved.live_bytes, saved.live_host_bytes
    loss.backward()
    results = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None:
        torch.accelerator.reset_peak_memory_stats()
    seconds = [step.timed() for _ in range(args.steps)]
    peak = torch.accelerator.max_memory_allocated() if accelerator is not None else None
    session.current().detach_features()
    row = {
        "way": name,
        "device_bytes": kept,
        "host_bytes": host,
        "peak_bytes": peak,
        "seconds": statistics.median(seconds),
    }
    return row, results


class features:
    """Configure the flags; a plan is written to a file, where its flag wants it."""

    def __init__(self, flags: dict[str, Any], args: argparse.Namespace) -> None:
        self._flags = dict(FUSED | flags)
        plan = self._flags.get("activation_plan")
        if plan is not None:
            file = args.out.with_suffix(".plan.json")
            file.write_text(json.dumps(plan))
            self._flags["activation_plan"] = str(file)

    def __enter__(self) -> None:
        mindspeed.configure(**self._flags)

    def __exit__(self, *error: object) -> None:
        if plan := self._flags.get("activation_plan"):
            Path(plan).unlink()


def build(args: argparse.Namespace, options: dict[str, Any]) -> torch.nn.Module:
    """The model, with the same weights every time."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        ffn_hidden_size=args.hidden * 11 // 4,
        num_attention_heads=8,
        num_query_groups=4,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        bias_activation_fusion=True,
        **options,
    )
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    model = GPTModel(config, layers, 1024, args.sequence, position_embedding_type="rope")
    return model.to(device.current().torch_device(), torch.bfloat16)


def checkpoint_layers(model: Any) -> None:
    """torch's activation checkpointing, not re-entrant, of every layer."""
    from torch.utils.checkpoint import checkpoint

    def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
        # Tensors among keyword arguments are kept outside of autograd, where nobody counts them.
        def run(hidden_states: torch.Tensor, **options: Any) -> Any:
            return checkpoint(forward, hidden_states, use_reentrant=False, **options)

        return run

    for layer in model.decoder.layers:
        layer.forward = checkpointed(layer.forward)


class step_of:
    """Forward and backward of one batch."""

    def __init__(self, model: torch.nn.Module, args: argparse.Namespace) -> None:
        self._model = model
        place = device.current().torch_device()
        shape = (args.batch, args.sequence)
        self._tokens = torch.randint(1024, shape, generator=torch.Generator().manual_seed(1))
        self._tokens = self._tokens.to(place)
        self._positions = torch.arange(args.sequence, device=place).expand(shape)

    def forward(self) -> torch.Tensor:
        """The loss."""
        return self._model(self._tokens, self._positions, None, labels=self._tokens).mean()

    def timed(self) -> float:
        """Seconds of a step."""
        self._model.zero_grad()
        device.current().synchronize()
        begin = time.perf_counter()
        self.forward().backward()
        device.current().synchronize()
        return time.perf_counter() - begin


def print_row(row: dict[str, Any]) -> None:
    """One line of the table."""
    mib = 1 << 20
    peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / mib:9.1f} MiB peak"
    equal = "equal" if row["equal"] else "DIFFERENT"
    print(
        f"{row['way']:<46}{row['device_bytes'] / mib:9.1f} MiB{row['host_bytes'] / mib:9.1f} MiB "
        f"on host {peak}{row['seconds']:8.3f} s  {equal}",
        flush=True,
    )


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Bytes against time, one point for each way."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    base = rows[0]
    for row in rows:
        ours = row["way"].startswith(("--", "plan", "both"))
        x = row["device_bytes"] / base["device_bytes"]
        y = row["seconds"] / base["seconds"]
        axes.scatter(x, y, color="tab:blue" if ours else "tab:gray")
        axes.annotate(row["way"], (x, y), fontsize=7, xytext=(4, 3), textcoords="offset points")
    axes.set_xlabel("activation bytes on the device, relative to keeping everything")
    axes.set_ylabel("time of a step, relative")
    axes.set_xlim(0, 1.35)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    main()
