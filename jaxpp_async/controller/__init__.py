"""Run a mesh from the user's process: start its actors, send them requests, watch and replace them.

Modules in reading order:

    controller: does what a mesh asks for (load, run, put, fetch, close), by means of the modules below.
    options: every option of this package, with its default.
    requests: requests and their replies, steps in flight, and the log of requests that a restart repeats.
    failure_policy: decides which error describes a failure, and which of several failures caused the others.
    recovery: one restart, from the loss of actors to the repeated requests.
    state_replicas: replicas of the actors' arrays in other actors' memory, and restoring arrays from them.
    actor_group: starts, connects, aborts, replaces and ends the actors' processes.
    startup: starts one process and its JAX, checks the devices of all processes together, and waits for
        processes to end within a time limit.
    deploy: loads programs onto actors, and makes the NCCL links that the programs need.
    host_values: moves numpy arrays between the controller and its actors.
    health_monitor: judges heartbeats and reports every half second, and estimates the actors' clocks.
    failure_detector: decides which processes are silent (pure functions of heartbeats and time).
    stall_detector: decides which actors cannot continue a step, and why (pure functions of reports).
    listener: accepts the control connections that actors open.
    error_messages: the text of every error about an actor.
    mesh_events: the events that a user can read about a mesh.
"""
