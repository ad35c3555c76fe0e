"""Plans on layers of plain torch modules: equal gradients, and what is kept, dropped and copied."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mindspeed.instruments import saved_for_backward
from mindspeed.memory.plan import ChunkPlan, SiteAction
from mindspeed.memory.runtime import Runtime
from mindspeed.memory.saved import InPlaceChange
from mindspeed.memory.segment import RecomputationError

ROWS, SIZE, WIDTH = 6, 8, 16
SITES = ("norm", "first", "act", "second")


class Layer(nn.Module):
    """Residual, norm, two linear layers, an activation and dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.act, self.dropout = nn.LayerNorm(SIZE), nn.GELU(), nn.Dropout(dropout)
        self.first, self.second = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, SIZE)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.dropout(self.second(self.act(self.first(self.norm(x)))))


def planned(layers: list[Layer], plan: ChunkPlan, min_bytes: int = 0) -> Runtime:
    """Put a runtime on the layers."""
    runtime = Runtime(plan, min_bytes=min_bytes)
    for i, layer in enumerate(layers):
        for site in SITES:
            module = getattr(layer, site)
            module.forward = runtime.site(str(i), site, module.forward)
        layer.forward = runtime.layer(str(i), layer.forward, layer.parameters)
    return runtime


def model(count: int = 2, dropout: float = 0.0) -> list[Layer]:
    torch.manual_seed(1)
    return [Layer(dropout) for _ in range(count)]


def step(layers: list[Layer], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Output, input gradient and the gradients of all parameters."""
    torch.manual_seed(2)
    x = torch.randn(ROWS, SIZE, dtype=dtype, requires_grad=True)
    hidden = x.sin()
    for layer in layers:
        hidden = layer.to(dtype)(hidden, scale=0.5)
    hidden.square().sum().backward()
    grads = [p.grad for layer in layers for p in layer.parameters() if p.grad is not None]
    return [hidden.detach(), x.grad, *grads, torch.rand(1)]


def plan_of(actions: dict[str, SiteAction], count: int = 2) -> ChunkPlan:
    return ChunkPlan({str(i): actions for i in range(count)})


EVERY = [
    {name: action}
    for name, action in itertools.product(("layer", *SITES), SiteAction)
    if (name, action) != ("layer", SiteAction.RECOMPUTE_OUTPUT)
] + [
    {"norm": SiteAction.RECOMPUTE_OUTPUT, "first": SiteAction.RECOMPUTE},
    {
        "norm": SiteAction.RECOMPUTE_OUTPUT,
        "act": SiteAction.RECOMPUTE_OUTPUT,
        "first": SiteAction.OFFLOAD,
    },
    {
        "layer": SiteAction.OFFLOAD,
        "norm": SiteAction.RECOMPUTE_OUTPUT,
        "act": SiteAction.RECOMPUTE_OUTPUT,
    },
    {
        "layer": SiteAction.RECOMPUTE,
        "norm": SiteAction.RECOMPUTE_OUTPUT,
        "second": SiteAction.OFFLOAD,
    },
    {"first": SiteAction.RECOMPUTE_OUTPUT, "act": SiteAction.RECOMPUTE_OUTPUT},
]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("actions", EVERY, ids=str)
def test_output_gradients_and_random_numbers_are_those_without_a_plan(actions, dropout):
    expected = step(model(dropout=dropout))
    layers = model(dropout=dropout)
    planned(layers, plan_of(actions))
    for ours, theirs in zip(step(layers), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_frozen_parameters_and_inputs_without_gradient():
    def frozen() -> list[Layer]:
        layers = model()
        for layer in layers:
            layer.first.requires_grad_(False)
        return layers

    expected, layers = step(frozen()), frozen()
    planned(layers, plan_of({"layer": SiteAction.RECOMPUTE}))
    assert all(map(torch.equal, step(layers), expected))
    layers = frozen()
    planned(layers, plan_of({"norm": SiteAction.RECOMPUTE_OUTPUT}))
    out = layers[0](torch.ones(ROWS, SIZE)).sum()
    (grad,) = torch.autograd.grad(out, [layers[0].second.bias])
    assert torch.equal(grad, torch.full((SIZE,), float(ROWS)))


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        # Without a plan: x, mean and rstd of the norm, norm output, first output, activation.
        ({}, 8 * (2 * SIZE + 2 + 2 * WIDTH)),
        ({"layer": SiteAction.RECOMPUTE}, 8 * SIZE),
        ({"norm": SiteAction.RECOMPUTE_OUTPUT}, 8 * (SIZE + 2 * WIDTH)),
        ({"act": SiteAction.RECOMPUTE_OUTPUT}, 8 * (2 * SIZE + 2 + WIDTH)),
        ({"act": SiteAction.RECOMPUTE}, 8 * (2 * SIZE + 2 + 2 * WIDTH)),
        # The input is a leaf, mean and rstd have no gradient history: like masks they stay.
        ({"layer": SiteAction.OFFLOAD}, 8 * (SIZE + 2)),
    ],
    ids=str,
)
def test_bytes_kept_on_the_device(actions, expected):
    (layer,) = model(1)
    layer.double()
    runtime = planned([layer], plan_of(actions, 1))
    x = torch.randn(ROWS, SIZE, dtype=torch.float64, requires_grad=True)
    with saved_for_backward(layer) as saved:
        out = layer(x).sum()
    kept = saved.live_bytes
    if "layer" in actions and actions["layer"] is SiteAction.OFFLOAD:
        assert saved.host_bytes == 8 * ROWS * (SIZE + 2 * WIDTH)
    assert kept == ROWS * expected
    if actions:
        assert runtime.figures.total().kept == kept
        total = runtime.figures.total()
        assert total.kept + total.dropped + total.host == ROWS * 8 * (2 * SIZE + 2 + 2 * WIDTH)
    out.backward()
    assert saved.live_bytes == 0
    total = runtime.figures.total()
    assert total.copied_in == total.copied_out == total.host


def test_the_second_run_stops_at_the_last_tensor_that_is_needed():
    """``second`` comes last and its output is saved by nobody inside the layer."""

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            counted.append(1)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    class WithCollective(Layer):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            return Counting.apply(super().forward(x, scale=scale))

    counted: list[int] = []
    layer = WithCollective()
    planned([layer], plan_of({"layer": SiteAction.RECOMPUTE}, 1))
    layer(torch.randn(ROWS, SIZE)).sum().backward()
    assert len(counted) == 1


def test_a_segment_runs_once_however_many_tensors_are_asked_for():
    layers = model()
    runtime = planned(layers, plan_of({"layer": SiteAction.RECOMPUTE}))
    step(layers)
    assert runtime.figures.total().reruns == 2


def test_a_graph_may_be_used_twice():
    expected, layers = model(1), model(1)
    planned(layers, plan_of({"norm": SiteAction.RECOMPUTE_OUTPUT, "act": SiteAction.OFFLOAD}, 1))
    x = torch.randn(ROWS, SIZE)
    for layer in (expected[0], layers[0]):
        loss = layer(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for ours, theirs in zip(layers[0].parameters(), expected[0].parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_a_module_used_twice_has_two_segments():
    (expected,), (layer,) = model(1), model(1)
    planned([layer], plan_of({"layer": SiteAction.RECOMPUTE}, 1))
    x = torch.randn(ROWS, SIZE)
    for module in (expected, layer):
        module(module(x)).square().sum().backward()
    for ours, theirs in zip(layer.parameters(), expected.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_without_gradients_nothing_happens():
    layers = model(1)
    runtime = planned(
        layers, plan_of({"layer": SiteAction.RECOMPUTE, "act": SiteAction.OFFLOAD}, 1)
    )
    with torch.no_grad():
        layers[0](torch.randn(ROWS, SIZE))
    assert runtime.figures.by_site() == {}


@pytest.mark.parametrize("action", [SiteAction.KEEP, SiteAction.RECOMPUTE])
def test_a_tensor_changed_in_place_is_refused(action):
    class Careless(Layer):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            hidden = self.norm(x)
            out = self.first(hidden)
            hidden.zero_()
            return out

    layer = Careless()
    planned([layer], plan_of({"first": action}, 1))
    out = layer(torch.randn(ROWS, SIZE))
    with pytest.raises(InPlaceChange, match=r"0, (first|layer): .*\(6, 8\)"):
        out.sum().backward()


def test_an_output_changed_in_place_is_not_the_one_that_is_computed_again():
    class Doubling(Layer):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            hidden = self.norm(x)
            hidden = hidden.mul_(2)
            return self.first(hidden)

    torch.manual_seed(1)
    expected = Doubling()
    torch.manual_seed(1)
    layer = Doubling()
    planned([layer], plan_of({"norm": SiteAction.RECOMPUTE_OUTPUT}, 1))
    x = torch.randn(ROWS, SIZE)
    expected(x).sum().backward()
    layer(x).sum().backward()
    assert torch.equal(layer.first.weight.grad, expected.first.weight.grad)


def test_what_depends_on_more_than_its_arguments_is_refused():
    class Changing(Layer):
        turns = 0

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            Changing.turns += 1
            return super().forward(x) if self.turns == 1 else x.sin().exp()

    layer = Changing()
    planned([layer], plan_of({"layer": SiteAction.RECOMPUTE}, 1))
    out = layer(torch.randn(ROWS, SIZE, requires_grad=True))
    with pytest.raises(RecomputationError, match="0, layer: computed again"):
        out.sum().backward()


def test_freed_storages_do_not_answer_for_new_ones():
    """An address is given out again at once; each step allocates and frees between two saves."""

    class Churning(Layer):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            for _ in range(8):
                x = self.norm(x).exp() * F.silu(x)
                del_me = x * 3
                x = del_me.tanh()
                del del_me
            return x

    for actions in ({"norm": SiteAction.RECOMPUTE_OUTPUT}, {"layer": SiteAction.OFFLOAD}):
        (expected, layer) = (Churning(), Churning())
        layer.load_state_dict(expected.state_dict())
        planned([layer], plan_of(actions, 1))
        x, y = (torch.linspace(-1, 1, ROWS * SIZE).view(ROWS, SIZE) for _ in range(2))
        x.requires_grad_(), y.requires_grad_()
        expected(x).sum().backward()
        layer(y).sum().backward()
        assert torch.equal(x.grad, y.grad)


def test_pending_segments_are_computed_ahead_and_dropped_again():
    layers = model()
    runtime = planned(layers, plan_of({"layer": SiteAction.RECOMPUTE}))
    expected = step(model())
    torch.manual_seed(2)
    x = torch.randn(ROWS, SIZE, dtype=torch.float64, requires_grad=True)
    with runtime.microbatch("first"):
        hidden = x.sin()
        for layer in layers:
            hidden = layer.double()(hidden, scale=0.5)
    assert runtime.pending("second") == []
    segments = runtime.pending("first")
    assert len(segments) == 2
    for segment in segments:
        segment.materialize()
        segment.materialize()
    assert runtime.figures.total().reruns == 2
    segments[0].discard()
    hidden.square().sum().backward()
    assert runtime.figures.total().reruns == 3
    assert torch.equal(x.grad, expected[1])
    del segments, segment
    assert runtime.pending("first") == []


def test_a_plan_changes_between_two_steps():
    layers, expected = model(), step(model())
    runtime = planned(layers, ChunkPlan())
    for actions in ({}, {"layer": SiteAction.RECOMPUTE}, {"act": SiteAction.OFFLOAD}):
        runtime.plan = plan_of(actions)
        for layer in layers:
            layer.zero_grad()
        assert all(map(torch.equal, step(layers), expected))


def test_the_report_has_a_line_for_each_site_and_their_sum():
    layers = model()
    runtime = planned(
        layers, plan_of({"act": SiteAction.RECOMPUTE_OUTPUT, "first": SiteAction.OFFLOAD})
    )
    step(layers)
    head, *lines, total = runtime.figures.report().splitlines()
    assert head.split() == [
        "site",
        "calls",
        "kept",
        "dropped",
        "host",
        "copied_out",
        "copied_in",
        "reruns",
    ]
    rows = {
        words[0]: [int(n.replace(",", "")) for n in words[1:]] for words in map(str.split, lines)
    }
    assert rows.keys() == {"layer", "act", "first"}
    assert rows["act"][0] == rows["act"][-1] == 2 and rows["first"][3] > 0
    assert total.split()[1:] == [f"{sum(column):,}" for column in zip(*rows.values(), strict=True)]
    runtime.figures.reset()
    assert runtime.figures.total().calls == 0
