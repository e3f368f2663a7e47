"""The torture suite: training steps as JAX users write them, each compared with plain `jax.jit`.

    registry.py       what a case is, and the schedules that each runs under
    weights.py ...    the cases, small functions by topic; a test's id is the function's name
    test_programs.py  every case under every schedule, interpreted; some on real actors
    test_structure.py what the compiler promises beside the numbers
    test_refusals.py  what is refused, and the error
    test_table.py     `docs/programs.md` names tests that exist

A new case is a function in the module of its topic, with `@loss` or `@step` above it.
"""
