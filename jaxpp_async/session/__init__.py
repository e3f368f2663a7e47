"""Compile and run a user's steps on a mesh, and manage the user's arrays there. The modules in reading order:

mesh_options      checks the options of `RemoteMesh` and turns them into options of controller and launcher
awaiting          wraps coroutines so that a user who forgets `await` gets a helpful error
remote_array      defines `RemoteArray`, the user's handle of an array whose buffers are on actors
argument_binding  converts the arguments of a call to what is sent to the actors
leaf_division     converts between the leaves of a user and the parts in which a step takes and makes them
step_request      turns a step function and a call's arguments into the compiler's input (`StepDefinition`)
step              defines a user's step function, `DistributedStep`, and its compiled forms, `CompiledStep`
host_transfers    puts values on actors and fetches values from them
move_programs     builds programs that move and copy arrays, and describes moves to the user
array_moves       moves arrays to the actors on which a step uses them
part_moves        builds programs that divide arrays into parts and join parts
redivider         divides arrays into the parts in which a step takes them, and joins parts
auto_steps        measures the first steps under the schedule `Auto`, and then replaces the compiled form
step_compiler     compiles steps and loads them on the actors (`MeshStepCompiler`)
step_init         says what `step.init` compiles to make an argument where a step uses it
step_runner       runs steps (`StepRunner`)
step_future       gives the user the future of a step, and does what the step's arrays and prints need
drawing           draws a compiled step
metric_log        checks what a user logs for a step, and keeps a bounded history of each name
metrics           keeps what a user logs, and gives it to loggers (`Metrics`)
logger_delivery   calls the loggers, which cannot hold training up
progress          tells the user what a mesh is doing while steps wait for it, on the terminal or in the log
recompilation     says why a step is compiled again
owned_thread      runs a long computation in a thread that ends with the coroutine that waits for it
report            makes a `CompileReport` of what a compiled step does and costs, and logs notes
"""
