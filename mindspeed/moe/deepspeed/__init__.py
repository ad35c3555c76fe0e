"""DeepSpeed's mixture of experts: gates with capacity, padded dispatch, routing without drops."""
