"""Recordings of one step of one rank: what is alive, from mark to mark."""
