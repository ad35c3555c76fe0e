"""A model with ``--use-flash-attn`` computes what it computes without."""

from __future__ import annotations

import pytest
import torch

from mindspeed.errors import ConfigError
from mindspeed.features.registry import resolve
from mindspeed.te.flash import copied
from tests.features import flash_ranks, fused_ranks
from tests.support.lazy import needs

needs("megatron.core")

ADAPTOR = "tests.support.warm"
ON = {"use_flash_attn": True}
MODELS = {
    "gqa": ("rmsnorm-swiglu-gqa", {}),
    "mla": ("mla", {}),
    "window": ("rmsnorm-swiglu-gqa", {"window_size": (4, 0)}),
    "sink": ("layernorm-gelu-bias", {"softmax_type": "learnable"}),
    "off-by-one": ("layernorm-gelu-bias", {"softmax_type": "off-by-one"}),
}


@pytest.mark.weekly_cases(
    "gqa-te-tp-sp", "mla-local-tp-sp", "window-te-tp-sp", "off-by-one-te-tp-sp", "*-local-one-rank"
)
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("world_size", [1, 2], ids=["one-rank", "tp-sp"])
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_are_equal(ranks, model, spec, world_size):
    name, overrides = MODELS[model]
    for fused, plain in ranks(
        world_size, fused_ranks.with_and_without, ON, name, spec, overrides, setup=ADAPTOR
    ):
        fused_ranks.assert_equal(fused.tensors, plain.tensors, 3e-6)
        assert fused.ops["mindspeed::attention"] == 2
        assert plain.ops["mindspeed::attention"] == 0


@pytest.mark.parametrize("spec", ["te", "local"])
def test_bf16(ranks, spec):
    arguments = (ON, "rmsnorm-swiglu-gqa", spec, {}, None, torch.bfloat16)
    ((fused, plain),) = ranks(1, fused_ranks.with_and_without, *arguments, setup=ADAPTOR)
    ((_, exact),) = ranks(1, fused_ranks.with_and_without, *arguments[:-1], setup=ADAPTOR)
    fused_ranks.assert_as_exact(fused.tensors, plain.tensors, exact.tensors)


@pytest.mark.parametrize("mode", ["window", "sink", "full"])
def test_saved_bytes_are_linear_in_the_sequence(ranks, mode):
    """q, k, v and the output in bf16, and 4 bytes per query and head, where the plain formula and
    Megatron's keep masks and probabilities of sequence times sequence."""
    (saved,) = ranks(1, flash_ranks.bytes_kept_by_core_attention, mode, setup=ADAPTOR)
    sequence, heads, groups, size = 512, 4, 2, 8
    tensors = 2 * sequence * size * (2 * heads + 2 * groups)
    statistics = 4 * sequence * heads
    assert saved["flash"] == tensors + statistics + saved["parameters"]
    assert saved["megatron"] > 2 * heads * sequence * sequence


@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("padded", [False, True])
def test_packed_documents(ranks, spec, padded):
    ((flash, plain),) = ranks(1, flash_ranks.packed, spec, padded, setup=ADAPTOR)
    fused_ranks.assert_equal(flash, plain, 3e-6)


def test_cu_seqlens_are_copied_to_the_host_once_per_micro_batch():
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    first = copied(cu_seqlens)
    assert first.dtype == torch.int64
    assert copied(cu_seqlens) is first  # the next layer
    cu_seqlens[1] = 4
    assert copied(cu_seqlens).tolist() == [0, 4, 8]
    assert copied(torch.tensor([0, 2], dtype=torch.int32)).tolist() == [0, 2]


def test_flags_of_the_window_equal_megatrons(ranks):
    def run(flags, overrides):
        arguments = (flags, "rmsnorm-swiglu-gqa", "te", overrides, torch.float32)
        (results,) = ranks(1, fused_ranks.results, *arguments, setup=ADAPTOR)
        return results.tensors

    ours = run(ON | {"sparse_mode": 4, "pre_tockens": 4, "next_tockens": 0}, {})
    fused_ranks.assert_equal(ours, run({}, {"window_size": (4, 0)}), 3e-6)


def test_mask_of_the_data_loader(ranks):
    """causal: not read; general: it decides."""
    (out,) = ranks(1, flash_ranks.given_masks, setup=ADAPTOR)
    torch.testing.assert_close(out["causal"], out["without"])
    torch.testing.assert_close(out["general"], out["plain"])
    torch.testing.assert_close(out["shared"], out["plain"])
    assert not torch.allclose(out["general"], out["causal"])


def test_dropout_is_that_of_the_tracker_and_repeats_in_recomputation(ranks):
    (first, again, other) = ranks(1, flash_ranks.dropout, setup=ADAPTOR)[0]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def names(values):
    return [feature.name for feature in resolve(values, "cpu").enabled]


def test_flags():
    assert "flash-attention" in names(ON)
    assert names(ON) == names({"use_fusion_attn_v2": True})
    assert not names({})
    for values, message in (
        ({"optimization_level": 0}, "--optimization-level >= 1"),
        ({"shape_order": "TND"}, "--shape-order 'TND': choose one of SBH, BSH, BSND"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(ON | values, "cpu")
