"""compiler: a step function and its arguments' types in, one program an actor and the executables it runs out. No I/O.

passes, texts, explain             the list of passes; what each left, as text; why things are where they are
tracing, weak, avals               the step, traced; its types
ir, primitives, columns            operations over integers; JAX's primitives, by name; values by columns
scans, choices, prints             loops unrolled; branches; calls back to the user
dead, cut, evaluate, separate      what nothing needs; parts of a step; operations as functions; one sharding a result
stages, partition, tails           a loop's operations by stage; its tasks; what is left behind it
residuals, split, scan_halves      what a forward keeps; a backward in two, and the scans in it
variants                           the forms of tasks that a schedule asks for
outer, conditions                  outside the loops: seen so; conds taken apart
levels, regroup, placement         tasks there; sums by actor; where everything runs
continued                          which result continues which argument
recipes, graph, unroll             what executables compute; all tasks; one loop's
propagate                          a sharding for each value that crosses tasks
emit, sharing, exportable          recipes as StableHLO; equal ones once; who is to blame if one cannot be
lowering, memory                   a graph as programs; the most that they hold
verify, alone, simulate            programs checked: each stage's, one by itself, all together
garbage                            Python's cycle collector, held up meanwhile
"""
