"""Compile and run a user's steps on a mesh, and manage the user's arrays there. The modules in reading order:

mesh_options      checks the options of `RemoteMesh` and turns them into options of controller and launcher
awaiting          wraps coroutines so that a user who forgets `await` gets a helpful error
remote_array      defines `RemoteArray`, the user's handle of an array whose buffers are on actors
argument_binding  converts the arguments of a call to what is sent to the actors
step_request      turns a step function and a call's arguments into the compiler's input (`StepDefinition`)
step              defines a user's step function, `DistributedStep`, and its compiled forms, `CompiledStep`
host_transfers    puts values on actors and fetches values from them
array_moves       moves arrays to the actors on which a step uses them
step_runner       compiles, loads and runs steps (`StepRunner`)
step_future       gives the user the future of a step, and does what the step's arrays and prints need
report            makes a `CompileReport` of what a compiled step does and costs, and logs notes
"""
