"""What the actions of a plan do with Megatron's model chunks (:mod:`.megatron`)."""
