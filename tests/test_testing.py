"""The pytest plugin (`jaxpp_async.testing`) where parts of pytest are missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WITHOUT = """
import sys

sys.modules.update(dict.fromkeys({missing}))

from jaxpp_async.testing import assert_close

assert_close([1.0], [1.0])
try:
    assert_close([1.0], [2.0])
except AssertionError as error:
    print(error)
"""


@pytest.mark.parametrize("missing", [["pytest_asyncio"], ["pytest_asyncio", "pytest"]])
def test_values_are_compared_without_pytest_asyncio(missing):
    code = WITHOUT.format(missing=missing)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[0]: differs by 1" in done.stdout


def test_the_fixture_says_that_pytest_asyncio_is_missing(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it(remote_mesh): pass")
    code = (
        "import sys; sys.modules['pytest_asyncio'] = None; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    )
    options = ["-p", "jaxpp_async.testing", "-p", "no:cacheprovider", "-q", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-c", code, *options, str(tmp_path)]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)
    assert done.returncode == 1
    assert "the fixture remote_mesh needs pytest-asyncio; install it" in done.stdout
