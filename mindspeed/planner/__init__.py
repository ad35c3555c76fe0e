"""The planner: will a job fit, how fast will it be, which layout is best, without a device."""
