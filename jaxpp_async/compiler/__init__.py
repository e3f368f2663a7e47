"""The compiler turns a step function and its arguments' types into executables and one program per actor.

`pipeline` runs the passes in this order; each pass is a module. A recipe lists the operations of one
executable.

trace                   traces the step function into flat operations over integer value ids
loop_invariants         moves computations of weights alone out of the loops, with their gradients
cut                     removes the marks that are no stage boundaries by the loop's schedule
divide                  divides leaves that stack layers, and what is computed from them, between stages
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
stage_assignment, late_forward,         `partition`: the stage of each operation, and the operations that
finish_tasks, loop_commuting            wait for an earlier stage, or move to after the loop
gradient_expressions, stage_parts       `loop_commuting`: summed gradients as expressions, and the operations
                                        that each stage applies to its own part
stage_cuts, stack_division,             `divide`: where the stages cut arrays of layers, which values are
divided_axis                            divided with them, and how each operation is computed in parts
minimum_cut                             `late_forward`, `rematerialization`: a cut of least cost
reduction_grouping, sum_distribution    `placement`: sums outside the loops, grouped by actor, and what is
                                        done to each part of a sum
loop_unrolling, continued_arguments     `task_graph`: the tasks of one loop, and which result replaces which
                                        argument in the next step
pass_cache                              traces and shardings that compilations of one step share
evaluate, export_cache                  `export`: operations as functions, and one export for equal recipes
work, sharded_work, flop_counts         the work of each executable: operations, bytes and exchanges
                                        between devices, for predictions
live_bytes                              an estimate of the temporaries of an executable
describe                                dumps of each pass, and reasons for the place of a value or a
                                        transfer
"""
