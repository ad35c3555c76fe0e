"""Flags of earlier versions and other trainers: aliases, and flags without effect here.

An alias means exactly what its flag means. An ignored flag changes no result: it chose what is the
only way today, tunes speed or memory by a method that is not part of this trainer, or controls a
service of Megatron-LM's (restarts, stragglers, NVIDIA's loggers). They are accepted so that old
scripts run, and rank 0 says once at the start which have no effect and why. A flag that changes
results is never ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

ALIASES = {
    "--layernorm-epsilon": "--norm-epsilon",
    "--no-add-bias-linear": "--disable-bias-linear",
    "--local_rank": "--local-rank",
    "--add-gate": "--swiglu",
    "--no-add-gate": "--no-swiglu",
    "--batch-size": "--micro-batch-size",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--encoder-num-layers": "--num-layers",
    "--encoder-seq-length": "--seq-length",
    "--muon-no-split-qkv": "--no-muon-split-qkv",
}

# Why a flag has no effect -> the flags, without a value, with one, and with several.
_REASONS: dict[str, tuple[str, str, str]] = {
    "it is the only way here": (
        """
        --no-contiguous-buffers-in-local-ddp --use-mcore-models --use-dist-ckpt
        --no-create-attention-mask-in-dataloader
        --auto-detect-ckpt-format --no-scatter-gather-tensors-in-pipeline --log-throughput
        --log-timers-to-tensorboard --exit-signal-handler-for-dataloader
        --tokenizer-hf-use-fast --disable-msc --ckpt-fully-parallel-load
        """,
        "--DDP-impl --data-impl --dist-ckpt-format --lazy-mpu-init",
        "",
    ),
    "positions are what --position-embedding-type says": ("--no-position-embedding", "", ""),
    "padding always follows the samples, so causal attention does not see it": (
        "--padding-attention-mask",
        "",
        "",
    ),
    "--deepspeed_config says all there is": ("--deepspeed", "", ""),
    "it tunes or watches a service of Megatron-LM's that is not part of this trainer": (
        """
        --no-one-logger --onnx-safe --bert-no-binary-head --no-manual-gc-eval
        --disable-manual-gc-eval --disable-jit-fuser --ckpt-assume-constant-structure
        --use-persistent-ckpt-worker --dataloader-fast-cache-load
        --dataloader-defer-npy-index-mmap --legacy-tokenizer --log-progress
        --log-device-memory-used --log-world-size-to-tensorboard --log-energy --log-straggler
        --disable-straggler-on-startup --run-workload-inspector-server --one-logger-async
        --enable-experimental --check-for-spiky-loss --enable-ft-package --calc-ft-timeouts
        --adlr-autoresume --use-sharp
        """,
        """
        --timing-log-level --timing-log-option --empty-unused-memory-level
        --check-weight-hash-across-dp-replicas-interval --train-sync-interval
        --distributed-timeout-seconds-after-init --sharp-enabled-group --log-memory-interval
        --logging-level --straggler-ctrlr-port --straggler-minmax-count --one-logger-project
        --one-logger-run-name --app-tag-run-name --app-tag-run-version --rerun-mode
        --ft-num-warmup-iters --adlr-autoresume-interval
        """,
        "--high-priority-stream-groups",
    ),
}

# Spelling -> number of values, or argparse's "*".
IGNORED: dict[str, int | str] = {}
# Spelling -> why it has no effect.
WHY: dict[str, str] = {}
_COUNTS: tuple[int | str, ...] = (0, 1, "*")
for _reason, _flags in _REASONS.items():
    for _spellings, _count in zip(_flags, _COUNTS, strict=True):
        IGNORED |= dict.fromkeys(_spellings.split(), _count)
        WHY |= dict.fromkeys(_spellings.split(), _reason)


def without_effect(given: Iterable[str]) -> Iterator[str]:
    """A line for each reason: the flags of a command line that change nothing, and why.

    Args:
        given: spellings of flags, or whole sentences about something that is not done.
    """
    by_reason: dict[str, list[str]] = {}
    for flag in dict.fromkeys(given):
        by_reason.setdefault(WHY.get(flag, ""), []).append(flag)
    for reason, flags in by_reason.items():
        yield f"without effect: {' '.join(flags)}" + (f" ({reason})" if reason else "")
