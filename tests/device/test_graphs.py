"""A process that computes on the CPU can name CUDA graphs, and is told why it cannot use them."""

from __future__ import annotations

import pytest
import torch

from mindspeed import device
from mindspeed.journal import Journal

USES = {
    "capture": lambda: torch.cuda.CUDAGraph().capture_begin(),
    "replay": lambda: torch.cuda.CUDAGraph().replay(),
    "context": lambda: torch.cuda.graph(torch.cuda.CUDAGraph()),
    "callables": lambda: torch.cuda.make_graphed_callables(torch.nn.Linear(2, 2), (torch.ones(2),)),
    "pool": lambda: torch.cuda.graph_pool_handle(),
}


@pytest.fixture
def cpu_world():
    journal = Journal()
    device.install(journal, device.named("cpu"))
    yield
    journal.undo()


@pytest.mark.parametrize("use", USES)
def test_graphs_are_refused_naming_their_flags(use, cpu_world):
    with pytest.raises(RuntimeError, match=r"needs an NVIDIA GPU: .* Remove --cuda-graph-impl"):
        USES[use]()


def test_a_graph_object_may_be_created_and_inspected(cpu_world):
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.register_generator_state(torch.Generator())
    assert isinstance(graph, torch.cuda.CUDAGraph)


def install_and_undo() -> tuple[bool, bool]:
    """Whether the class of torch is replaced, and whether it is back after undo."""
    own, journal = torch.cuda.CUDAGraph, Journal()
    device.install(journal, device.named("cpu"))
    replaced = torch.cuda.CUDAGraph is not own
    journal.undo()
    return replaced, torch.cuda.CUDAGraph is own


def test_undo_restores_torch_cuda_graphs(ranks):
    """In a fork: this process may have the adaptor already."""
    assert ranks(1, install_and_undo, backend=None) == [(True, True)]
