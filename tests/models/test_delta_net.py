"""Gated delta net: its documents, and the formats that have a place for it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.support.lazy import Lazy, needs

needs("megatron.core", "transformers")

from safetensors.torch import load_file

from mindspeed.errors import ConfigError
from mindspeed.profiling.model_flops import linear_pattern
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
    packed = SimpleNamespace(packed=SimpleNamespace(size=16, cu_seqlens=tuple(ends)))
    with torch.no_grad():
        together, _ = net(hidden, packed_seq_params=packed)
        joined = hidden.transpose(0, 1).reshape(32, 1, 32)
        alone = [net(joined[start:end])[0] for start, end in itertools.pairwise(ends)]
    return together, torch.cat(alone).view(2, 16, 32).transpose(0, 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return folders(tmp_path_factory)


def test_documents_do_not_see_each_other(tiny, ranks):
    ends = [0, 5, 16, 17, 32]
    ((together, alone),) = ranks(1, by_documents, str(tiny("qwen3.5")), ends, setup=SETUP)
    torch.testing.assert_close(together, alone)


ROUND_TRIPS = "qwen3-next qwen3.5 gpt-oss gemma2 gemma3 olmo3 llama4 ernie4.5-moe hunyuan-moe"


@pytest.mark.parametrize("name", [*ROUND_TRIPS.split(), "granite-moe"])
def test_converting_there_and_back_gives_the_same_bytes(tiny, tmp_path, name):
    convert(open_weights(tiny(name)), tmp_path / "megatron", Target("torch_dist"))
    convert(open_weights(tmp_path / "megatron"), tmp_path / "back", Target("hf"))
    ours, theirs = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "back", tiny(name))
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


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
