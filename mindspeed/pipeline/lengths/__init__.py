"""Micro-batches of different lengths through the pipeline.

Megatron's communicator exchanges the shape of every tensor before the tensor, in both directions:
4 messages per micro-batch and boundary between stages, each shape with a wait of the host. But a
gradient has the shape of the activation that it belongs to, and who sent that knows it:

    shapes exchanged by Megatron        shape, activation, shape, gradient       4
    lengths known where they are read   shape, activation, gradient              3
    lengths known on every stage               activation, gradient              2

The last is the case where every stage reads the data (ahead, a step's micro-batches at once).
"""
