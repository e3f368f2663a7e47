"""Predict the time and memory of a step without running it, and choose the cut, the schedule and the order.

Everything in this package is computed from compiled programs and numbers, and waits for nothing.

Costs and machines:

    devices           a table of devices and links, with their vendors' figures
    machine           a machine that need not exist, and steps that are compiled for it
    samples           measured times as distributions, and the cost of a link
    versioned_file    saves and loads values as JSON files of a kind and a version
    measurements      what the timelines of measured steps say about tasks and transfers
    cost_model        `CostModel`: how long each task and transfer takes, measured or assumed
    calibration       times of tasks that were not measured, by the measured stages that had their layers
    memory            what each device needs for a step, by rows that are exact, measured or assumed

Simulation:

    replay            compiled programs in virtual time
    simulation        `simulate`: a step's time, timeline and peak bytes

The search, on numbers alone:

    problem           layers, a machine, a memory cap; a cut and task lists that run on it
    evaluation        times task lists with transfers and memory
    cut               divides layers into stages, so that no actor has more work than it must
    named             tries every named schedule, each on the cut that suits it
    closed_form       estimates a named schedule's step without a replay
    ranking           ranks named schedules by memory, the closed form and a replay
    bound             proves that no schedule takes less than some time
    list_scheduling   makes task lists by priorities
    order_search      improves task lists one task at a time
    least_memory      makes task lists of the least memory: one microbatch at a time
    search_moves      changes a candidate of the search a little
    search            searches for the cut, the placement and the order with the shortest step

The plan of a real step:

    layers            the costs of each layer of a step with marks at every layer, as a problem
    plan              `Plan`: what was chosen and what lost, as text, file and schedule
    candidates        a case and an order of tasks, with estimated or exact figures
    verdicts          says why each candidate lost, and what would help next
    planner           `plan`: tries machines, microbatches, schedules and cuts, and compiles the best
    mesh_planner      plans the steps of a mesh, and decides how a step with the schedule `Auto` runs
"""
