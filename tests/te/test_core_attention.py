"""Which attention runs, decided alike for the Transformer Engine substitute and the local spec."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from mindspeed.attention import contiguous
from mindspeed.attention.packed_batch import PackedBatch
from mindspeed.errors import ConfigError
from mindspeed.features.attention.flash_attention import FlashAttention
from mindspeed.journal import Journal
from mindspeed.te import attention_policy, context_parallel, kernels
from mindspeed.te.dot_product import DotProductAttention
from mindspeed.te.local_attention import core_attention_forward
from tests.support.seams import fresh_seams

LENGTH, SAMPLES, HEADS, SIZE = 6, 2, 4, 8
CU_SEQLENS = (0, 2, 6, 9, 12)  # documents of both samples


def qkv() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(LENGTH, SAMPLES, HEADS, SIZE) for _ in range(3))


def engine(q, k, v, *, mask=None, packed=None, bias=None, thd=None, groups=None, softcap=None):
    module = DotProductAttention(HEADS, SIZE, attn_mask_type="causal", softmax_scale=0.3)
    module.set_context_parallel_group(groups, None, None)
    module.softcap = softcap
    cu_seqlens = thd if packed is None else torch.tensor(packed.cu_seqlens)
    options = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens, "packed": packed}
    if thd is not None:
        options |= {"qkv_format": "thd"}
    if bias is not None:
        options |= {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    return module(q, k, v, mask, **options)


def local(q, k, v, *, mask=None, packed=None, bias=None, thd=None, groups=None, softcap=None):
    config = SimpleNamespace(
        apply_query_key_layer_scaling=False, num_attention_heads=HEADS, sequence_parallel=False
    )
    module = SimpleNamespace(
        config=config,
        attn_mask_type=SimpleNamespace(name="causal"),
        scale_mask_softmax=SimpleNamespace(window_size=None),
        softmax_scale=0.3,
        softmax_offset=None,
        softcap=softcap,
        layer_number=1,
        attention_dropout=torch.nn.Dropout(0.0),
        training=True,
        cp_groups=groups,
        cp_comm_type="p2p",
        pg_collection=SimpleNamespace(tp=None),
    )
    params = None
    if packed is not None or thd is not None:
        cu_seqlens = thd if packed is None else torch.tensor(packed.cu_seqlens)
        params = SimpleNamespace(
            qkv_format="sbhd" if thd is None else "thd", cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
            packed=packed,
        )  # fmt: skip
    return core_attention_forward(
        module, q, k, v, mask, attention_bias=bias, packed_seq_params=params
    )


SPECS = pytest.mark.parametrize("spec", [engine, local])


def packed_samples() -> PackedBatch:
    layout = contiguous(LENGTH, 1, SAMPLES)
    positions = torch.empty(0, dtype=torch.int64)
    return PackedBatch(CU_SEQLENS, SAMPLES, LENGTH, layout, positions)


@SPECS
def test_packed_samples_equal_their_documents_alone(spec):
    q, k, v = qkv()
    out = spec(q, k, v, packed=packed_samples())
    tokens = [x.transpose(0, 1).flatten(0, 1) for x in (q, k, v)]
    for start, end in itertools.pairwise(CU_SEQLENS):
        alone = spec(*(x[start:end, None] for x in tokens))
        found = out.transpose(0, 1).flatten(0, 1)[start:end, None]
        torch.testing.assert_close(found, alone)


@SPECS
def test_bounded_scores_are_the_formula_whatever_kernels_features_bring(spec):
    q, k, v = qkv()
    journal = Journal()
    for name in ("attend", "attend_packed"):
        journal.set(kernels, name, None, owner="test")
    try:
        dense = spec(q, k, v, softcap=0.5)
        packed = spec(q, k, v, packed=packed_samples(), softcap=0.5)
        with pytest.raises(NotImplementedError, match="--attention-logit-softcap"):
            spec(q, k, v, groups=SimpleNamespace(size=lambda: 2), softcap=0.5)
    finally:
        journal.undo()
    scores = 0.5 * torch.tanh(torch.einsum("qbhd,kbhd->bhqk", q, k) * 0.3 / 0.5)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1], [2, 2, 2, 3, 3, 3]])
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    same = documents[:, None, :, None] == documents[:, None, None]
    for found, seen in ((dense, causal), (packed, causal & same)):
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        truth = torch.einsum("bhqk,kbhd->qbhd", weights, v).flatten(2)
        torch.testing.assert_close(found, truth)


@SPECS
def test_each_kind_of_batch_runs_the_same_attention_in_both_specs(spec):
    """The kernels and the plan executor are replaced by markers that return zeros."""
    called: list[str] = []

    def marker(name, shape):
        def attend(q, *args, **options):
            called.append(name)
            return q.new_zeros(shape)

        return attend

    tokens, width = LENGTH * SAMPLES, HEADS * SIZE
    q, k, v = qkv()
    flat = tuple(x.flatten(0, 1) for x in (q, k, v))
    journal = Journal()
    sharded = SimpleNamespace(size=lambda: 2)
    for module, name, shape in (
        (kernels, "attend", (SAMPLES, HEADS, LENGTH, SIZE)),
        (kernels, "attend_packed", (tokens, width)),
        (context_parallel, "attend", (LENGTH, SAMPLES, width)),
        (context_parallel, "attend_thd", (tokens, width)),
    ):
        label = f"{module.__name__.rpartition('.')[2]}.{name}"
        journal.set(module, name, marker(label, shape), owner="test")
    thd = torch.tensor(CU_SEQLENS)
    try:
        for tensors, options in (
            ((q, k, v), {}),
            (flat, {"thd": thd}),
            ((q, k, v), {"packed": packed_samples()}),
            ((q, k, v), {"groups": sharded}),
            (flat, {"groups": sharded, "thd": thd}),
            ((q, k, v), {"groups": sharded, "packed": packed_samples()}),
        ):
            out = spec(*tensors, **options)
            assert out.shape == (*tensors[0].shape[:-2], width)
        journal.set(attention_policy, "user_mask", lambda length, samples: "mask", owner="test")
        spec(q, k, v)
    finally:
        journal.undo()
    assert called == [
        "kernels.attend",
        "kernels.attend_packed",
        "kernels.attend_packed",
        "context_parallel.attend",
        "context_parallel.attend_thd",
        "context_parallel.attend",
        "context_parallel.attend",
    ]


@SPECS
@pytest.mark.parametrize("by_plan", ["user's mask", "shared sequence", "shared documents"])
def test_flash_attention_is_reached_where_a_plan_has_its_blocks(spec, by_plan):
    """Its flag is not refused as one that did nothing."""
    journal, tensors, options = Journal(), qkv(), {}
    shape = (LENGTH, SAMPLES, HEADS * SIZE)
    if by_plan == "user's mask":
        journal.set(attention_policy, "user_mask", lambda length, samples: "mask", owner="test")
    else:
        options["groups"] = SimpleNamespace(size=lambda: 2)
    if by_plan == "shared documents":
        options["thd"] = torch.tensor([0, 2 * LENGTH * SAMPLES])
        tensors = tuple(x.flatten(0, 1) for x in tensors)
        shape = (LENGTH * SAMPLES, 1, HEADS * SIZE)
    journal.set(context_parallel, "attend", lambda q, *_, **__: q.new_zeros(shape), owner="test")
    try:
        with fresh_seams() as seams:
            FlashAttention().attach(seams, {})
            spec(*tensors, **options)
            assert [use.place for use in seams.uses() if use.reached] == ["kernels.attend_by_plan"]
    finally:
        journal.undo()


@SPECS
def test_a_bias_over_a_sharded_sequence_is_refused_in_both_specs(spec):
    sharded = SimpleNamespace(size=lambda: 2)
    bias = torch.zeros(1, HEADS, LENGTH, LENGTH)
    text = r"--context-parallel-size 2 \(--cp-comm-type p2p\) does not work with a bias tensor"
    with pytest.raises(NotImplementedError, match=text):
        spec(*qkv(), bias=bias, groups=sharded)


def test_a_mask_tensor_over_a_sharded_sequence_is_refused_in_the_local_spec():
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with pytest.raises(ConfigError, match="--no-create-attention-mask-in-dataloader"):
        local(*qkv(), mask=mask, groups=SimpleNamespace(size=lambda: 2))
