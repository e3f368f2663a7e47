"""The actor process: answers the controller's requests, runs programs, and sends and receives their data.

- `__main__`, `server`: the entry point of an actor process, and its end of the control channel.
- `actor`: answers requests, with the help of all modules below.
- `setup`: the objects that an actor needs once it is configured, and the thread that runs long tasks.
- `step_queue`, `step_run`: run steps one after the other; carry out one step on transport, devices and store.
- `executor`, `execution_plan`: the order of one step's commands; a program prepared for execution.
- `loaded_program`, `executables`: everything about a program that does not change from step to step; compiled
  tasks.
- `array_store`, `host_values`: arrays by id; host values from and to the controller.
- `receive_buffers`, `shards`: memory to receive into; the distribution of an array over a process's devices.
- `jax_runtime`, `cuda`: start JAX and its devices; use CUDA beside JAX.
- `checkpoint_requests`, `rollback`: save and restore files; copy arrays for restarts.
- `process_group`: bring the processes of one actor to the same task after an abort.
- `heartbeat`: the thread that tells the controller that the process is alive.
"""
