"""Divide arrays among the processes of an actor, and keep copies of actors' state for restarts.

- `array_parts`: the distinct parts of an array, and the messages that move them between processes.
- `state_replicas`: copies of actors' arrays in host memory, from which a restart continues after a failure.
"""
