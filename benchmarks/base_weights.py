"""Frozen weights in fewer bits: bytes of a weight, seconds of a layer forward and backward.

    python benchmarks/base_weights.py --hidden 2048 --tokens 512
    python benchmarks/base_weights.py --device cuda --hidden 8192 --tokens 4096

A linear layer ``[hidden, hidden]`` of ``--base-weights``: its product and the gradient of its
input, as adapters need them, beside the same layer in bf16 and, where bitsandbytes is installed,
beside its 4-bit layer. Seconds are medians of calls that take turns, so that all meet the same
machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from mindspeed.ops.quantized_weight import (
    FORMATS,
    quantize_scales,
    quantize_weight,
    quantized_matmul,
)

RESULTS = Path(__file__).parent / "results"
Step = Callable[[], None]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="default: results/DEVICE-base-weights.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    size, where = options.hidden, options.device
    weight = torch.randn(size, size, device=where, dtype=torch.bfloat16) / size**0.5
    x = torch.randn(options.tokens, size, device=where, dtype=torch.bfloat16)
    steps: dict[str, tuple[float, Step]] = {"bf16": (16.0, lambda: _dense(x, weight))}
    for form in FORMATS:
        codes, scales = quantize_weight(weight, form)
        parts = quantize_scales(scales) if form == "nf4" else (scales,)
        bits = 8 * sum(part.nbytes for part in (codes, *parts)) / weight.numel()
        steps[form] = bits, lambda c=codes, s=scales, f=form: _quantized(x, c, s, f)  # type: ignore[misc]
    theirs = _bitsandbytes(x, weight)
    if theirs is not None:
        steps["bitsandbytes nf4"] = theirs
    seconds = _take_turns({name: step for name, (_, step) in steps.items()}, options.rounds, where)
    rows = [
        {
            "weights": name,
            "bits_per_weight": round(bits, 4),
            "seconds": round(seconds[name], 6),
            "times_bf16": round(seconds[name] / seconds["bf16"], 3),
        }
        for name, (bits, _) in steps.items()
    ]
    for row in rows:
        print("{:18} {:8.4f} bits {:10.6f} s {:8.3f} times bf16".format(*row.values()))
    path = options.json or RESULTS / f"{where}-base-weights.json"
    found = {
        "hidden": size,
        "tokens": options.tokens,
        "threads": options.threads,
        "torch": torch.__version__,
        "rows": rows,
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _dense(x: Tensor, weight: Tensor) -> None:
    y = x @ weight.t()
    y @ weight


def _quantized(x: Tensor, codes: Tensor, scales: Tensor, form: str) -> None:
    y = quantized_matmul(x, codes, scales, form)
    quantized_matmul(y, codes, scales, form, transposed=True)


def _bitsandbytes(x: Tensor, weight: Tensor) -> tuple[float, Step] | None:
    """The 4-bit layer of bitsandbytes with double quantisation; None if it is not installed."""
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError:
        return None
    rows, columns = weight.shape
    layer = Linear4bit(
        columns, rows, bias=False, compute_dtype=x.dtype, compress_statistics=True, quant_type="nf4"
    )
    layer.weight = Params4bit(
        weight.float().cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
    )
    layer = layer.to(x.device)
    state = layer.weight.quant_state
    stored = layer.weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes

    def step() -> None:
        inputs = x.detach().requires_grad_()
        y = layer(inputs)
        y.backward(y.detach())

    return 8 * stored / weight.numel(), step


def _take_turns(steps: dict[str, Step], rounds: int, where: str) -> dict[str, float]:
    """Median seconds of each step; all run once in each round."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 1):  # the first round warms up
        for name, step in steps.items():
            start = time.perf_counter()
            with torch.set_grad_enabled(name.startswith("bitsandbytes")):
                step()
            if where == "cuda":
                torch.cuda.synchronize()
            found[name].append(time.perf_counter() - start)
    return {name: median(times[1:]) for name, times in found.items()}


if __name__ == "__main__":
    main()
