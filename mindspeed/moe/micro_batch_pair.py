"""One layer of Megatron's combined 1F1B: the forward of a micro-batch and the backward of another.

    communication  combine(B)    dispatch(F)   dispatch(B)                        combine(F)
    computation    attention(F)  experts(B)    weight gradients(B), experts(F)    attention(B)

Computations and all-to-alls have a stream each, which runs them in the order in which they are
given to it; a micro-batch runs its parts one after the other. The order below is that of both
streams: a communication stands where its input is ready, and is waited for before what needs it.
Layers of a step repeat it, since both micro-batches wait for both streams at its end.

Shared experts belong to the part of attention. Without delayed weight gradients there is no anchor.
"""

from __future__ import annotations

from mindspeed.moe.costs import BACKWARD, FORWARD, Costs
from mindspeed.moe.program import Program, Step
from mindspeed.moe.simulate import ChunkStep, Rates, Simulation, play

PAIR = Program.parse(
    "b_unpermute b_combine> f_attn f_shared f_route f_count! f_permute f_dispatch> "
    "b_combine< b_scatter! b_disarrange b_experts b_arrange b_gather! b_dispatch> b_anchor "
    "f_dispatch< f_gather! f_arrange f_experts f_disarrange f_scatter! f_combine> "
    "b_dispatch< b_permute b_route b_shared b_attn f_combine< f_unpermute"
)
"""``b_combine>`` starts the reverse of the combine of the micro-batch that goes backward."""

_PASSES = {"f": FORWARD, "b": BACKWARD}


def simulate_pair(costs: Costs, rates: Rates) -> Simulation:
    """Run a layer's forward and backward, of two micro-batches, at once.

    Args:
        costs: Of the stages of one micro-batch; stages that are missing are left out.
        rates: How fast this rank is.
    """
    actions = []
    for step in PAIR.steps:
        direction, _, name = step.name.partition("_")
        if name in costs:
            actions.append((_PASSES[direction], ChunkStep(Step(name, step.phase), 0, costs[name])))
    return play(actions, rates)
