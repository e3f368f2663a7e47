"""The Python code of a page of documentation, so that tests run what readers copy."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

import jaxpp_async as jpp

_DOCS = pathlib.Path(__file__).parents[2] / "docs"


def doc_code(page: str, **given: Any) -> dict[str, Any]:
    """Names that the code blocks of `docs/<page>` define, run one after the other; they may use `given`."""
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "jpp": jpp, "P": PartitionSpec, **given}
    for block in re.findall(r"^```python\n(.*?)^```", (_DOCS / page).read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, page, "exec"), names)
    return names
