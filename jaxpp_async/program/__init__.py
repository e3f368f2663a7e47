"""The read-only data structures that compiler, protocol and actors share: tasks, graphs and programs."""
