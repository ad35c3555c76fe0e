"""The experts' exchanges against one process: outputs, gradients, collectives and their bytes."""

from __future__ import annotations

import pytest
import torch

from tests.ops import expert_exchange_ranks as jobs

E, C, H, M = 4, 4, 6, 10  # experts, capacity, hidden, inner features
GRIDS = pytest.mark.parametrize(("ep", "tp"), [(2, 2), (1, 2), (2, 1), (4, 1), (1, 1)])
SHARDS = pytest.mark.parametrize("shard_type", [0, 1])
FLOAT64 = 8


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def parts(x, ep, tp, ep_dim, tp_dim):
    """Each rank's slice of a whole tensor; a dimension of None is not cut."""
    for i in range(ep):
        by_ep = x if ep_dim is None else x.chunk(ep, ep_dim)[i]
        for j in range(tp):
            yield (by_ep if tp_dim is None else by_ep.chunk(tp, tp_dim)[j]).detach().contiguous()


def tokens(x, ep, tp, shard_type):
    """Each rank's slice of ``[ep, E, C, H]``: its own tokens, cut over TP."""
    cut = parts(x, ep, tp, 0, 3 if shard_type == 0 else 2)
    return [part.squeeze(0) for part in cut]


def by_expert(x):
    """``[ep, E, C, H]`` as ``[E, ep C, H]``."""
    return x.transpose(0, 1).flatten(1, 2)


def slices(ep, tp, **tensors):
    """One dictionary for each rank from lists by rank."""
    return [{name: values[rank] for name, values in tensors.items()} for rank in range(ep * tp)]


ACTIVATIONS = {
    "None": lambda x: x,
    "GELU": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "Silu": lambda x: x / (1 + torch.exp(-x)),
    "FastGELU": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "Relu": lambda x: x.clamp(min=0),
}


def check_first(ranks, ep, tp, shard_type, act_type):
    x, w, b = draw(ep, E, C, H, seed=0), draw(E, H, M, seed=1), draw(E, M, seed=2)
    before = torch.einsum("ech,ehm->ecm", by_expert(x), w) + b[:, None]
    y = ACTIVATIONS[act_type](before)
    cotangent = draw(E, ep * C, M, seed=3).detach()
    (y * cotangent).sum().backward()
    arguments = slices(
        ep,
        tp,
        x=tokens(x, ep, tp, shard_type),
        weight=list(parts(w, ep, tp, 0, 2)),
        bias=list(parts(b, ep, tp, 0, 1)),
    )
    extras = {"need_allgather_out": True, "need_activation_feature": True}
    options = {"shard_type": shard_type, "act_type": act_type, **extras}
    cotangents = list(parts(cotangent, ep, tp, 0, 2))
    results = ranks(ep * tp, jobs.run, "first", ep, tp, arguments, cotangents, options)
    expected = zip(
        parts(y, ep, tp, 0, 2),
        parts(by_expert(x), ep, tp, 0, None),
        parts(before, ep, tp, 0, 2),
        tokens(x.grad, ep, tp, shard_type),
        parts(w.grad, ep, tp, 0, 2),
        parts(b.grad, ep, tp, 0, 1),
        strict=True,
    )
    for result, (y1, y2, y3, dx, dw, db) in zip(results, expected, strict=True):
        out, (gathered, feature), gradients, sent = result
        torch.testing.assert_close((out, gathered, feature), (y1, y2, y3))
        torch.testing.assert_close(gradients, {"x": dx, "weight": dw, "bias": db})
        assert sent == counts(ep, tp, first=True)


def check_second(ranks, ep, tp, shard_type):
    x, w, b = draw(E, ep * C, M, seed=0), draw(E, M, H, seed=1), draw(E, H, seed=2)
    y = torch.einsum("ecm,emh->ech", x, w) + b[:, None]
    y = y.unflatten(1, (ep, C)).transpose(0, 1)  # each EP rank's own tokens
    cotangent = draw(ep, E, C, H, seed=3).detach()
    (y * cotangent).sum().backward()
    over_tp = 1 if shard_type == 0 else None
    arguments = slices(
        ep,
        tp,
        x=list(parts(x, ep, tp, 0, 2)),
        weight=list(parts(w, ep, tp, 0, 1)),
        bias=list(parts(b, ep, tp, 0, over_tp)),
    )
    cotangents = tokens(cotangent, ep, tp, shard_type)
    options = {"shard_type": shard_type}
    results = ranks(ep * tp, jobs.run, "second", ep, tp, arguments, cotangents, options)
    expected = zip(
        tokens(y, ep, tp, shard_type),
        parts(x.grad, ep, tp, 0, 2),
        parts(w.grad, ep, tp, 0, 1),
        strict=True,
    )
    for (out, _, gradients, sent), (wanted, dx, dw) in zip(results, expected, strict=True):
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close((gradients["x"], gradients["weight"]), (dx, dw))
        assert sent == counts(ep, tp, first=False)
    # With rows cut over TP every rank holds the whole bias and the gradient of its own rows.
    db = torch.stack([gradients["bias"] for _, _, gradients, _ in results]).unflatten(0, (ep, tp))
    whole = (
        db.sum(1).flatten(0, 1) if shard_type == 1 else db.transpose(1, 2).flatten(2).flatten(0, 1)
    )
    torch.testing.assert_close(whole, b.grad)


def counts(ep, tp, first):
    """One collective over EP and one over TP each way, of the tokens of one rank."""
    own = E * C * H // tp * FLOAT64
    come = [("all_to_all", own)] * (ep > 1) + [("all_gather", own)] * (tp > 1)
    go = [("reduce_scatter", own * tp)] * (tp > 1) + [("all_to_all", own)] * (ep > 1)
    forward, backward = (come, go) if first else (go, come)
    return [("forward", *e) for e in forward] + [("backward", *e) for e in backward]


@pytest.mark.quick_cases(4)
@GRIDS
@SHARDS
def test_first_product_equals_one_process(ranks, ep, tp, shard_type):
    check_first(ranks, ep, tp, shard_type, "None")


@pytest.mark.parametrize("act_type", [name for name in ACTIVATIONS if name != "None"])
def test_activations(ranks, act_type):
    check_first(ranks, 2, 1, 0, act_type)


@pytest.mark.quick_cases(4)
@GRIDS
@SHARDS
def test_second_product_equals_one_process(ranks, ep, tp, shard_type):
    check_second(ranks, ep, tp, shard_type)


def test_bf16_with_an_fp32_bias_rounds_once(ranks):
    x, w, b = (draw(*s, seed=i).detach() for i, s in enumerate(((E, C, H), (E, H, M), (E, M))))
    given = {"x": x.bfloat16(), "weight": w.bfloat16(), "bias": b.float()}
    truth = torch.bmm(given["x"].double(), given["weight"].double()) + given["bias"][:, None]
    cotangent = [torch.ones(E, C, M).bfloat16()]
    ((y, _, gradients, _),) = ranks(1, jobs.run, "first", 1, 1, [given], cotangent, {})
    assert y.dtype == torch.bfloat16
    assert gradients["bias"].dtype == torch.float32
    assert (y - truth).abs().max() <= 2**-7 * truth.abs().max()


def test_a_frozen_weight_does_not_save_the_gathered_tokens(ranks):
    x, w = draw(E, C, H, seed=0).detach(), draw(E // 2, H, M, seed=1).detach()
    for trained, frozen in ranks(2, jobs.frozen_weight_keeps_no_tokens, x, w):
        assert trained - frozen == E // 2 * 2 * C * H * FLOAT64


@pytest.mark.slow
def test_opcheck_and_compile(ranks):
    shapes = ((E, C, H), (E // 2, H, M), (E // 2, 2 * C, M), (E // 2, M, H))
    tensors = [draw(*shape, seed=i).detach() for i, shape in enumerate(shapes)]
    for plain, compiled in ranks(2, jobs.opcheck_and_compile, *tensors, timeout=240):
        torch.testing.assert_close(compiled, plain)


REFUSED = [
    ("first", {"act_type": "Tanh"}, "act_type: expected one of 'None', 'GELU'"),
    ("first", {"group_ep_worldsize": 4}, "group_ep_worldsize: expected the 2 ranks of the group"),
    ("first", {"group_tp": "the group of EP"}, "group_tp: expected another group than group_ep"),
    ("first", {"shard_type": 2}, "shard_type: expected one of 0, 1, got 2"),
    ("first", {"x": torch.ones(3, 3, 2)}, "x: expected 4 experts"),
    ("first", {"x": torch.ones(4, 3)}, "x: expected 3 dimensions"),
    ("first", {"weight": torch.ones(2, 3, 5)}, "weight: expected 4 rows an expert"),
    ("first", {"weight": torch.ones(2, 4, 5).half()}, "weight: expected the dtype of x"),
    ("first", {"bias": torch.ones(2, 4)}, "bias: expected shape (2, 5) or (2, 1, 5)"),
    ("first", {"bias": torch.ones(2, 5).half()}, "bias: expected dtype float32"),
    ("second", {"x": torch.ones(2, 3, 3)}, "x: expected a number of rows that 2 divides"),
    ("second", {"x": torch.ones(2, 6, 3), "shard_type": 1}, "a number of rows that 4 divides"),
    ("second", {"weight": torch.ones(2, 3, 5)}, "weight: expected a hidden size that 2 divides"),
    ("second", {"weight": torch.ones(2, 4, 4)}, "weight: expected shape (2, 3, H)"),
    ("second", {"bias": torch.ones(2, 4)}, "bias: expected shape (2, 2) or (2, 1, 2)"),
]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("which", "change", "message"), REFUSED)
def test_refuses(ranks, which, change, message):
    for text in ranks(4, jobs.refusal, which, change):
        assert text.startswith(f"mindspeed.ops.{jobs.FUNCTIONS[which].__name__}: ")
        assert message in text
