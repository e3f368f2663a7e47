"""The compiler turns a step function and its arguments' types into executables and one program per actor.

`pipeline` runs the passes in this order; each pass is a module. A recipe lists the operations of one
executable.

trace                   traces the step function into flat operations over integer value ids
cut                     removes the marks that are no stage boundaries by the loop's schedule
partition               splits each loop's operations into forward and backward tasks, one pair per stage
rematerialization       chooses the forward values that a backward keeps and those that it computes again
task_variants           makes the forms of tasks that a schedule asks for: whole, split, or forward and
                        backward fused
placement               chooses the actors of arguments, results and all operations outside the loops
task_graph              joins all tasks of the step into one graph, and writes a recipe for each executable
sharding_propagation    finds a sharding for each value that is passed between tasks
lowering                turns the graph into programs: inserts transfers, donations and deletions
verify                  checks the graph and the programs
export                  turns recipes into serialized StableHLO

These modules hold data or help a pass:

ir, primitives, ir_slicing              all passes: operations over integers, names of JAX's primitives,
                                        selection of the operations that given values need
scan, cond_split, debug_callbacks       `trace`: loops that contain markers, branches of conds, debug prints
stage_assignment, loop_commuting        `partition`: the stage of each operation, and the operations that
                                        move to after the loop
reduction_grouping                      `placement`: sums outside the loops, grouped by actor
loop_unrolling, continued_arguments     `task_graph`: the tasks of one loop, and which result replaces which
                                        argument in the next step
evaluate, export_cache                  `export`: operations as functions, and one export for equal recipes
work, sharded_work, flop_counts         the work of each executable: operations, bytes and exchanges
                                        between devices, for predictions
describe                                dumps of each pass, and reasons for the place of a value or a
                                        transfer
"""
