"""Several layers on the same ranks: Megatron's dispatcher first, then ours, with any router."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.moe import layer_ranks


@dataclass
class Case:
    """One layer.

    Attributes:
        name: for messages.
        layout: Arguments of :func:`layer_ranks.start`.
        overrides: Of the transformer config.
        variants: Fields of ``LayerRequest`` each.
        spec: "te" or "local".
        experts: if given, the router chooses among the first experts only.
        frozen: the experts are not trained.
        fused: rows are moved by one kernel each way.
        options: of :func:`layer_ranks.run`.
    """

    name: str
    layout: dict[str, int]
    overrides: dict[str, Any]
    variants: list[dict[str, Any]]
    spec: str = "te"
    experts: int | None = None
    frozen: bool = False
    fused: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Figures:
    """How one program differs from Megatron's layer on one rank.

    Attributes:
        name: of the case.
        variant: of the program.
        output: largest absolute difference; 0 is bit for bit.
        gradients: largest difference as a share of the largest gradient, over all tensors.
        exposed: collectives that nothing hides, forward and backward.
        collectives: forward and backward.
        order: the events of forward and of backward.
        sent: operation and bytes that the rank sends, of every call in forward and in backward.
    """

    name: str
    variant: dict[str, Any]
    output: float
    gradients: float
    exposed: tuple[int, int]
    collectives: tuple[int, int]
    order: tuple[str, str]
    sent: tuple[list[tuple[str, int]], list[tuple[str, int]]]


def compare_all(cases: list[Case]) -> list[Figures]:
    """All cases one after the other."""
    return [figures for case in cases for figures in _compare(case)]


def _compare(case: Case, layer: Any = None) -> list[Figures]:
    from mindspeed.instruments import CommLedger
    from mindspeed.journal import Journal
    from mindspeed.moe.events import EventLog
    from mindspeed.moe.layer.megatron import change

    layer = built(case) if layer is None else layer
    expected = layer_ranks.run(layer, **case.options)
    found = []
    for variant in case.variants:
        journal = Journal()
        change(layer, journal, **variant, **_nodes(layer, variant))
        if case.fused:
            _fuse(journal)
        log = layer.forward.log = EventLog()
        with CommLedger() as ledger:
            result = layer_ranks.run(layer, **case.options)
        journal.undo()
        assert result.gradients.keys() == expected.gradients.keys(), case.name
        assert result.output.dtype == expected.output.dtype
        found.append(
            Figures(
                case.name,
                variant,
                _difference(result.output, expected.output),
                max(
                    _difference(result.gradients[name], grad) / (float(grad.abs().max()) or 1.0)
                    for name, grad in expected.gradients.items()
                ),
                (len(log.exposed("forward")), len(log.exposed("backward"))),
                (len(log.communications("forward")), len(log.communications("backward"))),
                (" ".join(map(str, log.of("forward"))), " ".join(map(str, log.of("backward")))),
                (_sent(ledger, "forward"), _sent(ledger, "backward")),
            )
        )
    return found


def built(case: Case) -> Any:
    """The layer of a case, in its own groups."""
    layout = case.layout
    layer_ranks.start(**layout)
    parallel = {
        "expert_model_parallel_size": layout.get("expert", 1),
        "tensor_model_parallel_size": layout.get("tensor", 1),
        "expert_tensor_parallel_size": layout.get("expert_tensor", 1),
        "sequence_parallel": layout.get("tensor", 1) > 1,
    }
    layer = layer_ranks.layer_of(case.spec, **parallel, **case.overrides)
    layer.experts.requires_grad_(not case.frozen)
    if case.experts is not None:
        layer.route = _among_the_first(layer, case.experts)  # an attribute of the instance
    return layer


def _fuse(journal: Any) -> None:
    from mindspeed.te import fused_experts, kernels

    for name in ("permute", "permute_again", "unpermute", "sort_chunks"):
        kernel = getattr(fused_experts, name)
        journal.set(kernels, f"moe_{name}", kernel, owner="test")


def too_many(dispatcher: str, exchange: str) -> str:
    """What a rank says when a router chooses more experts for one token of one rank than it may."""
    from mindspeed.journal import Journal
    from mindspeed.moe.layer.megatron import change

    case = Case("too many", {"expert": 2}, {"moe_token_dispatcher_type": dispatcher}, [])
    layer = built(case)
    routing_map = torch.zeros(12, 8, dtype=torch.bool)
    routing_map[:, 3:5] = True
    routing_map[7, 6] = torch.distributed.get_rank() == 1
    layer.route = lambda *args: (routing_map * 0.5, routing_map)
    change(layer, Journal(), exchange=exchange)
    try:
        layer_ranks.run(layer)
    except RuntimeError as error:
        return str(error)
    return "no error"


def _nodes(layer: Any, variant: dict[str, Any]) -> dict[str, Any]:
    """Groups for hierarchical dispatch: nodes of two ranks."""
    from mindspeed.moe.nodes import node_groups

    if variant.get("exchange") != "hierarchical":
        return {}
    return {"nodes": node_groups(layer.token_dispatcher.ep_group, 2)}


def _sent(ledger: Any, phase: str) -> list[tuple[str, int]]:
    return [(one.op, one.wire) for one in ledger.select(phase=phase)]


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max()) if actual.numel() else 0.0


def _among_the_first(layer: Any, experts: int) -> Any:
    router = layer.router

    def route(hidden: torch.Tensor, padding_mask: Any = None) -> Any:
        logits = router.gating(hidden)
        away = torch.zeros(logits.shape[-1], dtype=logits.dtype)
        away[experts:] = 1e4
        return router.routing(logits - away)

    return route


def exact_bytes(topk: int) -> dict[str, Any]:
    """Bytes of rows and metadata, in forward, of both exchanges; and what the routing says."""
    from mindspeed.moe.dispatch.level import metadata_bytes

    experts, found = 16, {}
    for exchange in ("dedup", "hierarchical"):
        case = Case(
            exchange,
            {"expert": 4},
            {"moe_router_topk": topk, "num_moe_experts": experts},
            [{"exchange": exchange}],
        )
        layer = built(case)
        maps = _noted(layer)
        (figures,) = _compare(case, layer)
        sent = [wire for op, wire in figures.sent[0] if op == "all_to_all"]
        everybody = _gathered(maps[-1])  # [ranks, n, experts]
        row = layer_ranks.HIDDEN * 4
        found[exchange] = sent
        found[f"{exchange} expected"] = _expected(
            exchange, everybody, row, lambda members: metadata_bytes(min(topk, experts // members))
        )
        found["between"] = sent[1] // row
    rank = torch.distributed.get_rank()
    away = torch.ones(2, dtype=torch.bool)
    away[rank // 2] = False
    found["flat between"] = int(everybody[rank].view(-1, 2, experts // 2)[:, away].sum())
    return found


def _noted(layer: Any) -> list[torch.Tensor]:
    """Gets the routing map of every forward."""
    maps: list[torch.Tensor] = []
    route = layer.route

    def noted(*args: Any) -> Any:
        probs, routing_map = route(*args)
        maps.append(routing_map)
        return probs, routing_map

    layer.route = noted
    return maps


def _expected(exchange: str, maps: torch.Tensor, row: int, metadata: Any) -> list[int]:
    """Bytes that this rank sends: metadata and rows of each level there, then rows back."""
    rank = torch.distributed.get_rank()
    to_ranks = maps.view(4, -1, 4, 4).any(-1)  # [ranks, n, ranks]
    if exchange == "dedup":
        there = [int(to_ranks[rank, :, other].sum()) for other in range(4) if other != rank]
        back = [int(to_ranks[other, :, rank].sum()) for other in range(4) if other != rank]
        return [sum(there) * metadata(4), sum(there) * row, sum(back) * row]
    node, number = divmod(rank, 2)
    to_nodes = maps.view(4, -1, 2, 8).any(-1)  # [ranks, n, nodes]
    peer, neighbour = (1 - node) * 2 + number, node * 2 + 1 - number
    between = int(to_nodes[rank, :, 1 - node].sum())
    between_back = int(to_nodes[peer, :, node].sum())
    within = sum(int(to_ranks[source, :, neighbour].sum()) for source in (rank, peer))
    sources = (neighbour, (1 - node) * 2 + 1 - number)
    within_back = sum(int(to_ranks[source, :, rank].sum()) for source in sources)
    return [
        between * metadata(2), between * row,
        within * metadata(4), within * row,
        within_back * row, between_back * row,
    ]  # fmt: skip


def _gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(parts, x.contiguous())
    return torch.stack(parts)


def errors_of_sums() -> dict[str, float]:
    """Largest relative error of each exchange in bf16, when every expert returns its weighted rows.

    The rows of a token then add up to the token, in exact arithmetic.
    """
    from mindspeed.journal import Journal
    from mindspeed.moe.layer.megatron import change

    overrides = {"moe_router_topk": 8, "num_moe_experts": 16, "params_dtype": torch.bfloat16}
    case = Case("sums", {"expert": 4}, overrides | {"moe_router_dtype": "fp32"}, [])
    layer, errors = built(case), {}
    object.__setattr__(layer, "experts", _Weighted())
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(200, 1, layer_ranks.HIDDEN, generator=generator).to(torch.bfloat16)
    for exchange in ("flat", "dedup", "hierarchical"):
        journal = Journal()
        change(layer, journal, exchange=exchange, **_nodes(layer, {"exchange": exchange}))
        with torch.no_grad():
            output, _ = layer(x)
        journal.undo()
        errors[exchange] = float(((output.double() - x.double()) / x.double()).abs().max())
    return errors


class _Weighted(torch.nn.Module):
    """Rows ``[m, h]`` times their probabilities, in fp32, rounded."""

    def forward(self, rows: torch.Tensor, counts: Any, probs: torch.Tensor) -> Any:
        return (rows.float() * probs.float().unsqueeze(-1)).to(rows.dtype), None


def requests_of(flags: dict[str, Any], expert: int) -> list[dict[str, Any]]:
    """What features ask of the layers of a model that is built with flags; nodes of two ranks."""
    import os

    from megatron.core import parallel_state, tensor_parallel

    from mindspeed import session
    from mindspeed.adaptor.moe import moe_layers
    from tests.features.moe_ranks import MOE
    from tests.support import gpt_ranks

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    session.install().configure(flags)
    parallel_state.initialize_model_parallel(1, expert_model_parallel_size=expert)
    tensor_parallel.model_parallel_cuda_manual_seed(123)
    overrides = {"expert_model_parallel_size": expert, "moe_token_dispatcher_type": "alltoall"}
    config = gpt_ranks.config("layernorm-gelu-bias", **{**MOE, **overrides})
    found = [layer.forward.request for layer in moe_layers(gpt_ranks.build(config, "te"))]
    ranks_of = torch.distributed.get_process_group_ranks
    groups = torch.distributed.distributed_c10d._world.pg_map
    answers = [
        {
            "exchange": one.exchange,
            "nodes": one.nodes and (ranks_of(one.nodes.between), ranks_of(one.nodes.within)),
        }
        for one in found
    ]
    session.current().detach_features()
    assert not any(one.nodes and one.nodes.between in groups for one in found)
    return answers
