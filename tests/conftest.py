"""Settings for the whole suite, before anything starts JAX; `--golden` rewrites golden files."""

import os
import pathlib
import socket

import jax

from jaxpp_async import jax_config

ON_GPU = os.environ.get("JAXPP_TEST_GPU") == "cuda"  # make test-gpu
if ON_GPU:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # actors share the GPU with this process
    jax.config.update("jax_default_matmul_precision", "highest")  # else float32 is multiplied as TensorFloat-32
jax.config.update("jax_platforms", "cuda,cpu" if ON_GPU else "cpu")
jax.config.update("jax_num_cpu_devices", 4)

# Compiling is what the suite costs: meshes, plain JAX and later runs share their executables. One folder a host, since
# an executable fits the CPU that it was made for.
_CACHE = pathlib.Path(__file__).parents[1] / ".cache" / socket.gethostname() / f"jax-{jax.__version__}"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax_config.write_cache_whole()  # files of tests run side by side


def pytest_addoption(parser):
    parser.addoption("--golden", action="store_true", help="rewrite golden files instead of comparing with them")
