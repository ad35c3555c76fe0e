"""Pipeline schedules as tables: which rank computes what, in which order.

    plan = fill(base order, costs, limits)      .orders, .fill
    check(plan); price = simulate(plan, costs)  .checker, .simulate
    execute(plan)                               .executor, .megatron

A plan (:mod:`.plan`) has one row of actions (:mod:`.actions`) per pipeline rank. Transfers between
ranks are not in it: they follow from the actions. ``docs/pipeline.md`` shows what each schedule
looks like and when to use it.

Symbols used throughout: p pipeline ranks, v model chunks per rank, S = p v stages, m micro-batches.
"""
