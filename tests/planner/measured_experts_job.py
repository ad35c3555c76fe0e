"""Measures the layer of experts of a tiny job on the ranks of a pool, by an injected clock."""

from __future__ import annotations

from types import SimpleNamespace

JOB = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --swiglu "
    "--seq-length 32 --micro-batch-size 1 --global-batch-size 2 --num-experts 8 "
    "--moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-layer-freq [0,1] --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --disable-bias-linear "
    "--moe-shared-expert-intermediate-size 48 --tokenizer-type NullTokenizer --vocab-size 1000"
)


class Clock:
    """Each program takes a second less than the one before; each runs once."""

    def __init__(self) -> None:
        self._left = 100.0

    def time(self, run) -> SimpleNamespace:
        run()
        self._left -= 1
        return SimpleNamespace(seconds=self._left)


def run(out: str) -> None:
    """Run the command on this rank."""
    from mindspeed.cli import main
    from mindspeed.planner.cluster import calibrate

    before = calibrate.watch_of
    calibrate.watch_of = lambda settings: Clock()
    try:
        assert main.dispatch("calibrate", ["--experts", out, "--", *JOB.split()]) == 0
    finally:
        calibrate.watch_of = before
