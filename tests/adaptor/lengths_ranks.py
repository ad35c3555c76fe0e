"""Pipelines of tiny stages whose micro-batches have different lengths."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

LENGTHS = (3, 8, 1, 8, 5, 2, 7, 4)
HIDDEN, SAMPLES, LONGEST = 4, 2, 8


class Stage(torch.nn.Module):
    """A matrix for every token; the last stage squares what comes out."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config, self.number, self.given = config, number, None
        self.model_type, self.vp_stage = ModelType.encoder_or_decoder, None
        generator = torch.Generator().manual_seed(number)
        self.weight = torch.nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=generator) / 2)

    def set_input_tensor(self, tensor: Any) -> None:
        self.given = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch if self.number == 0 else self.given
        return torch.tanh(x @ self.weight)


class Reader(Iterator[torch.Tensor]):
    """Micro-batches ``[s, b, h]``, cut to their length or padded."""

    def __init__(self, padded: bool) -> None:
        self.padded, self.next = padded, 0

    def __next__(self) -> tuple[torch.Tensor, int]:
        number, self.next = self.next, self.next + 1
        length = LENGTHS[number]
        generator = torch.Generator().manual_seed(100 + number)
        whole = torch.randn(LONGEST, SAMPLES, HIDDEN, generator=generator)
        return whole if self.padded else whole[:length], length


class LookingAhead(Reader):
    """Every stage knows the lengths of the step."""

    def lengths_ahead(self, count: int) -> list[int]:
        return list(LENGTHS[self.next : self.next + count])


def forward_step(reader: Reader, model: Stage) -> tuple[torch.Tensor, Any]:
    batch, length = next(reader)
    out = model(batch)

    def loss_of(length: int, out: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert out.shape[0] in (length, LONGEST)
        loss = out[:length].square().sum()
        return loss, {"loss": loss.detach()}

    return out, functools.partial(loss_of, length)


def steps(stages: int, chunks: int, forward_only: bool = False) -> dict[str, Any]:
    """One step padded, and with lengths in Megatron's way, and in ours with and without a look.

    Returns:
        For each way ``losses`` (last stage), ``gradients``, and ``sent`` messages of this rank.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    from mindspeed.instruments import CommLedger
    from mindspeed.pipeline.megatron_lengths import with_lengths

    virtual = chunks if chunks > 1 else None
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=virtual
    )
    rank, found = parallel_state.get_pipeline_model_parallel_rank(), {}
    for way in ("padded", "Megatron", "read", "known"):
        config = TransformerConfig(
            num_layers=stages * chunks,
            hidden_size=HIDDEN,
            num_attention_heads=1,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=virtual,
            pipeline_dtype=torch.float32,
            variable_seq_lengths=way != "padded",
            moe_token_dispatcher_type="alltoall",
            deallocate_pipeline_outputs=True,
            overlap_p2p_comm=chunks > 1,  # as Megatron asks for, of two interleaved stages
            batch_p2p_comm=chunks == 1,
        )
        model = [Stage(config, rank + stages * chunk) for chunk in range(chunks)]
        kind = LookingAhead if way == "known" else Reader
        readers = [kind(way == "padded") for _ in range(chunks)]
        schedule = get_forward_backward_func()
        if way in ("read", "known"):
            schedule = with_lengths(schedule)
        with CommLedger() as ledger:
            reports = schedule(
                forward_step_func=forward_step,
                data_iterator=readers if virtual else readers[0],
                model=model if virtual else model[0],
                num_microbatches=len(LENGTHS),
                seq_length=LONGEST,
                micro_batch_size=SAMPLES,
                forward_only=forward_only,
            )
        found[way] = {
            "losses": [report["loss"].item() for report in reports],
            "gradients": [] if forward_only else [chunk.weight.grad.clone() for chunk in model],
            "sent": ledger.calls("send"),
        }
    dist.barrier()
    return found
