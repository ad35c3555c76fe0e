"""Functions that MindSpeed-LLM and MindSpeed-MM call on several ranks, and checkpoints."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mindspeed.errors import ConfigError
from tests.support.lazy import needs

needs("megatron.core")

from tests.original import collective_calls, framework_calls

WARM = {"setup": "tests.support.warm", "timeout": 180}
ONE = SimpleNamespace(size=lambda: 2, rank=lambda: 1)


@pytest.mark.parametrize("count", [1, 2])
def test_tokens_split_and_gathered_equal_the_whole_sequence(ranks, count):
    for error in ranks(count, collective_calls.audio_encoder, **WARM):
        assert error < 1e-12


def test_gradients_are_scaled_as_they_are_told(ranks):
    for found in ranks(2, collective_calls.gradient_scales, **WARM):
        assert found == {"up": [2, 2], "down": [0.5, 0.5], None: [1, 1]}


@pytest.mark.parametrize("count", [1, 2])
def test_attention_between_two_all_to_alls_equals_the_whole(ranks, count):
    for found in ranks(count, collective_calls.heads_and_sequence, **WARM):
        for name, error in found.items():
            assert error < 1e-12, name


def test_parts_of_another_size_are_refused():
    from mindspeed.core.context_parallel.ulysses_context_parallel.unaligned_cp import mapping

    x = torch.zeros(4, 3, 2)
    with pytest.raises(ConfigError, match=r"rank 1 has 4 .* dimension 0, not 3 of 7; .* \[4, 3\]"):
        mapping.all_to_all(x, ONE, scatter_dim=1, gather_dim=0, gather_size=7)
    with pytest.raises(ConfigError, match="rank 1 has 4 elements of dimension 0, not 3 of 7"):
        mapping.gather_forward_split_backward(x, ONE, 0, [4, 3])
    with pytest.raises(ConfigError, match=r"3 elements are not the parts \[1, 1\] of 2 ranks"):
        mapping.split_forward_gather_backward(x, ONE, 1)
    with pytest.raises(ConfigError, match="grad_scale='mean' is not one of"):
        mapping.split_forward_gather_backward(x, ONE, 0, None, "mean")


@pytest.mark.parametrize("count", [1, 2])
def test_started_collectives(ranks, count):
    for found in ranks(count, collective_calls.started_collectives, **WARM):
        assert all(found.values()), found


@pytest.mark.parametrize(("x", "y"), [(2, 1), (2, 2)])
def test_norm_and_mlp_on_a_grid_equal_dense_ones(ranks, x, y):
    for error in ranks(x * y, collective_calls.two_dimensional, x, y, **WARM):
        assert error < 1e-10


def test_layers_of_a_grid_need_one():
    from mindspeed.core.tensor_parallel.tp_2d.group_api_2d import TPXCollectiveComm

    with pytest.raises(ConfigError, match=r"there is no grid .* add --tp-2d --tp-x X --tp-y Y"):
        TPXCollectiveComm.get_comm_group()


def test_discarded_outputs_are_computed_again(ranks):
    (found,) = ranks(1, framework_calls.discarded_outputs, backend=None, **WARM)
    assert found.pop("error") < 1e-12
    assert found == {
        "discarded": [0, 0, 0],
        "restored": True,
        "ran": 6,
        "kept on ctx": 5,
        "refused": "its inputs are not distributed over tensor-parallel ranks",
    }


def test_norms_and_rotary_embedding(ranks):
    (found,) = ranks(1, framework_calls.norms, backend=None, **WARM)
    assert found.pop("error") < 1e-6
    assert found == {"marked": True, "norm": "RMSNorm", "rope": True}
