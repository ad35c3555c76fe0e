"""Mixture of experts: a layer is a program of stages.

:mod:`~mindspeed.moe.program` has the programs as data, :mod:`~mindspeed.moe.interpreter` executes
one, :mod:`~mindspeed.moe.split_phase` starts a collective in one step and finishes it in another.
"""
