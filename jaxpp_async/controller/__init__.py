"""Run a mesh from the user's process: start actors, send them requests, watch them, and replace lost ones.

Modules in reading order:

    controller: carries out the operations of a mesh (load, run, put, fetch, close) with the modules below.
    options: defines every option of this package, with its default.
    submitted_step: follows each step from its call to its end, and makes its statistics and timeline.
    requests: sends requests to actors, and passes each reply to the caller that waits for it.
    failure_policy: decides which of several observed failures caused the others (pure functions of time).
    recovery: decides about restarts, which replace lost actors and make requests again (pure).
    request_history: remembers requests, and decides which of them a restart makes again (pure).
    state_replicas: decides when the actors' arrays are copied, and where the copies are kept (pure).
    recovery_driver: carries out what these three decide.
    actor_group: starts, connects, aborts, replaces and ends the actors' processes.
    startup: starts a process, and waits until it is connected and has started JAX.
    device_checks: checks that the processes of a mesh can work together with their devices and libraries.
    deploy: loads programs onto actors, and makes the NCCL links that the programs need.
    host_values: moves numpy arrays between the controller and its actors.
    profiling: records XLA's profiles of the actors, and gathers their files.
    health_monitor: observes deaths, lost connections, silences and steps that stand still.
    failure_detector: decides which processes are silent (pure functions of heartbeats and time).
    stall_detector: decides which actors cannot continue a step, and why (pure functions of reports).
    listener: accepts the control connections that actors open.
    error_messages: makes the errors about actors that a user reads.
    mesh_events: reports what happens to a mesh, in the log and as events for the user.
"""
