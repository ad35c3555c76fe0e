"""Jobs for the ranks of test_packed_conversations.py, which have a Megatron-LM checkout."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch

SIZE = 8


class Tokenizer:
    """Each character is a token; only its code is trained."""

    eod, pad = 1, 0

    def tokenize_conversation(self, conversation: Any, **options: Any) -> Any:
        """The tokens of the first message, twice."""
        tokens = torch.tensor([ord(x) for x in conversation[0]["content"]])
        return tokens, tokens


def samples_of_megatron(checkout: str, texts: list[str]) -> list[dict[str, torch.Tensor]]:
    """What Megatron-LM's data set makes of conversations."""
    _configure(checkout, 1)
    from megatron.training.datasets.sft_dataset import SFTDataset

    data = object.__new__(SFTDataset)
    data.dataset = [[{"role": "system", "content": text}] for text in texts]
    data.indices = range(len(texts))
    data.config = types.SimpleNamespace(
        tokenizer=Tokenizer(), sequence_length=SIZE, context_parallel_size=1,
        reset_position_ids=False, reset_attention_mask=False, create_attention_mask=False,
    )  # fmt: skip
    return [data[number] for number in range(len(texts))]


def documents_of_stages(checkout: str, repaired: bool) -> list[int]:
    """The borders that this stage of three gives its layers; empty if it reads nothing."""
    _configure(checkout, 3)
    from megatron.core import utils as core
    from megatron.training import global_vars, utils

    from mindspeed import session
    from mindspeed.adaptor.repairs.data import packed_conversations

    if not repaired:
        session.current().engine.remove(packed_conversations.PATCHES[0].owner)
    global_vars._GLOBAL_ARGS = types.SimpleNamespace(
        sft=True, hybrid_context_parallel=False, pipeline_model_parallel_size=3
    )
    if not utils.is_first_or_last_pipeline_stage(None):
        return []
    row = torch.arange(SIZE)[None]
    data = {
        **dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids"), row),
        "cu_seqlens": torch.tensor([[0, 3, SIZE]], dtype=torch.int32),
        "max_seqlen": torch.tensor([5], dtype=torch.int32),
    }
    batch = utils.get_batch_on_this_tp_rank(iter([data]))
    borders, longest = batch.pop("cu_seqlens"), batch.pop("max_seqlen")
    _, params = core.get_thd_batch_on_this_cp_rank(batch, borders, None, longest, 1, 0)
    return params.cu_seqlens_q.tolist()  # type: ignore[no-any-return]


def _configure(checkout: str, stages: int) -> None:
    sys.path.insert(0, checkout)
    importlib.import_module("mindspeed.megatron_adaptor")
    from megatron.core import parallel_state

    from mindspeed import session

    session.install().configure({"sft": True, "pipeline_model_parallel_size": stages})
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=stages)
