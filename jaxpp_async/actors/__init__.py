"""The actor process: answers the controller's requests, runs programs, and moves their data.

- `__main__`, `server`: the entry of an actor process, and its side of the control channel.
- `actor`: answers requests, with the help of all modules below.
- `setup`: what a configured actor works with, and the thread that runs long tasks.
- `step_queue`, `step_run`: steps one after the other; one step on transport, devices and store.
- `executor`, `execution_plan`: the order of one step's commands; a program prepared for it.
- `loaded_program`, `executables`: everything about a program that does not change from step to step; compiled
  tasks.
- `array_store`, `host_values`: arrays by id; host values from and to the controller.
- `receive_buffers`, `shards`: memory to receive into; how an array lies on a process's devices.
- `jax_runtime`, `cuda`: JAX and its devices; CUDA beside JAX.
- `checkpoint_requests`, `rollback`: saving and restoring files; copies of arrays for restarts.
- `process_group`: the processes of one actor after an abort.
- `heartbeat`: the thread that tells the controller that the process is alive.
"""
