"""One mixture-of-experts layer in parts, two micro-batches beside each other as in a pair.

As Megatron's combined schedule runs it: the tensors between parts are detached, those that only a
communication read are freed, and delayed weight gradients follow the gradients of the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.moe import layer_ranks
from tests.moe.layer_ranks import TOKENS, Result

PAIRED = {"overlap_moe_expert_parallel_comm": True, "bf16": True}
DELAYED = {**PAIRED, "delay_wgrad_compute": True}


def delayed(layer: Any, *, routed_experts: bool = False, shared_experts: bool = False) -> None:
    """Compute the weight gradients that wait, if the layers can compute them apart."""
    if layer.config.delay_wgrad_compute:
        layer.backward_dw(routed_experts=routed_experts, shared_experts=shared_experts)


class Part:
    """One part of one micro-batch: its detached inputs, its outputs, its backward."""

    def __init__(self, run: Callable[..., Any], frees: bool = False) -> None:
        self._run, self._frees = run, frees

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.inputs = [x.detach().requires_grad_(x.requires_grad) for x in given]
        found = self._run(*self.inputs)
        self.outputs = found if isinstance(found, tuple) else (found,)
        if self._frees:
            given[0].untyped_storage().resize_(0)
        return self.outputs

    def backward(self, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pairs = [pair for pair in zip(self.outputs, grads, strict=True) if pair[0].requires_grad]
        torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
        self.outputs = ()
        return tuple(x.grad for x in self.inputs)


class MicroBatch:
    """A forward and a backward in steps, by the order of their tensors."""

    def __init__(self, layer: Any, x: torch.Tensor) -> None:
        self.layer, self.x, self.shared = layer, x, layer.use_shared_expert

        def attention(hidden: torch.Tensor) -> Any:
            shared = layer.shared_experts_compute(hidden)
            rows = layer.preprocess(hidden, *layer.route(hidden))
            return rows if shared is None else (*rows, shared)

        def combine(rows: torch.Tensor, shared: torch.Tensor | None = None) -> torch.Tensor:
            return layer.postprocess(layer.combine(rows), shared)

        self.attention = Part(attention)
        self.dispatch = Part(layer.dispatch, frees=True)
        self.experts = Part(lambda *given: layer.routed_experts_compute(*given)[0], frees=True)
        self.combine = Part(combine, frees=True)

    def forwards(self) -> list[Callable[[], None]]:
        return [self._attend, self._dispatch, self._experts, self._combine]

    def backwards(self, grad: torch.Tensor) -> list[Callable[[], None]]:
        self.grad = grad
        return [self._combine_back, self._experts_back, self._dispatch_back, self._attend_back]

    def _attend(self) -> None:
        self.rows, self.probs, *self.beside = self.attention.forward(self.x)

    def _dispatch(self) -> None:
        self.rows, self.probs = self.dispatch.forward(self.rows, self.probs)

    def _experts(self) -> None:
        (self.rows,) = self.experts.forward(self.rows, self.probs)

    def _combine(self) -> None:
        (self.output,) = self.combine.forward(self.rows, *self.beside)
        del self.rows, self.probs, self.beside

    def _combine_back(self) -> None:
        self.grads = self.combine.backward(self.grad)

    def _experts_back(self) -> None:
        self.of_shared = self.grads[1:]
        self.grads = self.experts.backward(self.grads[0])

    def _dispatch_back(self) -> None:
        delayed(self.layer, routed_experts=True)
        self.grads = self.dispatch.backward(*self.grads)

    def _attend_back(self) -> None:
        (self.x.grad,) = self.attention.backward(*self.grads, *self.of_shared)
        delayed(self.layer, shared_experts=True)


def run_pair(layer: Any, tokens: int | Sequence[int] = TOKENS, seed: int = 5) -> Result:
    """The second micro-batch's forward beside the first one's backward, part by part."""
    drawn = drawn_for(layer, tokens, seed)
    batches, weights = [MicroBatch(layer, x) for x, _ in drawn], [weight for _, weight in drawn]
    for step in batches[0].forwards():
        step()
    ahead, behind = batches[1].forwards(), batches[0].backwards(weights[0])
    order = [behind[0], ahead[0], behind[1], ahead[1], behind[2], *ahead[2:], behind[3]]
    for step in (*order, *batches[1].backwards(weights[1])):
        step()
    return result_of(layer, [x for x, _ in drawn], [batch.output for batch in batches])


def run_whole(layer: Any, tokens: int | Sequence[int] = TOKENS, seed: int = 5) -> Result:
    """The same by Megatron's own forward, one micro-batch after the other."""
    drawn, outputs = drawn_for(layer, tokens, seed), []
    for x, weight in drawn:
        outputs.append(layer(x)[0])
        outputs[-1].backward(weight)
        delayed(layer, routed_experts=True, shared_experts=True)
    return result_of(layer, [x for x, _ in drawn], outputs)


def drawn_for(
    layer: Any, tokens: int | Sequence[int], seed: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Input and gradient of the output of two micro-batches; the layer's gradients are none."""
    import torch.distributed as dist

    own = tokens if isinstance(tokens, int) else tokens[dist.get_rank()]
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    for parameter in layer.parameters():
        parameter.grad = None
    width, dtype = layer.config.hidden_size, layer.config.params_dtype

    def draw() -> torch.Tensor:
        return torch.randn(own, 1, width, generator=generator).to(dtype)

    return [(draw().requires_grad_(), draw()) for _ in range(2)]


def result_of(layer: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Result:
    """Outputs, and gradients of inputs and parameters."""
    gradients = {f"input {i}": x.grad for i, x in enumerate(inputs)}
    gradients |= {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    return Result(torch.cat(outputs).detach(), gradients)


def compare(cases: Sequence[dict[str, Any]]) -> list[tuple[Result, Result]]:
    """Megatron's whole layer, and a pair in parts that keeps as level0 says, for each case.

    Args:
        cases: ``spec``, ``layout``, ``tokens``, ``frozen``; the rest is of the transformer config.
    """
    from mindspeed.journal import Journal
    from mindspeed.moe.events import EventLog
    from mindspeed.moe.layer.megatron_parts import change_parts
    from mindspeed.moe.save.policy import LEVEL0

    results = []
    for case in cases:
        given = dict(case)
        spec, layout = given.pop("spec", "te"), given.pop("layout", {"expert": 2})
        tokens, frozen = given.pop("tokens", TOKENS), given.pop("frozen", ())
        layer_ranks.start(**layout)
        paired = DELAYED if spec == "te" else PAIRED
        layer = layer_ranks.layer_of(spec, **layer_ranks.parallel_of(layout), **paired, **given)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not any(word in name for word in frozen))
        expected = run_whole(layer, tokens)
        change_parts(layer, Journal(), save=LEVEL0)
        layer.forward.log = EventLog()
        results.append((expected, run_pair(layer, tokens)))
        results[-1][1].log = layer.forward.log
    return results


def kept(tokens: int, overrides: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Bytes that a forward keeps beside parameters and input, and the rows of the experts."""
    from mindspeed.instruments.saved import saved_for_backward
    from mindspeed.journal import Journal
    from mindspeed.moe.layer.megatron import change
    from mindspeed.moe.layer.megatron_parts import change_parts
    from mindspeed.moe.save.policy import ALL, LEVEL0

    layer_ranks.start(expert=2)
    parallel, found = layer_ranks.parallel_of({"expert": 2}), {}
    for way, changed, forward in (
        ("in parts", change_parts, _forward_in_parts),
        ("whole", change, _forward_whole),
    ):
        for name, policy in (("all", ALL), ("level0", LEVEL0)):
            layer = layer_ranks.layer_of("te", **parallel, **DELAYED, **overrides)
            changed(layer, Journal(), save=policy)
            rows: list[int] = []
            layer.experts.register_forward_pre_hook(
                lambda module, given, rows=rows: rows.append(len(given[0]))
            )
            with saved_for_backward(layer) as saved:
                nbytes = forward(layer, tokens, saved)
                assert saved.live_bytes == 0, (way, name, saved.by_site())
            found[f"{way}, {name}"] = nbytes, rows[0]

    return found


def _input(layer: Any, tokens: int) -> torch.Tensor:
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    return torch.randn(tokens, 1, layer.config.hidden_size, generator=generator).requires_grad_()


def _forward_in_parts(layer: Any, tokens: int, saved: Any) -> int:
    x = _input(layer, tokens)
    batch = MicroBatch(layer, x)
    for step in batch.forwards():
        step()
    nbytes = saved.live_bytes - x.nbytes
    for step in batch.backwards(torch.ones_like(batch.output)):
        step()
    return nbytes


def _forward_whole(layer: Any, tokens: int, saved: Any) -> int:
    x = _input(layer, tokens)
    output = layer(x)[0]
    nbytes = saved.live_bytes - x.nbytes
    output.sum().backward()
    delayed(layer, routed_experts=True, shared_experts=True)
    return nbytes


def compare_exchanges(
    cases: Sequence[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]],
) -> list[tuple[Result, Result]]:
    """A layer as a whole and a pair in parts.

    Args:
        cases: Fields of ``LayerRequest`` of the whole, and of the parts; of the transformer config.
    """
    from mindspeed.journal import Journal
    from mindspeed.moe.layer.megatron import change
    from mindspeed.moe.layer.megatron_parts import change_parts

    results = []
    for whole, parts, overrides in cases:
        layer_ranks.start(expert=2)
        parallel = layer_ranks.parallel_of({"expert": 2})
        layer = layer_ranks.layer_of("te", **parallel, **DELAYED, **overrides)
        journal = Journal()
        change(layer, journal, **whole)
        expected = run_whole(layer)
        journal.undo()
        change_parts(layer, Journal(), **parts)
        results.append((expected, run_pair(layer)))
    return results
