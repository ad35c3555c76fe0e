"""Flags of parts that Megatron lacks: refused where they would have no effect."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from tests.support.lazy import needs, needs_transformers

needs("megatron.core", "transformers")

from mindspeed.attention import contiguous
from mindspeed.attention.packed_batch import PackedBatch
from mindspeed.errors import ConfigError
from mindspeed.models.megatron_choice import BestOfGroups
from mindspeed.models.megatron_chunks import with_chunks
from mindspeed.models.megatron_layers import LocalRotation
from mindspeed.models.rope_parameters import RopeParameters
from mindspeed.training.arguments import build_parser
from mindspeed.training.recipe import parse_with_recipe

RUN = (
    "--num-layers=2",
    "--hidden-size=32",
    "--num-attention-heads=4",
    "--seq-length=16",
    "--micro-batch-size=1",
    "--lr=1",
    "--train-iters=1",
    "--mock-data",
    "--tokenizer-type=NullTokenizer",
    "--vocab-size=64",
)
ROPE = "--position-embedding-type=rope"
CP = "--context-parallel-size=2"
NOPE = ("--nope-temperature=0.1", "--no-rope-freq=2", ROPE)
EXPERTS = ("--num-experts=4",)
YARN = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--qk-norm-after-rope",), "has no effect without --qk-layernorm"),
        (("--qk-norm-over-all-heads", "--qk-layernorm"), "give one of them"),
        (("--local-rotary-base=100", ROPE, "--window-size=4,0"), "as a list"),
        ((f"--rope-parameters={YARN}",), "has no effect without --position-embedding-type rope"),
        (("--rope-parameters={", ROPE), "--rope-parameters is no valid JSON"),
        (("--rope-parameters=[]", ROPE), "allowed is a JSON object"),
        (('--rope-parameters={"rope_type": "ntk"}', ROPE), "rope_type is 'ntk'; allowed are"),
        (('--rope-parameters={"rope_type": "yarn"}', ROPE), "yarn has no factor"),
        (("--geglu", "--swiglu"), "give one of --swiglu"),
        (("--attention-logit-softcap=50", CP), "cannot share a sequence of bounded scores"),
        (("--attention-logit-softcap=50", "--softmax-type=learnable"), "does not work with"),
        (("--attention-chunk-size=8", CP), "cannot share a sequence of more than one chunk"),
        ((*NOPE, "--nope-temperature-floor=9", CP), "allowed is --seq-length below"),
        (NOPE[:1], "give --no-rope-freq"),
        (("--moe-softmax-choice-bias",), "has no effect without --num-experts"),
        ((*EXPERTS, "--moe-group-score-experts=1"), "without --moe-router-group-topk"),
        (
            (*EXPERTS, "--moe-softmax-choice-bias", "--moe-router-score-function=sigmoid"),
            "have --moe-router-enable-expert-bias",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_flag_without_effect_is_refused(words, message):
    from mindspeed.training.resolve import resolve

    with pytest.raises(ConfigError) as error:
        resolve(parse_with_recipe([*RUN, *words], build_parser()), 1 + (CP in words))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "flags", [{"norm_placement": "post"}, {"qk_norm_over_all_heads": True}], ids=str
)
def test_a_grid_of_ranks_refuses_norms_that_it_lacks(flags):
    from mindspeed.features.tensor_parallel.tensor_parallel_2d import TensorParallel2D

    sizes = {"tensor_model_parallel_size": 4, "hidden_size": 32, "num_attention_heads": 4}
    feature = TensorParallel2D(tp_2d=True, tp_x=2, tp_y=2)
    assert not list(feature.problems({**sizes, "norm_placement": "pre"}))
    (problem,) = feature.problems({**sizes, **flags})
    assert "--" + next(iter(flags)).replace("_", "-") in str(problem)


class Causal(torch.nn.Module):
    """Core attention of queries that stand at the end of the keys' sequence."""

    def forward(self, q, k, v, mask, packed_seq_params=None):
        if packed_seq_params is not None:  # of two samples
            q, k, v = (x.transpose(0, 1).flatten(0, 1)[:, None] for x in (q, k, v))
            parts = itertools.pairwise(packed_seq_params.packed.cu_seqlens)
            out = [Causal.forward(self, q[a:b], k[a:b], v[a:b], None) for a, b in parts]
            return torch.cat(out).view(2, -1, *q.shape[2:]).transpose(0, 1)
        scores = torch.einsum("qbhd,kbhd->bhqk", q, k)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
        return torch.einsum("bhqk,kbhd->qbhd", scores.masked_fill(~hidden, -1e9).softmax(-1), v)


def test_a_token_that_comes_later_sees_its_chunk_and_has_its_temperature():
    module = with_chunks(Causal)()
    q, k, v = torch.randn(3, 11, 2, 3, 4)
    plain = module(q, k, v, None)
    module.chunk, module.temperature = 4, (0.5, 3)
    whole = module(q, k, v, None)
    alone = [module(q[i : i + 1], k[: i + 1], v[: i + 1], None) for i in range(11)]
    torch.testing.assert_close(torch.cat(alone), whole)
    torch.testing.assert_close(whole[:2], plain[:2])  # below the floor, in the first chunk
    torch.testing.assert_close(whole[4], v[4])  # the first of its chunk


@pytest.mark.parametrize("chunk", [4, 20])
def test_packed_documents_count_from_their_own_start(chunk):
    module = with_chunks(Causal)()
    q, k, v = torch.randn(3, 11, 2, 3, 4)
    module.chunk, module.temperature = chunk, (0.5, 3)
    ends = (0, 2, 11, 16, 22)
    packed = PackedBatch(ends, 2, 11, contiguous(11, 1, 2), torch.empty(0))
    params = SimpleNamespace(packed=packed, cu_seqlens_q=torch.tensor(ends))
    found = module(q, k, v, None, packed_seq_params=params).transpose(0, 1).flatten(0, 1)
    q, k, v = (x.transpose(0, 1).flatten(0, 1)[:, None] for x in (q, k, v))
    for a, b in itertools.pairwise(ends):
        torch.testing.assert_close(found[a:b, None], module(q[a:b], k[a:b], v[a:b], None))


def test_groups_are_chosen_by_their_best_experts():
    scores = torch.tensor([[0.9, 0.0, 0.6, 0.5, 0.7, 0.1]])
    found = {n: BestOfGroups(n).get_replay_topk(scores, 2, 3, 1)[1].tolist() for n in (1, 2)}
    assert found == {1: [[0, 1]], 2: [[2, 3]]}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("first", [1.0, 0.125, 1 / 3])
def test_local_angles_are_those_of_the_same_positions(interleaved, first):
    """Positions of any order, as ranks of context parallelism have them."""
    positions = torch.tensor([0, 1, 7, 4096, 131071], dtype=torch.float32)

    def angles(frequencies):
        half = torch.outer(positions, frequencies)
        whole = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
        return whole[:, None, None]

    def plain(base):
        return 1.0 / base ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)

    found = LocalRotation(100.0, first, interleaved)(angles(first * plain(1e6)))
    torch.testing.assert_close(found, angles(plain(100.0)))


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 3.0},
        {"rope_type": "yarn", "factor": 8.0, "truncate": False, "beta_fast": 16.0},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 0.5},
        {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5},
        {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ],
    ids=lambda settings: "-".join(map(str, settings)),
)
@needs_transformers("5")
@pytest.mark.parametrize("length", [16, 100])
def test_frequencies_equal_those_of_transformers(settings, length):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    longest = 32 if settings["rope_type"] == "dynamic" else 128
    rope = {"rope_theta": 5000.0, "original_max_position_embeddings": 32, **settings}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=longest,
        rope_parameters=rope,
    )
    theirs, scale = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, "cpu", seq_len=length)
    without = {key: value for key, value in rope.items() if key != "rope_theta"}
    ours = RopeParameters.read(without, longest, "config.json: rope_scaling")
    torch.testing.assert_close(ours.frequencies(5000.0, 16, length), theirs)
    assert math.isclose(ours.scale, scale)
    again = RopeParameters.of(ours.text())
    assert again == ours and RopeParameters.read(ours.keys(), longest, "") == ours
