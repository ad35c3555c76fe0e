"""Repairs of how Megatron-LM starts, logs and ends."""
