"""The code of an actor process, which answers the controller's requests, runs programs, and sends and
receives their data.

- `__main__`, `server`: start the process; connect it to the controller and pass on the controller's requests.
- `actor`: answers requests, with the help of all modules below.
- `setup`: makes the objects that an actor needs once it is configured, and the thread that runs long tasks.
- `step_queue`, `step_run`, `device_step_run`: run steps one after the other; carry out the commands of one
  step; and on devices that compute after a call has returned.
- `execution_plan`, `executor`: translate a program into commands; decide when each command of a step may
  start.
- `loaded_program`, `executables`: prepare a program before its first step; compile tasks.
- `array_store`, `host_values`: store arrays by id; move host values from and to the controller.
- `receive_buffers`, `shards`: provide memory to receive into; distribute arrays over a process's devices.
- `jax_runtime`, `cuda`: start JAX and its devices; provide CUDA operations that JAX does not offer.
- `checkpoint_requests`, `rollback`: save and restore files; copy arrays for restarts.
- `profiling`: records XLA's profile of the process, with markers of steps and tasks.
- `process_group`: brings the processes of one actor to the same task after an abort.
- `heartbeat`: runs the thread that tells the controller that the process is alive.
"""
