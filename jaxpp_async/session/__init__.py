"""Compile and run a user's steps on a mesh, and manage the user's arrays there. The modules in reading order:

mesh_options      checks the options of `RemoteMesh` and turns them into options of controller and launcher
awaiting          coroutines that remind the user to await them
remote_array      `RemoteArray`: the user's handle of an array whose buffers are on actors
argument_binding  converts the arguments of a call to what is sent to the actors
step              `DistributedStep` and `CompiledStep`: a user's function, and its compiled forms
host_transfers    puts values on actors and fetches values from them
array_moves       moves arrays to the actors on which a step uses them
step_runner       `StepRunner`: compiles, loads and runs steps
step_future       a step that has been sent: its future, arrays, recording and prints
abandoned_steps   reports a step whose caller was cancelled, if another step waits long for it
report            `CompileReport`: what a compiled step does and costs, and notes in the log
"""
