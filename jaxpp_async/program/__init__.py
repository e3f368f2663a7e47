"""The read-only data structures that compiler, protocol and actors share: tasks, task graphs, instructions,
programs."""
