"""The paper's table again: step times of JaxPP, FSDP, SPMD pipelining and NeMo on up to 1,024 GPUs.

Modules, in reading order: `rows` (the table), `models` (the two models as ordinary JAX steps), `costs` (the
constants, and the time of a task from its counted work), `compiled` (JaxPP's rows: compiled and simulated),
`closed_forms` (the other systems), `predictions` (calibration, and all rows), `choices` (the grid of
interleaving and microbatch sizes), `pictures`. `../paper_table.py` puts them together: `make paper`.
"""
