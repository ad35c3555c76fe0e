"""What stages of Megatron's models send each other (:mod:`.megatron`)."""
