"""Sphinx's configuration: `make docs` builds the site from this folder into build/docs.

Pages are Markdown (MyST). A page that begins with `file_format: mystnb` is a notebook: the build runs
its cells, and a cell that raises ends the build.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import tempfile
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

project = "jaxpp-async"
author = "The jaxpp-async authors"
copyright = "the jaxpp-async authors; Apache-2.0"
version = release = installed_version("jaxpp-async")
html_title = f"jaxpp-async {release}"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
templates_path: list[str] = []

# ---- Markdown
highlight_language = "text"  # of blocks that name no language
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4  # links such as failures.md#an-interrupted-step, as on GitHub

# ---- notebooks: executed in each build, in the folder of a temporary file, on CPUs
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["PYDEVD_DISABLE_FILE_VALIDATION"] = "1"  # the kernel's debugger warns on standard error without it
logging.getLogger("traitlets").setLevel(logging.WARNING)
# A profile of its own: a user's start-up files do not matter, and kernels are silent but for errors.
_profile = Path(tempfile.mkdtemp(prefix="jaxpp-docs-"))
atexit.register(shutil.rmtree, _profile, ignore_errors=True)
(_profile / "profile_default").mkdir()
(_profile / "profile_default" / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 40\n")
os.environ["IPYTHONDIR"] = str(_profile)
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 120  # seconds of one cell
nb_execution_raise_on_error = False  # but a warning, which ends the build when all pages are read
nb_execution_show_tb = True
nb_merge_streams = True

# ---- reference
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# Types of arguments are written as in the code, also those of other libraries, which have pages of their own.
# Links that an author wrote (to functions, methods, pages and headings) are all checked.
nitpick_ignore_regex = [("py:(class|data|obj|exc|attr)", ".*")]

# ---- looks
html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_sourcelink = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"


def read_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring's Markdown into what Sphinx reads: `name` is code, also in `name`s, a block that is
    indented behind a paragraph is an example, and the name of a page is a link to it.
    """
    text = "\n".join(lines)
    code = re.compile(r"(?<![`:])`([^`]+)`(?!`)(\w?)")
    text = code.sub(lambda m: f"``{m[1]}``" + (f"\\ {m[2]}" if m[2] else ""), text)
    text = re.sub(r"(?m)^(\S.*)\n\n(?=    \S)", r"\1\n\n::\n\n", text)
    text = re.sub(r"docs/(\w+)\.md", r":doc:`/\1`", text)
    lines[:] = text.split("\n")


NOTEBOOK = "the notebook of this page"
"""The words in a tutorial that are a link to its notebook on the site."""


def link_notebook(app: Any, name: str, source: list[str]) -> None:
    """Turn `NOTEBOOK` in a tutorial into a link to the notebook that the build makes of it."""
    link = f"{{nb-download}}`{NOTEBOOK} <{name.rpartition('/')[2]}.ipynb>`"
    source[0] = source[0].replace(NOTEBOOK, link) if name.startswith("tutorials/") else source[0]


GIVEN = {
    *("ActorInfo", "ActorTimeline", "CompiledStep", "CostModel", "DistributedStep", "Event", "Plan"),
    *("RemoteArray", "Saving", "ScheduleTiming", "StepBreakdown", "StepFuture", "TimeShares", "Timeline"),
    *("TimelineEvent", "TimelineTransfer"),
}
"""Classes that users get and do not call. The reference does not show how the package makes them."""


def hide_signature(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, result: Any
) -> tuple[str, str] | None:
    """Return an empty signature for a class of `GIVEN`, and None, which keeps it, for anything else."""
    return ("", "") if what == "class" and name.rpartition(".")[2] in GIVEN else None


def setup(app: Any) -> None:
    app.connect("source-read", link_notebook)
    app.connect("autodoc-process-signature", hide_signature)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon, which is at 500
