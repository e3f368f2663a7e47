"""Compile and run a user's steps on a mesh, and manage their arrays. The modules in reading order:

mesh_options      checks the options of `RemoteMesh` and turns them into options of controller and launcher
awaiting          coroutines that remind the user to await them
remote_array      `RemoteArray`: the user's handle of an array whose buffers are on actors
argument_binding  finds the types of a call's leaves, and the array ids that the call sends to each actor
step              `DistributedStep` and `CompiledStep`: a user's function, and its compiled forms
host_transfers    puts values on actors and fetches values from them
array_moves       moves arrays to the actors on which a step uses them
step_runner       `StepRunner`: compiles, loads and runs steps
step_future       a step that has been sent: its future, arrays, recording and prints
abandoned_steps   reports a step that runs on without its caller while another step waits behind it
report            `CompileReport`: what a compiled step does and costs, and notes in the log
"""
