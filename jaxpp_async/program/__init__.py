"""The frozen values that compiler, protocol and actors share: tasks, task graphs, instructions, programs."""
