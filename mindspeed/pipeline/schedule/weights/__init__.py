"""What micro-batches of different sizes count in Megatron's losses (:mod:`.megatron`)."""
