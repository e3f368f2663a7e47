"""Touch private or unstable parts of JAX, and JAX's settings, so that no other package has to.

The modules in reading order:

private_api        functions with stable names over `jax._src`, `jax.extend` and interpreter tables
jax_config         JAX's settings in this process: read, compared, copied to actors
compilation_cache  the folder of JAX's compilation cache, and its use in a process that is the user's
tracebacks         the user's line behind an equation or an error; tracebacks without this package's frames
"""
