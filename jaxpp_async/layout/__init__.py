"""Where arrays lie: which process of an actor holds which part, and who keeps copies of an actor's state.

- `array_parts`: the distinct parts of an array, and the messages that move them between processes.
- `state_replicas`: copies of actors' arrays in host memory, for going back after a failure.
"""
