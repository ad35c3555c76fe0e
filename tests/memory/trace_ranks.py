"""Jobs for ranks: traces of a few steps of a GPT on FakeTensors."""

from __future__ import annotations

import contextlib
import io

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support import gpt_ranks, trainer_job

LENGTHS = {"equal": [2048] * 2, "varying": [1536, 2048, 1184, 1792]}


def traces():
    """A trace for each kind of lengths."""
    gpt_ranks.start()
    return {name: trace(lengths) for name, lengths in LENGTHS.items()}


def train(flags):
    """The trainer's result, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = trainer_job.train(["--train-iters", "3", *flags])
    return result, printed.getvalue()


def trace(lengths):
    """Events of AdamW steps in bf16, one micro-batch of each length: 4 layers, h 1024, F 2816."""
    from mindspeed.memory.fragmentation import AllocationTrace

    gpt_ranks.VOCABULARY, gpt_ranks.SEQUENCE = 4096, max(lengths)
    config = gpt_ranks.config(
        "rmsnorm-swiglu-gqa", num_layers=4, hidden_size=1024, ffn_hidden_size=2816,
        num_attention_heads=16, num_query_groups=16, params_dtype=torch.bfloat16, bf16=True,
        use_cpu_initialization=True, perform_initialization=False,
    )  # fmt: skip
    recorded = AllocationTrace()
    with FakeTensorMode(allow_non_fake_inputs=True):
        torch.set_default_dtype(torch.bfloat16)
        with recorded, recorded.long_lived():
            model = _build(config)
            torch.set_default_dtype(torch.float32)
            parameters = list(model.parameters())
            main_grads = [torch.zeros(p.shape, dtype=torch.float32) for p in parameters]
        states = None
        for length in lengths:
            with recorded:
                tokens = torch.zeros(1, length, dtype=torch.int64)
                positions = torch.arange(length)[None]
                loss = model(tokens, positions, None, labels=tokens).float().mean()
                loss.backward()
                del loss, tokens, positions
                for parameter, main_grad in zip(parameters, main_grads, strict=True):
                    main_grad.add_(parameter.grad.float())
                    parameter.grad = None
            if states is None:
                with recorded, recorded.long_lived():
                    states = [
                        torch.zeros(p.shape, dtype=torch.float32)
                        for p in parameters
                        for _ in range(3)
                    ]
        return list(recorded.events)


def _build(config):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    return GPTModel(
        config, layers, gpt_ranks.VOCABULARY, gpt_ranks.SEQUENCE,
        position_embedding_type="rope", parallel_output=True,
    )  # fmt: skip
