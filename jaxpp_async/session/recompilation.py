"""Say why a step is compiled again: which argument has another shape, dtype or value than before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp_async.base.printable import listed, shown_value

_MOST_NAMED = 3


def why_compiled_again(signature: Any, forms: Mapping[Any, Sequence[str]]) -> str:
    """Return what differs between a call and the most similar one for which the step is compiled already.

    Args:
        signature: the call's `StepDefinition.signature`.
        forms: for the signature of each compiled form, the names of the argument leaves.

    Returns:
        A text such as `"batch['x'] was float32[8,2,128] and is float32[8,1,128]"`.
    """
    treedef, types, static, config = signature
    alike = [old for old in forms if old[0] == treedef and len(old[1]) == len(types)]
    if not alike:
        return "its arguments have another tree structure"
    old = min(
        alike, key=lambda old: (sum(a != b for a, b in zip(old[1], types, strict=True)), old[2] != static)
    )
    changes = [
        f"{name} was {_shown(was)} and is {_shown(now)}"
        for name, was, now in zip(forms[old], old[1], types, strict=False)
        if was != now
    ]
    changes += [
        f"a static argument was {shown_value(was)} and is {shown_value(now)}"
        for was, now in zip(old[2], static, strict=False)
        if was != now
    ]
    if not changes:
        return "settings of JAX or shardings of arguments are others" if old[3] != config else "it is new"
    return listed(changes, _MOST_NAMED)


def _shown(leaf_type: tuple[tuple[int, ...], str, bool]) -> str:
    shape, dtype, is_weak = leaf_type
    return f"{dtype}[{','.join(map(str, shape))}]{' (weakly typed)' * is_weak}"
