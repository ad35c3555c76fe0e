"""Flags of masks, windows, ALiBi and triangle attention: what they enable, what is refused."""

from __future__ import annotations

import argparse

import pytest
import torch

from mindspeed.attention import Mask, cost_metrics
from mindspeed.attention.packed_batch import pack
from mindspeed.attention.strategy import Strategy
from mindspeed.attention.user_mask import set_attention_mask
from mindspeed.errors import ConfigError
from mindspeed.features.registry import add_arguments, resolve
from mindspeed.te import attention_policy, kernels
from mindspeed.te.context_groups import user_mask
from mindspeed.te.masks import visibility
from tests.support.seams import fresh_seams


def names(values):
    return [feature.name for feature in resolve(values, "cpu").enabled]


def test_enabled_features():
    assert names({}) == []
    assert names({"use_flash_attn": True}) == ["attention-mask", "flash-attention"]
    assert names({"attention_mask_type": "general"}) == ["attention-mask"]
    assert names({"triangle_attn": True}) == ["attention-mask", "triangle-attention"]
    assert names({"window_size": (4, 0)}) == ["sliding-window"]
    assert names({"sparse_mode": 4, "pre_tockens": 4}) == ["sliding-window"]
    assert names({"position_embedding_type": "alibi"}) == ["alibi"]
    in_kernel = {"position_embedding_type": "alibi", "alibi_fusion_attn_type": 2}
    assert names(in_kernel) == ["flash-attention", "alibi"]
    assert names({"position_embedding_type": "rope", "optimization_level": 0}) == []


ALIBI = {"position_embedding_type": "alibi"}
WINDOW = {"sparse_mode": 4}
REFUSED = [
    ({"sparse_mode": 7}, "--sparse-mode 7 must be from 0 to 4"),
    ({"pre_tockens": 8}, "add --sparse-mode 4"),
    ({"sparse_mode": 1}, "sparse_mode 1: with flash attention use 0, 2, 3 or 4"),
    ({**WINDOW, "next_tockens": -1}, "--next-tockens -1 must be at least 0"),
    ({**WINDOW, "window_size": (3, 0)}, "give one"),
    ({**WINDOW, "window_attn_skip_freq": 2}, "give --window-size instead"),
    ({**WINDOW, "next_tockens": 3}, "--next-tockens: 3 keys after .* --attention-mask-type"),
    ({"window_size": (3, 2)}, "--window-size: 2 keys after a query's own, in causal layers"),
    ({"window_size": (-3, 0)}, r"--window-size: \(-3, 0\) is negative"),
    ({**ALIBI, "alibi_fusion_attn_type": 1}, "1 is not one of 0, 2, 3"),
    ({**ALIBI, "use_fused_rotary_pos_emb": True}, "cannot be combined with .* alibi"),
    ({**ALIBI, "use_rotary_position_embeddings": True}, "cannot be combined with .* alibi"),
    ({**ALIBI, "multi_latent_attention": True}, "latent attention has rotary positions"),
    (
        {**ALIBI, "alibi_fusion_attn_type": 0, "context_parallel_size": 2},
        "0 makes a bias of the whole sequence, which is split by --context-parallel-size 2",
    ),
    (
        {
            **ALIBI,
            "use_fusion_attn_v2": True,
            "context_parallel_size": 2,
            "attention_dropout": 0.1,
        },
        "dropout with --use-fusion-attn-v2 and context parallelism is not supported",
    ),
    ({"triangle_attn": True, "use_flash_attn": True}, "cannot be combined with"),
    ({"triangle_attn": True, "triangle_block_size": 0}, "0 must be at least 1"),
    ({"triangle_attn": True, "context_parallel_size": 2}, "attends on one rank"),
    (
        {"use_flash_attn": True, "reset_attention_mask": True, "optimization_level": 1},
        "add --attention-mask-type general",
    ),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_invalid_combinations_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        resolve(values, "cpu")


def test_the_choice_is_added_to_megatrons_flag():
    def parser():
        new = argparse.ArgumentParser()
        new.add_argument("--position-embedding-type", choices=["rope", "none"], default="rope")
        return new

    with pytest.raises(SystemExit):
        parser().parse_args(["--position-embedding-type", "alibi"])
    known = add_arguments(parser())
    args = known.parse_args(["--position-embedding-type", "alibi", "--square-alibi-mask"])
    assert names(vars(args)) == ["alibi"]
    assert names(vars(known.parse_args([]))) == []


def test_the_data_loader_makes_no_mask_that_is_not_read():
    def corrections(**values):
        values |= {"create_attention_mask_in_dataloader": True, "use_flash_attn": True}
        configuration = resolve(values, "cpu")
        return {
            name: value
            for feature in configuration.enabled
            for name, value in feature.corrects(values).items()
        }

    assert corrections() == {"create_attention_mask_in_dataloader": False}
    assert corrections(attention_mask_type="general") == {}


@pytest.fixture
def attached():
    """``attached(values)``: features at work in this process, without Megatron."""
    with fresh_seams() as seams:

        def attach(**values):
            seams.clear()
            configuration = resolve(values, "cpu")
            for feature in configuration.enabled:
                feature.attach(seams, values)

        yield attach


def attend(dropout=0.0, **options):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 37, size, generator=generator, dtype=torch.float64)
        for heads, size in ((4, 8), (2, 8), (2, 6))
    )
    seen = visibility("causal", 37, 37)
    return kernels.attend(q, k, v, seen, scale=0.3, dropout=dropout, **options)


def test_a_window_receives_its_keys_only_where_all_layers_have_it(attached):
    """Rows of keys that the worst of 8 ranks receives, of 128K tokens; a ring: 7 / 8 of them."""
    ring, strategy = 131072 * 7 // 8, Strategy("adaptive")
    window = Mask.causal(131072, 4096)

    def received():
        layout = strategy.sharding(
            attention_policy.sharding_mask((0, 131072), 1) or Mask.causal(131072), 8
        )
        return max(cost_metrics(strategy.plan(window, layout)).kv_received) / ring

    for flags in ({"window_size": (4096, 0)}, {"sparse_mode": 4, "pre_tockens": 4096}):
        attached(**flags)
        assert received() <= 0.036
    attached(window_size=(4096, 0), window_attn_skip_freq=4)  # the layout of the full layers
    assert 0.036 < received() <= 0.072


def test_an_adaptive_layout_suits_the_mask_of_the_user(attached):
    set_attention_mask(lambda q, k: q // 8 == k // 8)
    try:
        attached(attention_mask_type="general")
        mask = attention_policy.sharding_mask((0, 32, 64), 2)
        assert mask == Mask.documents(range(0, 65, 8), causal=False)
        # The documents decide what is seen.
        assert attention_policy.sharding_mask((0, 20, 32, 64), 2) is None
        packed = pack((0, 20, 32, 64), 2, strategy=Strategy("adaptive"), ranks=2)
        with pytest.raises(ConfigError, match="both decide which tokens are masked"):
            user_mask(32, 2, packed)
        attached(use_flash_attn=True)
        with pytest.raises(ConfigError, match="needs --attention-mask-type general"):
            user_mask(32, 2, None)
    finally:
        set_attention_mask(None)


@pytest.mark.parametrize("option", ["none", "sink", "bias", "slopes"])
def test_triangle_attention_computes_what_the_formula_does(attached, option):
    options = {
        "none": {},
        "sink": {"sink": torch.linspace(-1, 1, 4, dtype=torch.float64)},
        "bias": {"bias": torch.linspace(-1, 1, 37 * 37, dtype=torch.float64).view(37, 37)},
        "slopes": {"slopes": torch.tensor([0.5, 0.25, 0.1, 0.7])},
    }[option]
    plain = attend(**options)
    attached(triangle_attn=True, triangle_block_size=8)
    torch.testing.assert_close(attend(**options), plain, rtol=0, atol=1e-12)


def test_alibi_as_a_tensor_in_a_kernel_and_of_square_roots(attached):
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.7])
    plain = attend(slopes=slopes)
    distance = (torch.arange(37)[:, None] - torch.arange(37)).abs().double()
    roots = attend(bias=-slopes.double()[:, None, None] * distance.sqrt())
    for kind, expected in ((0, plain), (2, plain), (3, roots)):
        attached(position_embedding_type="alibi", alibi_fusion_attn_type=kind)
        torch.testing.assert_close(attend(slopes=slopes), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(roots, plain, atol=1e-3)
