"""Settings for the whole suite: virtual CPU devices, before anything starts JAX; `--golden` rewrites golden files."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)


def pytest_addoption(parser):
    parser.addoption("--golden", action="store_true", help="rewrite golden files instead of comparing with them")
