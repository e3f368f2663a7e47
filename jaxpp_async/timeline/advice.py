"""Say what would make a measured step shorter, from its bill: the most helpful advice first.

Each item of the bill has a sentence, with the share of the step that it costs and something to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from jaxpp_async.timeline.imbalance import explain_imbalance
from jaxpp_async.view import format_held, format_time

if TYPE_CHECKING:
    from jaxpp_async.timeline.timeline import Timeline

WORTHWHILE = 0.03
"""The share of a step from which an item of its bill gets a sentence."""

Item: TypeAlias = Literal["imbalance", "schedule", "transfer", "dispatch", "start", "queue", "reply"]
"""The items of a bill that can be made smaller, as `StepBreakdown` has them, with `_s` behind them."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The advice about one item of a step's bill.

    Args:
        item: the item; None if no item costs much.
        share: the share of the step that it costs, from 0 to 1.
        text: what costs the time and what to do about it.
    """

    item: Item | None
    share: float
    text: str

    @property
    def title(self) -> str:
        """The item and its share, such as `"bubble 25%"`; empty if no item costs much."""
        return "" if self.item is None else f"{_NAMES.get(self.item, self.item)} {self.share:z.0%}"

    def __str__(self) -> str:
        return f"{self.title}: {self.text}" if self.item is not None else self.text


def advise(timeline: Timeline) -> tuple[Advice, ...]:
    """Return what costs time in a step and what to do about it.

    Args:
        timeline: the measured or simulated step.

    Returns:
        One piece of advice for each item of the bill that costs at least `WORTHWHILE` of the step, the
        largest item first. If there is none, one that says so.
    """
    bill = timeline.bill
    shares: dict[Item, float] = {
        item: getattr(bill, f"{item}_s") / bill.total_s if bill.total_s > 0 else 0.0 for item in _ADVICE
    }
    costly: list[Item] = [item for item, share in shares.items() if share >= WORTHWHILE]
    costly.sort(key=lambda item: -shares[item])
    if not costly:
        text = f"no cause costs {WORTHWHILE:z.0%} of the step: {bill.efficiency:z.0%} of what its tasks allow"
        return (Advice(None, 0.0, text),)
    return tuple(Advice(item, shares[item], _ADVICE[item](timeline)) for item in costly)


def _imbalance(timeline: Timeline) -> str:
    return explain_imbalance(timeline.actors, timeline.cut_choice)


def _transfer(timeline: Timeline) -> str:
    if not timeline.transfers:
        return "tasks wait for data; hand less from stage to stage"
    slow = max(timeline.transfers, key=lambda t: t.duration_s)
    size, time = format_held(slow.send.size_bytes, "bytes"), format_time(slow.duration_s, "s")
    hosts = {a.actor: a.host for a in timeline.actors}
    is_here = hosts.get(slow.send.actor) == hosts.get(slow.receive.actor)
    instead = "give the actors cores of their own" if is_here else "measure the network: jaxpp-async doctor"
    return (
        f"tasks wait for data on its way; the slowest is {slow.send.label}, {size} from actor "
        f"{slow.send.actor} to {slow.receive.actor} in {time}; cut where less is handed on, hand it on in "
        f"bfloat16, or {instead}"
    )


def _dispatch(timeline: Timeline) -> str:
    runs = [run.duration_s for actor in timeline.actors for run in actor.runs]
    each = format_time(sum(runs) / len(runs) if runs else 0.0, "s")
    return (
        f"everything is there and the next task has not begun; tasks take {each}: make "
        "microbatches larger, or give the actors cores of their own"
    )


_NAMES: Mapping[Item, str] = MappingProxyType({"schedule": "bubble"})

_ADVICE: Mapping[Item, Callable[[Timeline], str]] = MappingProxyType(
    {
        "imbalance": _imbalance,
        "schedule": lambda _: (
            "tasks wait for tasks of other actors; use more microbatches, or a schedule with "
            "a smaller bubble (jpp.plan chooses one)"
        ),
        "transfer": _transfer,
        "dispatch": _dispatch,
        "start": lambda _: (
            "an actor began later than the first, or waited for its arguments; put them on the actors "
            "before the step (mesh.put)"
        ),
        "queue": lambda _: (
            "the step waited for the one before it, or for the way to the actors; if steps are submitted "
            "ahead (mesh.submit) this costs nothing, else keep this process's event loop free"
        ),
        "reply": lambda _: (
            "the controller heard late that the step had ended; submit the next step meanwhile (mesh.submit)"
        ),
    }
)
