"""Flags of packed documents and of different lengths: what is switched on, changed and refused."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features.attention import packed_documents
from mindspeed.features.pipeline import variable_lengths
from mindspeed.features.registry import resolve

PACKED, LENGTHS = packed_documents.PackedDocuments, variable_lengths.VariableLengths
RESET = {"reset_attention_mask": True, "calculate_per_token_loss": True}
ADAPTIVE = {"context_parallel_size": 2, "context_parallel_algo": "adaptive_cp_algo"}


def switched_on(values):
    enabled = resolve(values, "cpu", [PACKED, LENGTHS]).enabled
    return [feature.name for feature in enabled]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, []),
        (RESET, ["packed-documents"]),
        ({"reset_position_ids": True, "fix_sub_seq_length": 8}, ["packed-documents"]),
        (ADAPTIVE, ["packed-documents"]),
        ({**ADAPTIVE, "context_parallel_size": 1}, []),
        ({"sft": True}, []),
        (
            {"sft": True, "context_parallel_size": 2, "calculate_per_token_loss": True},
            ["packed-documents"],
        ),
        ({"variable_seq_lengths": True}, ["variable-lengths"]),
    ],
)
def test_flags_that_enable_packed_documents(values, names):
    assert switched_on(values) == names


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"reset_attention_mask": True, "context_parallel_size": 2},
            "packed data with context parallelism needs --calculate-per-token-loss: "
            "local token counts differ",
        ),
        (
            {**ADAPTIVE, "hybrid_override_pattern": "M*"},
            "layer type mamba needs tokens in order; adaptive layouts are not allowed",
        ),
        (
            {**ADAPTIVE, "mtp_num_layers": 1},
            "layer type multi-token prediction needs tokens in order",
        ),
        ({**RESET, "is_hybrid_model": True}, "mamba layers would mix packed documents"),
        ({"fix_sub_seq_length": 8}, "changes nothing alone"),
        ({**RESET, "fix_sub_seq_length": 0}, "0 must be at least 1"),
        ({"variable_seq_lengths": True, "hybrid_context_parallel": True}, "remove one"),
        (
            {
                "variable_seq_lengths": True,
                "num_experts": 2,
                "moe_token_dispatcher_type": "allgather",
            },
            "needs --moe-token-dispatcher-type alltoall",
        ),
        ({"variable_seq_lengths": True, "optimization_level": 1}, "--optimization-level >= 2"),
    ],
)
def test_invalid_flags_are_refused(values, said):
    with pytest.raises(ConfigError, match=said.replace("*", "[*]")):
        switched_on(values)


def test_arguments_of_megatron_that_must_change():
    packed = PACKED()
    masks = {"create_attention_mask_in_dataloader": True}
    assert packed.corrects(masks) == {"create_attention_mask_in_dataloader": False}
    assert packed.corrects({}) == {}
    lengths = LENGTHS(variable_seq_lengths=True)
    dense = {"moe_token_dispatcher_type": "allgather"}
    assert lengths.corrects(dense) == {"moe_token_dispatcher_type": "alltoall"}


class Seams(SimpleNamespace):
    """Collects what a feature hands over."""

    def __init__(self) -> None:
        super().__init__(**{name: self for name in ("documents", "batch", "schedule")})
        self.functions = []

    def add(self, function, *, owner):
        self.functions.append(function)


def attached(feature, values):
    seams = Seams()
    feature.attach(seams, values)
    return seams.functions


def test_documents_end_with_the_tokenizers_token_or_after_a_number_of_tokens():
    tokens = torch.tensor([[1, 0, 2, 3], [4, 5, 6, 0]])
    (find,) = attached(PACKED(), RESET)
    assert find((0, 4, 8), tokens, SimpleNamespace(eod=0)) == (0, 2, 4, 8)
    with pytest.raises(ConfigError, match="need a tokenizer with an end-of-document token"):
        find((0, 4, 8), tokens, SimpleNamespace(eod=None))
    (find,) = attached(PACKED(3), RESET)
    assert find((0, 4, 8), tokens, None) == (0, 3, 4, 7, 8)
    (find,) = attached(PACKED(), ADAPTIVE)
    assert find((0, 4, 8), tokens, None) == (0, 4, 8)


def test_sequences_are_shortened_to_divisible_lengths(caplog, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    lengths = LENGTHS(variable_seq_lengths=True)
    rows = {"tokens": torch.ones(2, 16), "loss_mask": torch.zeros(2, 16)}
    rows["loss_mask"][0, 4] = rows["loss_mask"][1, 2] = 1
    values = {"tensor_model_parallel_size": 3, "pipeline_model_parallel_size": 2}
    for more, width in (({}, 5), ({"sequence_parallel": True}, 6)):
        shorten, _ = attached(lengths, values | more)
        assert shorten(rows)["tokens"].shape == shorten(rows)["loss_mask"].shape == (2, width)
    assert variable_lengths.multiple_of({"context_parallel_size": 4}) == 8
    with caplog.at_level(logging.WARNING, "mindspeed"):
        attached(lengths, {})
    assert "there is one pipeline stage" in caplog.text
