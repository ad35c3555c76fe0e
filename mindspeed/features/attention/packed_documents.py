"""Packed documents: ``--reset-attention-mask``, ``--reset-position-ids``.

A sample holds several documents, each ended by the tokenizer's end-of-document token.
With ``--reset-attention-mask`` tokens see their own document only, with ``--reset-position-ids``
positions start again with each. Attention costs the pairs inside documents and no more; there is
no s x s mask, no padding, and samples of a micro-batch may have different documents. Works with
tensor, pipeline and context parallelism of every algorithm and with recomputation.

``--fix-sub-seq-length N`` takes documents of N tokens instead, whatever the tokens are.

Conversations that Megatron-LM packs (``--sft``) are sharded the same way.
An adaptive algorithm of context parallelism, which gives ranks other tokens than Megatron's batches
do, attaches the same way: each sample is one document.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mindspeed.features.feature import Feature, Megatron, Problem, option_of
from mindspeed.flags import flag
from mindspeed.ranges import MAX_SIZE, Range

if TYPE_CHECKING:
    from mindspeed.adaptor.seams import Seams


class PackedDocuments(Feature, level=2, seams=("documents",), megatron_versions=">=0.16"):
    """Documents in one row that do not see each other, at every parallelism."""

    fix_sub_seq_length: int = flag(
        -1,
        "documents of N tokens instead of those of the data",
        range=Range(1, MAX_SIZE, also=(-1,), shown=False),
    )

    def enabled(self, megatron: Megatron) -> bool:
        from mindspeed.attention.packed_batch import adaptive, resets

        return resets(megatron) or adaptive(megatron) or self.fix_sub_seq_length != -1

    def asked_by(self, megatron: Megatron) -> str | None:
        from mindspeed.attention.packed_batch import adaptive

        if adaptive(megatron):
            return f"--context-parallel-algo {megatron['context_parallel_algo']}"
        names = ("reset_attention_mask", "reset_position_ids")
        return next((option_of(name) for name in names if megatron.get(name)), None)

    def problems(self, megatron: Megatron) -> Iterator[Problem]:
        from mindspeed.attention.packed_batch import adaptive, resets

        length, ranks = self.fix_sub_seq_length, megatron.get("context_parallel_size") or 1
        if length != -1 and not resets(megatron):
            yield Problem(
                "--fix-sub-seq-length",
                "changes nothing alone",
                "add --reset-attention-mask, --reset-position-ids or both",
            )
        # Pairs of answers: sums of every answer over the ranks, of which there are as many.
        sums = (megatron.get("objective") or "next_token") != "next_token"
        per_token = sums or megatron.get("calculate_per_token_loss")
        if ranks > 1 and resets(megatron) and not per_token:
            yield Problem(
                "packed data with context parallelism needs --calculate-per-token-loss",
                "local token counts differ (documents and masked tokens lie unevenly on the "
                f"{ranks} ranks)",
            )
        for name, kind in _ORDERED.items():
            if not megatron.get(name) or _any_sharding(name, megatron):
                continue
            flag_name = "--" + name.replace("_", "-")
            if adaptive(megatron):
                yield Problem(flag_name, _in_order(kind))
            elif resets(megatron):
                yield Problem(flag_name, f"{kind} layers would mix packed documents", "remove one")
        if adaptive(megatron) and megatron.get("mtp_num_layers"):
            yield Problem("--mtp-num-layers", _in_order("multi-token prediction"))

    def corrects(self, megatron: Megatron) -> dict[str, Any]:
        """Disable the s x s mask of the data loader, which the attention does not read."""
        if megatron.get("create_attention_mask_in_dataloader"):
            return {"create_attention_mask_in_dataloader": False}
        return {}

    def attach(self, seams: Seams, megatron: Megatron) -> None:
        from mindspeed.attention.packed_batch import (
            CuSeqlens,
            cu_seqlens_of_length,
            cu_seqlens_of_tokens,
            resets,
        )
        from mindspeed.errors import ConfigError

        length, ended = self.fix_sub_seq_length, resets(megatron)

        def documents(cu_seqlens: CuSeqlens, tokens: Any, tokenizer: Any) -> CuSeqlens:
            if length > 0:
                samples, size = tokens.shape
                return cu_seqlens_of_length(samples, size, length)
            if not ended:
                return cu_seqlens
            eod = getattr(tokenizer, "eod", None)
            if eod is None:
                raise ConfigError(
                    "--reset-attention-mask and --reset-position-ids need a tokenizer with an "
                    "end-of-document token; this one has none: use --fix-sub-seq-length, or drop "
                    "them"
                )
            return cu_seqlens_of_tokens(tokens, eod)

        seams.documents.add(documents, owner=self.name)


_ORDERED = {
    "is_hybrid_model": "mamba",
    "hybrid_override_pattern": "mamba",
    "experimental_attention_variant": "experimental attention",
}
"""Arguments that add layers which read tokens in order."""


def _any_sharding(name: str, megatron: Megatron) -> bool:
    """Whether these layers are this library's, which know documents and restore the order."""
    ours = "norm_placement" in megatron  # a flag of the trainer's models
    return ours and name == "experimental_attention_variant" and megatron[name] == "gated_delta_net"


def _in_order(kind: str) -> str:
    return f"layer type {kind} needs tokens in order; adaptive layouts are not allowed"
