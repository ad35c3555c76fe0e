"""What the time of an operator depends on, apart from the device that runs it.

    operation = operation_of(call, Chain())
    DeviceRates(load_cluster("h100")).seconds(operation)

A step that was executed once can so be timed for any device.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed.instruments.clock import Call
from mindspeed.planner.chains import Chain
from mindspeed.planner.products import Product, dtype_of, product_of


@dataclass(frozen=True)
class Operation:
    """One call of an operator.

    Attributes:
        name: of the operator.
        flops: computed.
        nbytes: read and written once.
        product: the matrix product that it computes, if any.
        batch: how many of them.
        dtype: that it multiplies; of operators with FLOPs.
        attention: it is a fused attention.
        chain_bytes: of a memory-bound operator those that move if its chain is one kernel
            (:mod:`mindspeed.planner.chains`).
        starts_chain: it is the first one of its chain.
    """

    name: str
    flops: int
    nbytes: int
    product: Product | None = None
    batch: int = 1
    dtype: str = ""
    attention: bool = False
    chain_bytes: int = 0
    starts_chain: bool = False


def operation_of(call: Call, chain: Chain) -> Operation:
    """The description of a call that has run.

    Args:
        call: the operator with its arguments and results.
        chain: of the memory-bound operators before it; the call ends or continues it.
    """
    name = call.func._schema.name
    if not call.flops:
        moved, first = chain.moved(call)
        return Operation(name, 0, call.nbytes, chain_bytes=moved, starts_chain=first)
    chain.end()
    dtype = dtype_of(call)
    if (found := product_of(call)) is not None:
        product, batch = found
        return Operation(name, call.flops, call.nbytes, product, batch, dtype)
    attention = "attention" in name
    return Operation(name, call.flops, call.nbytes, dtype=dtype, attention=attention)
