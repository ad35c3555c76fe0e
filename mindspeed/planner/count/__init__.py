"""Counts of one step of one rank: whole, timed, and as a recording from mark to mark."""
