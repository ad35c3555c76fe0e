"""Pipelines with micro-batches of different lengths.

Megatron's communicator exchanges the shape of every tensor before the tensor, in both directions:
4 messages per micro-batch between two stages, and the host waits for each shape. But a gradient has
the shape of its activation, which the sender of the activation knows:

    shapes exchanged by Megatron        shape, activation, shape, gradient       4
    lengths known where they are read   shape, activation, gradient              3
    lengths known on every stage               activation, gradient              2

In the last case every stage reads the data, ahead for all micro-batches of a step.
"""
