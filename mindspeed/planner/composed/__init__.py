"""Whole jobs composed of small counted runs: signatures of layers, and the price of a layout."""
