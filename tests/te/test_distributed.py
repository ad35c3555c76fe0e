"""Random streams, recomputation and host offloading."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mindspeed.te import cpu_offload
from mindspeed.te.distributed import CudaRNGStatesTracker, checkpoint


def tracker():
    streams = CudaRNGStatesTracker()
    streams.add("model-parallel-rng", 1)
    streams.add("other", 2)
    return streams


def draw(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator)


def test_streams_continue_across_forks_and_leave_the_default_generator_alone():
    streams = tracker()
    torch.manual_seed(3)
    with streams.fork():
        first = torch.rand(2)
    with streams.fork("other"):
        other = torch.rand(2)
    with streams.fork():
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), draw(1, 4))
    assert torch.equal(other, draw(2, 2))
    assert torch.equal(torch.rand(2), draw(3, 2))


def test_a_nested_fork_of_the_same_stream_continues_it():
    streams = tracker()
    with streams.fork():
        parts = [torch.rand(2)]
        with streams.fork():
            parts.append(torch.rand(2))
        parts.append(torch.rand(2))
    assert torch.equal(torch.cat(parts), draw(1, 6))


def test_states_taken_inside_a_fork_are_live():
    streams = tracker()
    with streams.fork():
        torch.rand(3)
        states = streams.get_states()
        expected = torch.rand(2)
    streams.set_states(states)
    with streams.fork():
        assert torch.equal(torch.rand(2), expected)


def test_names_and_seeds_are_unique():
    streams = tracker()
    with pytest.raises(ValueError, match="seed 1"):
        streams.add("third", 1)
    with pytest.raises(ValueError, match="other"):
        streams.add("other", 5)
    with pytest.raises(KeyError, match="missing"), streams.fork("missing"):
        pass


def test_recomputation_draws_the_same_random_numbers():
    torch.manual_seed(0)
    streams = tracker()
    weight = torch.randn(64, requires_grad=True)
    scale = torch.ones(64, requires_grad=True)

    def layer(x, scale=None):
        with streams.fork():
            x = F.dropout(x * weight, 0.5)
        return F.dropout(x.sin(), 0.5) * scale

    x = torch.randn(64, requires_grad=True)
    out = checkpoint(layer, x, get_rng_state_tracker=lambda: streams, scale=scale)
    with streams.fork():
        torch.rand(7)
    before = streams.get_states()["model-parallel-rng"]
    out.sum().backward()
    kept = out != 0
    derivative = (x.detach() * weight.detach() * 2).cos() * 2 * weight.detach() * 2
    assert torch.equal(x.grad != 0, kept)
    torch.testing.assert_close(x.grad[kept], derivative[kept], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scale.grad, out.detach())
    assert torch.equal(streams.get_states()["model-parallel-rng"], before)


def test_recomputation_keeps_only_the_input():
    x = torch.randn(8, 8, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        checkpoint(lambda t: t.sin().cos().exp(), x).sum()
    assert sum(t.numel() for t in saved) <= x.numel()


def test_distributed_activations_are_refused():
    with pytest.raises(NotImplementedError, match="distribute-saved-activations"):
        checkpoint(torch.sin, torch.zeros(2), distribute_saved_activations=True)


def test_offloading_moves_the_saved_tensors_of_the_first_layers_to_the_host_and_back(monkeypatch):
    moved = []
    monkeypatch.setattr(cpu_offload, "worth_moving", lambda x: moved.append(x.numel()) or True)
    context, commit = cpu_offload.get_cpu_offload_context(True, num_layers=2, model_layers=3)
    start = torch.randn(16, requires_grad=True)
    x, counts = start, []
    for _ in range(3):
        with context:
            x = x.sin()
        x = commit(x)
        counts.append(len(moved))
    assert counts == [1, 2, 2]
    x.sum().backward()
    expected = start.detach().clone().requires_grad_()
    expected.sin().sin().sin().sum().backward()
    assert torch.equal(start.grad, expected.grad)


def test_host_memory_is_not_offloaded_and_weights_never():
    assert not cpu_offload.worth_moving(torch.zeros(1 << 20))
    assert not cpu_offload.worth_moving(torch.nn.Parameter(torch.zeros(1 << 20, device="meta")))
    assert cpu_offload.worth_moving(torch.zeros(1 << 20, device="meta"))
    with pytest.raises(NotImplementedError, match="cpu-offloading-weights"):
        cpu_offload.get_cpu_offload_context(True, offload_weights=True)
