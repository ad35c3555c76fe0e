"""Pipeline parallelism: which layers stand where, and in which order micro-batches pass them."""
