"""Use private or unstable parts of JAX, and JAX's settings, so that no other code of this project has to.

The modules in reading order:

private_api        wraps parts of `jax._src`, `jax.extend` and interpreter tables in stable functions
jax_config         reads JAX's settings in this process, changes them, and copies them for actors
compilation_cache  chooses the folder of JAX's compilation cache, and uses the cache in the user's process
tracebacks         finds the user's line that led to an equation or an error, and shortens tracebacks
"""
