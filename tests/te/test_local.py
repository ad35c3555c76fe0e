"""The local spec's norms and core attention, on stand-ins for Megatron's configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mindspeed.errors import ConfigError
from mindspeed.te import local_attention, local_norm
from mindspeed.te.dot_product import DotProductAttention
from mindspeed.te.local_attention import core_attention_forward


def config(**options):
    defaults = {
        "normalization": "LayerNorm",
        "layernorm_zero_centered_gamma": False,
        "sequence_parallel": True,
        "memory_efficient_layer_norm": False,
        "apply_query_key_layer_scaling": False,
        "num_attention_heads": 4,
    }
    return SimpleNamespace(**{**defaults, **options})


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_with_megatrons_options(normalization, zero_centered):
    cfg = config(normalization=normalization, layernorm_zero_centered_gamma=zero_centered)
    norm = local_norm.new_norm(object, cfg, 6, eps=1e-3, persist_layer_norm=True)
    names = {"weight", "bias"} if normalization == "LayerNorm" else {"weight"}
    assert set(norm.state_dict()) == names
    assert all(p.sequence_parallel for p in norm.parameters())
    x = torch.randn(3, 6)
    plain = F.layer_norm if normalization == "LayerNorm" else F.rms_norm
    torch.testing.assert_close(norm(x), plain(x, (6,), eps=1e-3), rtol=0, atol=1e-6)
    torch.nn.init.constant_(norm.weight, 0.5)
    factor = 1.5 if zero_centered else 0.5
    torch.testing.assert_close(norm(x), plain(x, (6,), eps=1e-3) * factor, rtol=0, atol=1e-6)


def test_unavailable_norms_name_the_flag():
    with pytest.raises(ConfigError, match="memory-efficient-layer-norm"):
        local_norm.new_norm(object, config(memory_efficient_layer_norm=True), 6)
    with pytest.raises(ConfigError, match="L2Norm"):
        local_norm.new_norm(object, config(normalization="L2Norm"), 6)


def attention(mask_type="causal", window=None, sink=None, **options):
    return SimpleNamespace(
        config=config(**options),
        attn_mask_type=SimpleNamespace(name=mask_type),
        scale_mask_softmax=SimpleNamespace(window_size=window),
        softmax_scale=0.3,
        softmax_offset=sink,
        softcap=None,
        layer_number=2,
        attention_dropout=torch.nn.Dropout(0.0),
        training=True,
        cp_groups=None,
        cp_comm_type="p2p",
        pg_collection=SimpleNamespace(tp=None),
    )


def qkv(rows=7, queries=7):
    torch.manual_seed(0)
    shapes = ((queries, 4, 8), (rows, 2, 8), (rows, 2, 6))
    return tuple(torch.randn(s, 2, h, d) for s, h, d in shapes)


def like(mask_type, **options):
    kind = {"num_gqa_groups": 2, "softmax_scale": 0.3, "attn_mask_type": mask_type, **options}
    return DotProductAttention(4, (8, 6), **kind)


@pytest.mark.parametrize("window", [None, (2, 0)])
def test_core_attention_with_other_head_sizes(window):
    out = core_attention_forward(attention(window=window), *qkv(), None)
    torch.testing.assert_close(out, like("causal", window_size=window)(*qkv()))


@pytest.mark.parametrize("window", [None, (2, 0)])
def test_a_mask_tensor_decides_what_is_masked_inside_the_window(window):
    masked = torch.ones(7, 7, dtype=torch.bool).triu(1)
    masked[5, :4] = True
    out = core_attention_forward(attention(window=window), *qkv(), masked[None, None])
    if window is not None:
        masked |= torch.ones(7, 7, dtype=torch.bool).tril(-3)
    torch.testing.assert_close(out, like("arbitrary")(*qkv(), masked[None, None]))


def test_one_query_at_the_end_of_a_cache_sees_every_key():
    out = core_attention_forward(attention(), *qkv(queries=1), None)
    torch.testing.assert_close(out, like("no_mask")(*qkv(queries=1)))


def test_bias_sink_and_layer_scaling():
    bias, sink = torch.randn(1, 4, 7, 7), torch.randn(4)
    module = attention(sink=sink, apply_query_key_layer_scaling=True)
    module.softmax_scale = 0.15
    out = core_attention_forward(module, *qkv(), None, attention_bias=bias)
    reference = like("causal", softmax_type="learnable")
    reference.softmax_offset.data.copy_(sink)
    expected = reference(
        *qkv(), core_attention_bias_type="post_scale_bias", core_attention_bias=bias
    )
    torch.testing.assert_close(out, expected)


def test_packed_documents():
    cu_seqlens = torch.tensor([0, 3, 7])
    packed = SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
    )
    tensors = tuple(x[:, 0] for x in qkv())
    out = core_attention_forward(attention(), *tensors, None, packed_seq_params=packed)
    options = {"qkv_format": "thd", "cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    torch.testing.assert_close(out, like("padding_causal")(*tensors, **options))


class Module:
    """What Megatron's constructor leaves behind."""

    pg_collection = SimpleNamespace(cp="the group")


def constructor(seen):
    def init(self, config, softmax_scale=None, cp_comm_type=None):
        seen.update(ranks=config.context_parallel_size, scale=softmax_scale)

    return local_attention.accept_head_sizes(init)


def test_head_sizes_are_accepted_and_set_the_default_scale():
    seen = {}
    alone = SimpleNamespace(context_parallel_size=1)
    constructor(seen)(Module(), alone, k_channels=16, v_channels=4)
    assert seen == {"ranks": 1, "scale": 0.25}
    constructor(seen)(Module(), alone, k_channels=16, softmax_scale=0.5)
    assert seen["scale"] == 0.5


def test_context_parallel_size_is_hidden_from_the_constructor_that_refuses_it():
    seen, module = {}, Module()
    split = SimpleNamespace(context_parallel_size=4)
    constructor(seen)(module, split, cp_comm_type="a2a")
    assert seen["ranks"] == 1
    assert module.config is split and split.context_parallel_size == 4
    assert module.cp_groups == "the group" and module.cp_comm_type == "a2a"
