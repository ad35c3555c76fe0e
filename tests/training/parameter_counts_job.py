"""Parameters that a dry run counts, and those of models that ranks build."""

from __future__ import annotations

import os
import shlex

MODEL = shlex.split("""
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 96 --num-attention-heads 8
    --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --seq-length 32
    --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 1 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 1000 --make-vocab-size-divisible-by 256 --bf16
""")


def counted(flags: str, ranks: int) -> tuple[list[list[int]], int]:
    """Entries and bytes of the first rank of each stage, and entries of the model."""
    from mindspeed.training.initialize import prepare
    from mindspeed.training.parameter_counts import count, entries_of_model

    args = prepare([*MODEL, "--dry-run", *flags.split()], ranks).args
    stages = count(args)
    return [[one.entries(), one.nbytes()] for one in stages], entries_of_model(args, stages)


def built(flags: str) -> tuple[int, int, int, bool]:
    """Stage of this rank, entries and bytes of its parameters; it is the first of its stage."""
    from megatron.core import parallel_state

    from mindspeed.lora import attach
    from mindspeed.lora.flags import adapters_of
    from mindspeed.training import setup
    from mindspeed.training.configs import transformer_config
    from mindspeed.training.initialize import prepare
    from mindspeed.training.model import build_modules, gpt_model

    args = prepare([*MODEL, *flags.split()], int(os.environ["WORLD_SIZE"])).args
    setup.initialize(args)
    chunks = build_modules(args, transformer_config(args), gpt_model)
    adapters = adapters_of(args)
    if adapters is not None:
        attach(chunks, adapters)
    parameters = {id(one): one for chunk in chunks for one in chunk.parameters()}.values()
    return (
        parallel_state.get_pipeline_model_parallel_rank(),
        sum(one.numel() for one in parameters),
        sum(one.nbytes for one in parameters),
        parallel_state.get_tensor_model_parallel_rank() == 0,
    )
