"""actors: processes that run programs, and the controller that has them do it. Imports nothing.

Both ends of everything that is said are here. Each room says in its `__init__` what lies in it, and
docs/architecture.md walks through them.

    controller   what a mesh asks of its actors; with options
        crew         the actors of a mesh: started, asked, given values, ended
        watching     what happens to them, noticed
        launch       where they run: here, on other hosts, in this process
    actor        requests in, replies out; with __main__, configuring, numbers
        steps        programs loaded, steps run; with plan, executor, store
    both
        messages, protocol, control   what is said; as bytes; over sockets
        values, devices               arrays on their way, in pieces; JAX and GPUs
        processes                     which is whose; how one is spawned, kept and ended
        failures, restarts            what a failure is; what brings a mesh back after one
        files                         an actor's part of a checkpoint
        owned_tasks                   asyncio tasks and who ends them
"""
