"""The compiler turns a step function and its arguments' types into actors' programs and their executables.

`pipeline` runs the passes; each pass is a module:

trace                   the step function as flat operations over integer values, with its markers and loops
partition               a loop's operations as forward and backward tasks, by stage
rematerialization       which forward values a backward keeps, and which it computes again
task_variants           the forms of tasks that a schedule asks for: whole, split, forward and backward as one
placement               where everything outside the loops runs, and where arguments and results live
task_graph              all tasks of the step, joined by values; a recipe for each executable
sharding_propagation    a sharding for each value that crosses tasks
lowering                the graph as programs: transfers, donation, deletion
verify                  checks of the graph and the programs
export                  recipes as serialized StableHLO

Each pass has modules that help it:

ir, primitives, ir_slicing     operations over integers, JAX's primitives by name, executables as
data
scan, cond_split, debug_callbacks       for `trace`: loops with markers, branches, prints
stage_assignment, loop_commuting        for `partition`: each operation's stage, work that moves behind the
loop
outer_ops, reduction_grouping           for `placement`: the step outside its loops, sums by actor
loop_unrolling, continued_arguments     for `task_graph`: the tasks of one loop, which result continues which
argument
evaluate, export_cache                  for `export`: operations as functions, equal recipes once
describe                                the text of each pass, and the reasons for places and transfers
"""
