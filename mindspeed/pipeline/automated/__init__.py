"""Automated pipeline: measured costs in, a division of the layers and a schedule out.

    profile.json  --search-->  result.json: layers of each rank, recomputed layers, schedule, sizes

:mod:`.profile` is what was measured, :mod:`.stages` what a choice costs, :mod:`.search` finds the
best one, :mod:`.result` is its file and its flags. All are pure: a profile has one result. The
measurement in a running job is ``mindspeed.adaptor.pipeline_profile``.
"""
