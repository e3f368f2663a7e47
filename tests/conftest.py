"""Settings for the whole suite, before anything starts JAX; `--golden` rewrites golden files."""

import gc
import os
import pathlib
import signal
import socket

import jax

from jaxpp_async.jax_bridge import jax_config

ON_GPU = os.environ.get("JAXPP_TEST_GPU") == "cuda"  # make test-gpu
if ON_GPU:
    from one_gpu import first_gpu

    os.environ.update(first_gpu(os.environ))  # before anything starts CUDA
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # actors share the GPU with this process
    # else float32 is multiplied as TensorFloat-32
    jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_platforms", "cuda,cpu" if ON_GPU else "cpu")

# Compiling is what the suite costs when nothing is cached, and XLA's optimizations are more than half of
# that. Actors inherit it, so plain JAX and they still compile alike; who sets XLA_FLAGS (also to nothing)
# gets what users get. XLA ends a process over a flag it does not know: only for versions that were tried.
QUICK_COMPILES = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    QUICK_COMPILES += " --xla_cpu_use_fusion_emitters=false"  # later versions have no others
if not ON_GPU and jax.__version_info__ < (0, 13):
    os.environ.setdefault("XLA_FLAGS", QUICK_COMPILES)
jax.config.update("jax_num_cpu_devices", 4)

# A shell's script starts what it puts into the background (`make test &`) with Ctrl-C ignored, and so would
# be every driver that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Compiling is what the suite costs: meshes, plain JAX and later runs share their executables. One folder a
# host, since an executable fits the CPU that it was made for.
_CACHE = pathlib.Path(__file__).parents[1] / ".cache" / socket.gethostname() / f"jax-{jax.__version__}"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
os.environ["XDG_STATE_HOME"] = str(_CACHE.parent / "state")  # pages of runs that failed
jax_config.write_cache_whole()  # files of tests run side by side


def pytest_addoption(parser):
    parser.addoption(
        "--golden", action="store_true", help="rewrite golden files instead of comparing with them"
    )


# What costs most, first: `make test` gives files to two workers in this order, and none is left with a long
# one at the end. A file that is missing here only comes later.
LONG_FILES = (
    "torture/test_programs.py",
    "integration/test_numerics.py",
    "examples/test_llama.py",
    "examples/test_models.py",
    "examples/test_moe.py",
    "integration/test_leaves_in_parts.py",
    "integration/test_failures.py",
    "compiler/test_divide.py",
    "integration/test_api.py",
    "integration/test_hung_actors.py",
    "integration/test_restarts.py",
    "fuzz/test_fuzz.py",
    "integration/test_loop_transfers.py",
    "planning/test_planner.py",
    "docs/test_coming_from.py",
    "integration/test_cancellation.py",
    "examples/test_gpt.py",
    "checkpoint/test_checkpoint.py",
    "doctor/test_doctor.py",
    "controller/test_controller.py",
    "integration/test_drivers.py",
    "commands/test_plan.py",
    "actors/test_profiling.py",
    "benchmarks/test_gpu.py",
    "benchmarks/test_paper.py",
    "session/test_progress.py",
    "integration/test_device_buffers.py",
    "torture/test_outside_the_loop.py",
    "integration/test_failure_cases.py",
    "planning/test_mesh_planner.py",
    "transport/ucx/test_transport.py",
)


def pytest_collection_modifyitems(items):
    """Long files first; else as they were."""
    tests = pathlib.Path(__file__).parent
    ranks = {tests / name: rank for rank, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_collection_finish():
    """What is loaded by now stays: the collector need not look through JAX and all tests again and again."""
    gc.collect()
    gc.freeze()
