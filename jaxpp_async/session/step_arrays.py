"""step_arrays: the arrays that a step under way was given for good, and those that it makes.

Decides what each of these handles stands for from when the step is sent until it has ended: with its caller there,
without, and when the step fails. Sends nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jaxpp_async.session.remote_array import DONATED, FAILED, RemoteArray, is_remote
from jaxpp_async.session.step import CompiledStep

_MOST_NAMES = 3


class StepArrays:
    """The donated arguments and the results of one step that has been sent.

    Args:
        name: the step function's.
        compiled: knows which result continues which argument.
        leaves: the call's argument leaves.
        results: the handles of its results.

    Attributes:
        donated: the donated arrays, by the position of their leaf.
    """

    __slots__ = ("_compiled", "_name", "_results", "donated")

    def __init__(self, name: str, compiled: CompiledStep, leaves: Sequence[Any], results: list[RemoteArray]):
        self._name, self._compiled, self._results = name, compiled, results
        self.donated = {k: leaves[k] for k in compiled.donated if is_remote(leaves[k])}
        for array in self.donated.values():
            array.retire(DONATED, f"it was donated to step {name!r}; use the step's result instead")

    def fail(self, why: str) -> None:
        """The step has failed: neither what it was given nor what it would have made can be used."""
        for k, array in enumerate(self._results):
            if not array.is_deleted() and k not in self._compiled.handed_back:
                # such a one no program touches
                array.retire(FAILED, f"its step failed: {why}")
        for array in self.donated.values():
            array.retire(DONATED, f"it was donated to step {self._name!r}, which failed: {why}")

    def abandon(self) -> str | None:
        """Nobody has the results, since the caller has gone: each donated array stands for the one that continues it.

        Returns:
            What became of the donated arguments, for the log; None if there are none.
        """
        lost: dict[int, RemoteArray] = {}
        continued: dict[str, str] = {}
        for k, array in self.donated.items():
            result = self._compiled.donated[k]
            if result is None:
                lost[k] = array
                why = f"it was donated to step {self._name!r}, whose caller was cancelled, and no result continues it"
                array.retire(
                    DONATED, f"{why}: none has its place in the tree, its shape and its dtype; make it anew"
                )
            else:
                array.take_over(self._results[result])
                self._results[result] = array  # should the step fail, it fails
                continued.update([self._argument_and_result(k, result)])
        here = [k for k in self._compiled.donated if k not in self.donated]
        self.donated = lost
        said = [f"{argument} stands for {result}" for argument, result in continued.items()]
        if lost:
            said.append(f"no result continues {self._names(lost)}, which cannot be used any more")
        if here:
            said.append(f"host values are what they were: {self._names(here)}")
        if continued:
            said.append("to give it the same batch again trains on it twice")
        return "; ".join(said) or None

    def _argument_and_result(self, arg: int, result: int) -> tuple[str, str]:
        """The trees that the two leaves are the same part of, such as `("state", "result[0]")`."""
        name, traced = self._compiled.inputs[arg].name, self._compiled.compiled.traced
        argument = re.split(r"[\[.]", name, maxsplit=1)[0]
        return argument, traced.out_names[result].removesuffix(name[len(argument) :])

    def _names(self, leaves: Sequence[int] | dict[int, RemoteArray]) -> str:
        names = [self._compiled.inputs[k].name for k in leaves]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return ", ".join(names[:_MOST_NAMES]) + more
