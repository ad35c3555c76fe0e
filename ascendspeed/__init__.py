"""The library's oldest name; everything lives in :mod:`mindspeed`."""
