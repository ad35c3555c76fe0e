"""Flags of other times and trainers: what they are called today, and what has no effect here.

An alias means exactly what its flag means. An ignored flag changes no result: it chose what is the
only way today, tunes speed or memory by a method that is not part of this trainer, or controls a
service of Megatron-LM's (restarts, stragglers, NVIDIA's loggers). They are accepted so that old
scripts run, and named once in a warning. A flag that changes results is never ignored.
"""

from __future__ import annotations

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
}

_WITHOUT_VALUE = """
    --no-contiguous-buffers-in-local-ddp --use-mcore-models --use-flash-attn
    --no-create-attention-mask-in-dataloader --no-async-tensor-model-parallel-allreduce
    --use-dist-ckpt --auto-detect-ckpt-format --disable-msc --log-throughput
    --log-timers-to-tensorboard --no-one-logger --no-scatter-gather-tensors-in-pipeline
    --tokenizer-hf-use-fast --tokenizer-not-use-fast --no-position-embedding
    --mlp-layer-fusion --release-fp32-grad --optimized-pipeline
    --use-manual-layer-allocation
    --onnx-safe --bert-no-binary-head --exit-signal-handler-for-dataloader
    --no-manual-gc-eval --disable-manual-gc-eval --disable-jit-fuser
    --ckpt-fully-parallel-load --ckpt-assume-constant-structure --use-persistent-ckpt-worker
    --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --legacy-tokenizer
    --log-progress --log-device-memory-used --log-world-size-to-tensorboard --log-energy
    --log-straggler --disable-straggler-on-startup --run-workload-inspector-server
    --one-logger-async --enable-experimental --check-for-spiky-loss
    --enable-ft-package --calc-ft-timeouts --adlr-autoresume --use-sharp --deepspeed
"""
_WITH_ONE = """
    --DDP-impl --data-impl --timing-log-level --timing-log-option
    --fold-mode --auto-recompute-device-size --auto-recompute-profiling-step --checkpoint-policy
    --empty-unused-memory-level --check-weight-hash-across-dp-replicas-interval
    --train-sync-interval --lazy-mpu-init --distributed-timeout-seconds-after-init
    --sharp-enabled-group --dist-ckpt-format --log-memory-interval --logging-level
    --straggler-ctrlr-port --straggler-minmax-count --one-logger-project --one-logger-run-name
    --app-tag-run-name --app-tag-run-version --rerun-mode --ft-num-warmup-iters
    --adlr-autoresume-interval
"""
_WITH_SEVERAL = "--manual-mbs --high-priority-stream-groups"

# Spelling -> number of values, or argparse's "*".
IGNORED: dict[str, int | str] = {
    **dict.fromkeys(_WITHOUT_VALUE.split(), 0),
    **dict.fromkeys(_WITH_ONE.split(), 1),
    **dict.fromkeys(_WITH_SEVERAL.split(), "*"),
}
