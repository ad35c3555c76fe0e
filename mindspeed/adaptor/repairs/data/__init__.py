"""Repairs of data sets, samplers and batches."""
