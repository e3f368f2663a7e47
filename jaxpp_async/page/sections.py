"""Write the sections of the page as HTML: one function a section, the same for the live page and its file.

Sections about the run are written from a `RunState` and cost little. Sections about the last step have its
drawing, and cost more the larger the step is; they are written less often (`renderer.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from types import MappingProxyType
from typing import NamedTuple

from jaxpp_async.base.quantities import format_bytes, format_seconds
from jaxpp_async.page.answers import GROUPS, MEMORY, QUESTIONS, SPEED, STATE, STEP, Answer, Group, LastStep
from jaxpp_async.page.goodput import Item
from jaxpp_async.page.run_state import Cause, RunState, StepCurves
from jaxpp_async.view.curves import Curve, curves_to_html
from jaxpp_async.view.history import History
from jaxpp_async.view.svg import to_svg

MOST_CURVES, MOST_ACTORS, MOST_EVENTS = 24, 256, 50
"""The most charts, actors and events that the page shows."""

MOST_NOT_FINITE = 3
"""The most values that the page's banner names."""

_MOST_CAUSE_TEXT = 20_000

_GOODPUT: Mapping[Item, str] = MappingProxyType(
    {
        "steps": "steps that count",
        "start": "start",
        "compile": "compiling",
        "restarts": "failures and restarts",
        "between": "between steps",
    }
)
"""How each item of the goodput is called."""


def write_run(run: RunState) -> dict[str, str]:
    """Return the sections that show the state of a run, by the id of their element.

    Args:
        run: the state.
    """
    answers = {group.id: _answers(group, run, None) for group in GROUPS if group != STEP}
    return {section: write(run) for section, write in _OF_RUN.items()} | answers


def write_step(run: RunState, step: LastStep | None) -> dict[str, str]:
    """Return the sections that show the last step, by the id of their element.

    Args:
        run: the state of the run.
        step: the last step; None if none has ended.
    """
    return {"grid": _grid(step), STEP.id: _answers(STEP, run, step)}


# ---------------------------------------------------------------- of the run


def _title(run: RunState) -> str:
    age, has_ended = format_seconds(run.age_s), run.status in ("failed", "cancelled", "closed")
    began = f"started {escape(run.begun_at)}, {'ran' if has_ended else 'running'} for {age}"
    return (
        f'<div class="title"><span class="status {run.status}">{run.status}</span>'
        f'<h1>{escape(run.mesh.title)}</h1><span class="faint">{began}</span></div>'
    )


def _figures(run: RunState) -> str:
    main = run.main
    cards = [
        ("step", f"{main.last:,}" if main else "none yet"),
        ("rate", f"{main.per_s:.3g} /s" if main and main.per_s else "not known yet"),
        ("step time", format_seconds(main.median_s) if main else "not known yet"),
        ("goodput", f"{run.goodput.ratio:.0%}"),
        ("idle", f"{main.idle:.0%}" if main else "not known yet"),
        ("restarts", f"{run.totals.num_restarts}"),
    ]
    shown = "".join(
        f'<div class="card"><div class="value{" small" * ("yet" in value)}">{escape(value)}</div>'
        f'<div class="label">{escape(name)}</div></div>'
        for name, value in cards
    )
    return f'<div class="cards">{shown}</div>{_goodput_bar(run)}'


def _goodput_bar(run: RunState) -> str:
    total_s = run.goodput.total_s
    if total_s <= 0:
        return ""
    parts, keys = [], []
    for item, name in _GOODPUT.items():
        colour = f"background:var(--use-{item})"
        seconds = run.goodput.spent_s[item]
        share = seconds / total_s
        if share < 0.0005:
            continue
        title = f"{name}: {format_seconds(seconds)}, {share:.1%}"
        parts.append(f'<span title="{title}" style="width:{100 * share:.2f}%;{colour}"></span>')
        keys.append(f'<span class="key"><span class="swatch" style="{colour}"></span>{title}</span>')
    return f'<div class="share">{"".join(parts)}</div><div class="keys">{"".join(keys)}</div>'


def _failure(run: RunState) -> str:
    if not run.causes:
        return _not_finite(run)
    first, *later = run.causes
    led = "".join(
        f"<details><summary>which led to {escape(cause.kind)}: {escape(cause.text.splitlines()[0])}</summary>"
        f"{_cause(cause)}</details>"
        for cause in later
    )
    return f'<div class="failure"><h2>Why it stopped</h2>{_cause(first)}{led}</div>'


def _not_finite(run: RunState) -> str:
    """Return a banner about the values that are not finite any more; empty if there is none."""
    names = sorted(
        run.mesh.not_finite, key=lambda name: ("loss" not in name.lower(), run.mesh.not_finite[name])
    )
    said = "".join(
        f'<p class="cause"><b>{escape(name)} is not finite since step {run.mesh.not_finite[name]:,}</b></p>'
        for name in names[:MOST_NOT_FINITE]
    )
    more = len(names) - MOST_NOT_FINITE
    said += f"<p>{more} more values are not finite.</p>" if more > 0 else ""
    what = (
        "<p>The value is NaN or infinite, and the run goes on. <code>jax_debug_nans</code> names the "
        "operation that makes the first NaN: docs/debugging.md.</p>"
    )
    return f'<div class="failure">{said}{what}</div>' if said else ""


def _cause(cause: Cause) -> str:
    first, _, rest = cause.text[:_MOST_CAUSE_TEXT].partition("\n")
    notes = "".join(f"<p>{escape(note)}</p>" for note in cause.notes)
    more = f"<pre>{escape(rest.strip(chr(10)))}</pre>" if rest.strip() else ""
    return f'<p class="cause"><b>{escape(cause.kind)}</b>: {escape(first)}</p>{more}{notes}'


def write_curves(run: RunState, steps: Sequence[StepCurves], logged: Mapping[str, History]) -> dict[str, str]:
    """Return the section that shows values over the steps, by the id of its element.

    Args:
        run: the state of the run.
        steps: the history of each step function.
        logged: the history of each name that the user logs; the first ones are shown.
    """
    curves = []
    for each in steps[:2]:
        of = "" if len(steps) == 1 else f" of {each.name}"
        curves.append(Curve(f"step time{of}", "s", each.seconds.buckets()))
        curves.append(Curve(f"idle time of actors{of}", "share", each.idle.buckets()))
    curves += [Curve(name, "", history.buckets()) for name, history in logged.items()]
    curves = [curve for curve in curves if len(curve.buckets)][:MOST_CURVES]
    if not curves:
        return {"curves": ""}
    left = len(run.mesh.logged) - len(logged)
    more = f'<p class="faint">{left} more values are logged.</p>' if left > 0 else ""
    shown = curves_to_html(curves, restarts=run.restart_steps)
    return {"curves": f"<h2>Over the steps</h2>{shown}{more}"}


def _actors(run: RunState) -> str:
    if not run.mesh.actors:
        return '<h2>Actors</h2><p class="faint">No actor has connected yet.</p>'
    rows = []
    for actor in run.mesh.actors[:MOST_ACTORS]:
        memory, doing = run.memory.get(actor.id), run.mesh.doing.get(actor.id)
        held, most = (memory.most_bytes, memory.limit_bytes or 0) if memory else (0, 0)
        limit = f" of {format_bytes(most)}" if most else ""
        bar = f'<span class="bar" style="width:{min(100, 100 * held / most):.1f}%"></span>' if most else ""
        devices = ", ".join(actor.devices[:2]) + (
            f" and {len(actor.devices) - 2} more" * (len(actor.devices) > 2)
        )
        rows.append(
            f"<tr><td>{actor.id}</td>"
            f'<td><span class="dot {escape(actor.state)}"></span>{escape(actor.state)}</td>'
            f"<td>{escape(actor.host)}</td><td>{actor.pid}</td><td>{escape(devices)}</td>"
            f'<td class="held">{bar}<span>'
            f"{format_bytes(held) + limit if memory else ''}</span></td>"
            f'<td class="doing">{escape(doing.text if doing else "")}</td></tr>'
        )
    names = ("actor", "state", "host", "pid", "devices", "memory", "now")
    head = "".join(f"<th>{name}</th>" for name in names)
    left = len(run.mesh.actors) - MOST_ACTORS
    more = f'<p class="faint">{left} more actors are not shown.</p>' if left > 0 else ""
    return (
        f'<h2>Actors</h2><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{more}"
    )


def _events(run: RunState) -> str:
    if not run.events:
        return '<h2>Events</h2><p class="faint">Nothing has happened yet.</p>'
    rows = "".join(
        f'<tr><td class="faint">{event.at:%H:%M:%S}</td><td><span class="event {escape(event.kind)}">'
        f"{escape(event.kind)}</span></td><td>{escape(event.text)}</td></tr>"
        for event in reversed(run.events[-MOST_EVENTS:])
    )
    return f'<h2>Events</h2><div class="scroll"><table class="events"><tbody>{rows}</tbody></table></div>'


def _answers(group: Group, run: RunState, step: LastStep | None) -> str:
    rows = "".join(
        _row(question.id, question.text, question.answer(run, step))
        for question in QUESTIONS
        if question.group == group
    )
    return f"<h2>{escape(group.title)}</h2><dl>{rows}</dl>"


def _row(answer_id: str, question: str, answer: Answer) -> str:
    alarming = ' class="alarming"' if answer.is_alarming else ""
    more = f' <span class="more">{escape(answer.more)}</span>' if answer.more else ""
    return (
        f'<div><dt>{escape(question)}</dt><dd data-answer="{answer_id}"{alarming}>'
        f"<b>{escape(answer.short)}</b>{more}</dd></div>"
    )


# ---------------------------------------------------------------- of the last step


def _grid(step: LastStep | None) -> str:
    if step is None:
        return '<h2>The last step</h2><p class="faint">No step has ended yet.</p>'
    drawing = replace(step.timeline.to_drawing(), advice=())
    advice = "".join(f"<li>{escape(str(advice))}</li>" for advice in step.advice)
    return f'<div class="drawing">{to_svg(drawing)}</div><ul class="advice">{advice}</ul>'


_OF_RUN: Mapping[str, Callable[[RunState], str]] = MappingProxyType(
    {"title": _title, "failure": _failure, "figures": _figures, "actors": _actors, "events": _events}
)


class Section(NamedTuple):
    """A section of the page.

    Args:
        id: the id of its element.
        is_wide: whether it is as wide as the page; else it has half of the width of a wide window.
    """

    id: str
    is_wide: bool = True


def _of_group(group: Group) -> Section:
    return Section(group.id, group.is_wide)


SECTIONS = (
    Section("title"),
    Section("failure"),
    Section("figures"),
    Section("grid"),
    _of_group(STEP),
    Section("curves"),
    _of_group(SPEED),
    Section("actors"),
    _of_group(MEMORY),
    _of_group(STATE),
    Section("events"),
)
"""The sections, in the order of the page."""
