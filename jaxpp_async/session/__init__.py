"""Run a user's steps on a mesh, and keep the arrays that they take and make. The modules in reading order:

mesh_options      the options of `RemoteMesh`, checked and turned into what the controller takes
awaiting          coroutines that remind the user to await them
remote_array      `RemoteArray`: the user's handle of an array that lies on actors
argument_binding  the leaves of a call: their types, and the arrays that the actors are told of
step              `DistributedStep` and `CompiledStep`: a user's function, and its compiled forms
host_transfers    values put on actors and fetched from them
array_moves       arrays carried to where a step takes them
step_runner       `StepRunner`: steps compiled, loaded and run
step_future       a step that has been sent: its future, arrays, recording and prints
abandoned_steps   steps that run on without their caller, reported when another step waits behind them
report            `CompileReport`: what a compiled step does and costs, and notes in the log
"""
