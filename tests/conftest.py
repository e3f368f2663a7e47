"""Settings for the whole suite: virtual CPU devices, before anything starts JAX."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
