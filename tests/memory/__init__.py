"""Activation memory."""
