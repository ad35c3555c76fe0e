"""Gated delta net: its documents, and the formats that have a place for it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.lazy import Lazy, needs, needs_transformers

needs("megatron.core", "transformers")

from safetensors.torch import load_file

from mindspeed.attention.sequence_sharding import SequenceSharding
from mindspeed.errors import ConfigError
from mindspeed.instruments.ledger import CommLedger
from mindspeed.profiling.model_flops import linear_pattern
from mindspeed.te.context_parallel import megatron_layout
from mindspeed.testing import RankError
from tests.models import model_ranks
from tests.support.tiny import CASES, folders

Target = Lazy("mindspeed.checkpoint.weights.convert", "Target")
convert = Lazy("mindspeed.checkpoint.weights.convert", "convert")
open_weights = Lazy("mindspeed.checkpoint.weights.convert", "open_weights")
SETUP = "tests.support.warm"


def by_documents(folder, ends):
    """Outputs of the model's delta net: of packed samples, and of each document alone."""
    _, model = model_ranks.loaded(folder, CASES["qwen3.5"].flags)
    (net,) = (part for part in model.modules[0].modules() if type(part).__name__ == "DeltaNet")
    hidden = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1))
    packed = SimpleNamespace(packed=SimpleNamespace(cu_seqlens=tuple(ends)))
    with torch.no_grad():
        together, _ = net(hidden, packed_seq_params=packed)
        joined = hidden.transpose(0, 1).reshape(32, 1, 32)
        alone = [net(joined[start:end])[0] for start, end in itertools.pairwise(ends)]
    return together, torch.cat(alone).view(2, 16, 32).transpose(0, 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return folders(tmp_path_factory)


@needs_transformers("5")
def test_documents_do_not_see_each_other(tiny, ranks):
    ends = [0, 5, 16, 17, 32]
    ((together, alone),) = ranks(1, by_documents, str(tiny("qwen3.5")), ends, setup=SETUP)
    torch.testing.assert_close(together, alone)


def of_shards(folder, flags, ends, segments):
    """A delta net over the tokens of all context-parallel ranks: results, and what is sent.

    Rank r has the tokens ``segments[r]`` of the concatenated samples; without ``segments`` those
    of Megatron's batches, without ``ends`` whole samples.
    """
    from megatron.core import parallel_state

    _, model = model_ranks.loaded(folder, (*CASES["qwen3-next"].flags, *flags))
    (net,) = (part for part in model.modules[0].modules() if type(part).__name__ == "DeltaNet")
    group = parallel_state.get_context_parallel_group()
    whole = torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(1))
    sharding = megatron_layout(16, group.size(), 2)
    if segments is not None:
        sharding = SequenceSharding(segments)
    rows = sharding.positions(group.rank())
    flat = whole.transpose(0, 1).flatten(0, 1)
    mine = flat[rows].view(2, -1, 32).transpose(0, 1).contiguous().requires_grad_()
    params = None
    if ends is not None:
        packed = SimpleNamespace(sharding=sharding, cu_seqlens=tuple(ends))
        params = SimpleNamespace(packed=packed)
    with CommLedger() as ledger:
        out, _ = net(mine, packed_seq_params=params)
        out.backward(flat[rows].view(2, -1, 32).transpose(0, 1).sin())
    weights = {}
    for name, weight in net.named_parameters():
        weights[name] = weight.grad if weight.grad is not None else weight.main_grad
        dist.all_reduce(weights[name], group=group)
    results = [torch.zeros(32, 32) for _ in range(2)]
    for result, part in zip(results, (out.detach(), mine.grad), strict=True):
        result[rows] = part.transpose(0, 1).flatten(0, 1)
        dist.all_reduce(result, group=group)
    sent = [ledger.wire_bytes("all_to_all", phase=phase) for phase in ("forward", "backward")]
    return results, weights, sent, ledger.calls("all_to_all")


THREE = [0, 5, 16, 17, 32]
ODD = (((3, 9), (20, 30)), ((0, 3), (9, 20), (30, 32)))  # as an adaptive sharding may be


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("ranks_of", "ends", "segments"),
    [(2, THREE, None), (2, THREE, ODD), (4, THREE, None), (4, None, None)],
    ids=["documents-2", "any-sharding", "documents-4", "samples-4"],
)
def test_ranks_that_share_a_sequence_are_one_rank(tiny, ranks, ranks_of, ends, segments):
    """Outputs, gradients of the input and of each weight, of documents across borders of ranks."""
    folder = str(tiny("qwen3-next"))
    options = {"setup": SETUP, "timeout": 120}
    ((truth, weights, sent, _),) = ranks(1, of_shards, folder, (), ends, None, **options)
    assert sent == [0, 0] and all(bool(weight.any()) for weight in weights.values())
    flags = (f"--context-parallel-size={ranks_of}",)
    found = ranks(ranks_of, of_shards, folder, flags, ends, segments, **options)
    for results, gradients, *_ in found:
        torch.testing.assert_close(results, truth, rtol=1e-5, atol=1e-6)
        assert gradients.keys() == weights.keys()
        torch.testing.assert_close(gradients, weights, rtol=1e-5, atol=1e-5)


def test_two_all_to_alls_in_each_pass_send_what_the_page_says(tiny, ranks):
    """Of two ranks each sends half of q, k, v, beta, alpha and of the outputs of its 16 tokens."""
    flags = ("--context-parallel-size=2",)
    found = ranks(2, of_shards, str(tiny("qwen3-next")), flags, THREE, None, setup=SETUP)
    q, v, heads = 2 * 6, 4 * 10, 4
    expected = 16 * 4 * (2 * q + v + 2 * heads + v) // 2
    assert [result[2:] for result in found] == [([expected, expected], 4)] * 2


def test_more_ranks_than_value_heads_are_refused(tiny, ranks):
    flags = ("--context-parallel-size=8",)
    with pytest.raises(RankError, match="heads 4 over 1 tensor-parallel and 8 context-parallel"):
        ranks(8, of_shards, str(tiny("qwen3-next")), flags, None, None, setup=SETUP)


ROUND_TRIPS = "qwen3-next qwen3.5 gpt-oss gemma2 gemma3 olmo3 llama4 ernie4.5-moe hunyuan-moe"


OF_TRANSFORMERS_5 = {"qwen3.5", "gemma3", "olmo3"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs_transformers("5") if name in OF_TRANSFORMERS_5 else ())
        for name in [*ROUND_TRIPS.split(), "granite-moe"]
    ],
)
def test_converting_there_and_back_gives_the_same_bytes(tiny, tmp_path, name):
    convert(open_weights(tiny(name)), tmp_path / "megatron", Target("torch_dist"))
    convert(open_weights(tmp_path / "megatron"), tmp_path / "back", Target("hf"))
    ours, theirs = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "back", tiny(name))
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@needs_transformers("5")
def test_files_of_ranks_are_refused(tiny, tmp_path):
    with pytest.raises(ConfigError, match="gated delta net"):
        convert(open_weights(tiny("qwen3.5")), tmp_path / "out", Target("torch"))


def test_layers_by_frequency_or_one_by_one():
    def pattern(layers, frequency, variant="gated_delta_net"):
        names = ("num_layers", "linear_attention_freq", "experimental_attention_variant")
        return linear_pattern(dict(zip(names, (layers, frequency, variant), strict=True)))

    assert pattern(2, 4, None) == [False, False]
    assert pattern(8, 4) == [True, True, True, False] * 2
    assert pattern(2, [0, 1]) == [False, True]
