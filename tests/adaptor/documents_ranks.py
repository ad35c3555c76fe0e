"""Models on packed documents, and on the same documents one by one."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import types
from typing import Any

import torch
import torch.distributed as dist

SAMPLES, SIZE, EOD = 2, 16, 0
ENDS = [[4, 5, 11], [9]]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("rmsnorm-swiglu-gqa", {}),
    "mla": ("mla", {}),
    "mla-yarn": ("mla", {"rope_type": "yarn", "rotary_scaling_factor": 4.0}),
    "mtp": ("rmsnorm-swiglu-gqa", {"mtp_num_layers": 1}),
    "recomputed": (
        "mla",
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
}


def rows(seed: int) -> dict[str, torch.Tensor]:
    """A micro-batch ``[b, s]`` as the data loader makes it; the seed moves the documents' ends."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(1, 64, (SAMPLES, SIZE + 1), generator=generator)
    for row, ends in zip(text, ENDS, strict=True):
        row[[(end + seed) % SIZE for end in ends]] = EOD
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return {"tokens": tokens, "labels": labels, "loss_mask": (tokens != EOD).float()}


def _prepare(cp: int) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from mindspeed import session

    values = {
        "reset_attention_mask": True,
        "reset_position_ids": True,
        "calculate_per_token_loss": True,
    }
    # Repaired, the losses of MTP are means over rows, not over documents.
    session.install().configure({**values, "mtp_num_layers": None})
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    model_parallel_cuda_manual_seed(1)


def _model(name: str, spec: str, cp: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_mtp_block_spec,
    )

    from tests.support import gpt_ranks

    base, overrides = MODELS[name]
    config = gpt_ranks.config(
        base, context_parallel_size=cp, calculate_per_token_loss=True, **overrides
    )
    engine = spec == "te"
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=engine)
    mtp_spec = None
    if config.mtp_num_layers:
        mtp_spec = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=engine)
    model = GPTModel(
        config, layers, gpt_ranks.VOCABULARY, SIZE, position_embedding_type="rope",
        mtp_block_spec=mtp_spec,
    )  # fmt: skip
    for key, parameter in gpt_ranks.weights_of(model).items():
        parameter.data.copy_(gpt_ranks._slice(parameter, key))
    return model


def alone(names: list[str]) -> dict[str, Any]:
    """Token losses ``[b, s]`` of two micro-batches, and gradients: each document a sequence."""
    _prepare(1)
    found = {}
    for name in names:
        model = _model(name, "local", 1)
        losses = torch.zeros(2, SAMPLES, SIZE)
        for seed in range(2):
            batch = rows(seed)
            for sample, tokens in enumerate(batch["tokens"]):
                inside = (torch.nonzero(tokens == EOD).flatten() + 1).tolist()
                cu_seqlens = sorted({0, *inside, SIZE})
                for start, end in itertools.pairwise(cu_seqlens):
                    part = {key: x[sample : sample + 1, start:end] for key, x in batch.items()}
                    out = model(
                        part["tokens"], torch.arange(end - start)[None], None,
                        labels=part["labels"], loss_mask=part["loss_mask"],
                    )  # fmt: skip
                    (out * part["loss_mask"]).sum().backward()
                    losses[seed, sample, start:end] = out.detach()
        found[name] = {"losses": losses, "gradients": _gradients(model)}
    return found


def packed(
    names: list[str], spec: str, cp: int, algorithm: str | None, script: bool
) -> dict[str, Any]:
    """The same of packed rows on ranks of a context-parallel group.

    Both forward passes come before both backward passes, as in 1F1B. A script of the original
    hands the model no documents.
    """
    from megatron.core import parallel_state

    from mindspeed.adaptor.micro_batch import shard_batch
    from mindspeed.attention.packed_batch import cu_seqlens_of_tokens
    from mindspeed.attention.strategy import Strategy
    from mindspeed.te import attention_policy

    _prepare(cp)
    if algorithm is not None:
        attention_policy.context_strategy = lambda comm_type, ulysses_degree: Strategy(
            algorithm, granularity=2
        )
    rank = parallel_state.get_context_parallel_rank()
    found = {}
    for name in names:
        model = _model(name, spec, cp)
        losses, sums = torch.zeros(2, SAMPLES, SIZE), []
        for seed in range(2):
            batch = rows(seed)
            cu_seqlens = cu_seqlens_of_tokens(batch["tokens"], EOD)
            given = {**batch, "position_ids": None}
            if script:
                part, params = _cut_by_script(given, cu_seqlens)
                arguments = {}
            else:
                part, params = shard_batch(
                    given, cu_seqlens, SAMPLES, reset_mask=True, reset_positions=True
                )
                arguments = {"packed_seq_params": params}
            out = model(
                part["tokens"], part["position_ids"], None, labels=part["labels"],
                loss_mask=part["loss_mask"], **arguments,
            )  # fmt: skip
            losses[seed].view(-1)[params.packed.rows(rank)] = out.detach().reshape(-1)
            sums.append((out * part["loss_mask"]).sum())
        for total in sums:
            total.backward()
        dist.all_reduce(losses)
        gradients = _gradients(model)
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        found[name] = {"losses": losses, "gradients": gradients}
    return found


def _cut_by_script(
    batch: dict[str, Any], cu_seqlens: tuple[int, ...]
) -> tuple[dict[str, Any], Any]:
    from mindspeed.adaptor.current_batch import current_params
    from mindspeed.attention.packed_batch import positions_of
    from mindspeed.core.context_parallel import get_batch_utils as script

    positions = positions_of(cu_seqlens).view(SAMPLES, SIZE)
    script.generate_actual_seq_len({"position_ids": positions})
    assert script.get_actual_seq_len() == list(cu_seqlens[1:])
    part = script.get_batch_on_this_cp_rank({**batch, "position_ids": positions})
    assert script.get_position_ids().equal(part["position_ids"].t())
    return part, current_params()


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    from tests.support import gpt_ranks

    parameters = gpt_ranks.weights_of(model)
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}


def _take_megatron_lm(checkout: str) -> None:
    """Import the adaptor, and Megatron from a checkout, in a process without either."""
    sys.path.insert(0, checkout)
    importlib.import_module("mindspeed.megatron_adaptor")


def megatron_reads(checkout: str, ours: bool) -> dict[str, torch.Tensor]:
    """A packed micro-batch on two tensor-parallel ranks through Megatron-LM's own function."""
    _take_megatron_lm(checkout)
    from megatron.core import parallel_state
    from megatron.training import global_vars, utils

    from mindspeed import session

    values = {"reset_attention_mask": ours, "reset_position_ids": ours}
    session.install().configure(values)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    global_vars._GLOBAL_ARGS = types.SimpleNamespace(
        sft=False,
        hybrid_context_parallel=False,
        pipeline_model_parallel_size=1,
        micro_batch_size=SAMPLES if ours else 1,
        seq_length=SIZE,
        variable_seq_lengths=False,
        create_attention_mask_in_dataloader=False,
    )
    global_vars._GLOBAL_TOKENIZER = types.SimpleNamespace(eod=EOD)
    batch = rows(0)
    if not ours:  # what Megatron reads where a data set gives cu_seqlens
        batch = {name: x[:1] for name, x in batch.items()}
        batch |= {
            "position_ids": torch.arange(SIZE)[None],
            "cu_seqlens": torch.tensor([[0, 5, 6, 12, SIZE]], dtype=torch.int32),
            "max_seqlen": torch.tensor([6], dtype=torch.int32),
        }
    leads = os.environ["RANK"] == "0"
    found = utils.get_batch_on_this_tp_rank(iter([batch]) if leads else None)
    return {name: value for name, value in found.items() if value is not None}


def conversations_of_megatron(checkout: str) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """This rank's part of a row that ``--sft`` has packed: tokens, cu_seqlens, positions."""
    _take_megatron_lm(checkout)
    from megatron.core import parallel_state, utils
    from megatron.training import global_vars

    from mindspeed import session

    values = {"sft": True, "context_parallel_size": 2, "calculate_per_token_loss": True}
    session.install().configure(values)
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    global_vars._GLOBAL_ARGS = types.SimpleNamespace(
        sft=True, reset_attention_mask=False, reset_position_ids=False, micro_batch_size=1
    )
    batch = {"tokens": torch.arange(SIZE)[None], "labels": None, "position_ids": None}
    cu_seqlens = torch.tensor([[0, 5, 6, SIZE]], dtype=torch.int32)
    longest = torch.tensor([10], dtype=torch.int32)
    part, params = utils.get_thd_batch_on_this_cp_rank(batch, cu_seqlens, None, longest)
    assert part["labels"] is None and params.qkv_format == "sbhd"
    return part["tokens"], params.cu_seqlens_q.tolist(), part["position_ids"]
