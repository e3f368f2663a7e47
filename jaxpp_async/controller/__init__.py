"""Run a mesh from the user's process: start its actors, send them requests, watch and replace them.

Modules in reading order, for whoever wants to change how a restart goes:

    controller: does what a mesh asks (load, run, put, fetch, close) with one of each object below.
    options: every option of this package, with its default.
    requests: requests and their replies, a step under way, and the log of what a restart sends again.
    failure_policy: which error a failure is, and which failure is the cause of others.
    recovery: one restart, from the lost actors to the requests that are sent again.
    state_replicas: copies of the actors' arrays in other actors' memory, and the way back to them.
    actor_group: starts, connects, aborts, replaces and ends the actors' processes.
    startup: one process from its launch to its JAX; whether the devices of all go together; bounded waits.
    deploy: programs onto actors, and the NCCL links that they need.
    host_values: numpy arrays between the controller and its actors.
    health_monitor: heartbeats and reports, judged every half second.
    failure_detector: which processes are silent; pure.
    stall_detector: which actors cannot go on with a step, and why; pure.
    listener: control connections that actors open.
    clock_sync: what the clocks of actors on other machines show.
    error_messages: the text of every error about an actor.
    mesh_events: the events that a user reads.
"""
