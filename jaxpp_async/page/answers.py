"""Answer the questions that people ask of a run: one table of questions with the functions that answer them.

The page shows each answer at an element with the attribute `data-answer`, which is the id. docs/page.md lists
the questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from jaxpp_async.base.quantities import count, format_bytes, format_seconds
from jaxpp_async.page.goodput import Item
from jaxpp_async.page.run_state import RunState
from jaxpp_async.timeline import Timeline
from jaxpp_async.timeline.advice import WORTHWHILE, Advice, advise
from jaxpp_async.timeline.imbalance import longer_than, stage_times, work_of_actor


class Answer(NamedTuple):
    """An answer.

    Args:
        short: the answer in a few words.
        more: the facts behind it, as a sentence or part of one; empty if there is no more to say.
        is_alarming: whether something is wrong.
    """

    short: str
    more: str = ""
    is_alarming: bool = False


@dataclass(frozen=True)
class LastStep:
    """The last step that ended, with what takes long to compute and is therefore computed once.

    Args:
        timeline: the record of the step.
    """

    timeline: Timeline

    @cached_property
    def stage_s(self) -> dict[int, float]:
        """The seconds that the tasks of each stage take together; see `stage_times`."""
        return stage_times(self.timeline.task_times)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """The advice about what would make the step shorter, the most helpful first."""
        return advise(self.timeline)

    def share(self, seconds: float) -> float:
        """Return the share of some seconds in the step."""
        total_s = self.timeline.bill.total_s
        return seconds / total_s if total_s > 0 else 0.0


UNKNOWN = Answer("not known yet", "no step has ended")

Answerer: TypeAlias = Callable[[RunState, LastStep | None], Answer]
"""A function that answers from the state of the run and its last step, which is None before one has ended."""


def _of_run(answer: Callable[[RunState], Answer]) -> Answerer:
    """Return what answers from the state of the run alone."""
    return lambda run, step: answer(run)


def _of_step(answer: Callable[[LastStep], Answer]) -> Answerer:
    """Return what answers from the last step alone, and before one has ended says so."""
    return lambda run, step: UNKNOWN if step is None else answer(step)


# ---------------------------------------------------------------- speed


@_of_run
def _step(run: RunState) -> Answer:
    if (main := run.main) is None:
        return UNKNOWN
    return Answer(f"step {main.last}", f"of {main.name!r}, counted from 0; {count(main.count, 'step')} ended")


@_of_run
def _rate(run: RunState) -> Answer:
    if (main := run.main) is None:
        return UNKNOWN
    rate = f"{main.per_s:.3g} steps a second" if main.per_s is not None else format_seconds(main.last_s)
    return Answer(rate, f"a step takes {format_seconds(main.median_s)} (median of the latest ones)")


@_of_run
def _steady(run: RunState) -> Answer:
    if (main := run.main) is None:
        return UNKNOWN
    ratio = main.last_s / main.median_s if main.median_s > 0 else 1.0
    short = "yes" if ratio < 1.2 else f"no, {ratio - 1:.0%} slower"
    longest = f"step {main.longest} was the longest: {format_seconds(main.longest_s)}"
    return Answer(
        short,
        f"the last step took {format_seconds(main.last_s)}, the median is {format_seconds(main.median_s)}; "
        f"{longest}",
    )


@_of_run
def _goodput(run: RunState) -> Answer:
    goodput = run.goodput
    return Answer(
        f"{goodput.ratio:.1%}",
        f"{format_seconds(goodput.spent_s['steps'])} of {format_seconds(goodput.total_s)} went into steps "
        "that count",
    )


def _lost(item: Item, more: Callable[[RunState], str]) -> Answerer:
    @_of_run
    def answer(run: RunState) -> Answer:
        seconds = run.goodput.spent_s[item]
        share = seconds / run.goodput.total_s if run.goodput.total_s > 0 else 0.0
        return Answer(format_seconds(seconds), f"{share:.1%} of the time; {more(run)}")

    return answer


# ---------------------------------------------------------------- a step


@_of_step
def _slow_stage(step: LastStep) -> Answer:
    stages = step.stage_s
    if not stages:
        return Answer("no stages", "the step has no loop of microbatches")
    slow, quick = max(stages, key=stages.__getitem__), min(stages, key=stages.__getitem__)
    if slow == quick:
        return Answer(f"stage {slow}", "the only one")
    more = f"{format_seconds(stages[slow])} in the step, {longer_than(stages[slow], stages[quick])}"
    more += f" stage {quick} ({format_seconds(stages[quick])})"
    busy = max(map(work_of_actor, step.timeline.actors), key=lambda work: work.total_s)
    if slow not in busy.stages:
        more += f"; but actor {busy.actor}, which does not run it, computes most"
    return Answer(f"stage {slow}", more)


@_of_step
def _busy_actor(step: LastStep) -> Answer:
    shares = [s for s in step.timeline.shares if s.duration_s > 0]
    if not shares:
        return Answer("none", "no actor computed")
    busy = max(shares, key=lambda s: s.compute_s)
    return Answer(f"actor {busy.actor}", f"computes {busy.compute_s / busy.duration_s:.0%} of the step")


@_of_step
def _idle_actor(step: LastStep) -> Answer:
    shares = [s for s in step.timeline.shares if s.duration_s > 0]
    if not shares:
        return Answer("none", "no actor waited")
    idle = min(shares, key=lambda s: s.compute_s)
    waits = {
        "for other actors": idle.wait_s,
        "for data on its way": idle.transfer_s,
        "for the next task to begin": idle.dispatch_s,
        "before and after its part": idle.idle_s,
    }
    most = max(waits, key=waits.__getitem__)
    share = 1 - idle.compute_s / idle.duration_s
    return Answer(f"actor {idle.actor}", f"{share:.0%} of the step without a task, mostly {most}")


@_of_step
def _bubble(step: LastStep) -> Answer:
    bill = step.timeline.bill
    return Answer(
        f"{step.share(bill.schedule_s):.0%}",
        f"{format_seconds(bill.schedule_s)} of {format_seconds(bill.total_s)}: tasks wait for tasks of other "
        "actors",
    )


@_of_step
def _balance(step: LastStep) -> Answer:
    bill = step.timeline.bill
    share = step.share(bill.imbalance_s)
    return Answer(
        "yes" if share < WORTHWHILE else f"no, it costs {share:.0%}",
        f"the busiest actor computes {format_seconds(bill.imbalance_s)} more than the average of "
        f"{format_seconds(bill.compute_s)}",
    )


@_of_step
def _network(step: LastStep) -> Answer:
    transfers = step.timeline.transfers
    if not transfers:
        return Answer("nothing to hide", "actors send each other nothing")
    share = step.share(step.timeline.bill.transfer_s)
    took_s, sent = sum(t.duration_s for t in transfers), sum(t.send.size_bytes for t in transfers)
    which = f"{count(len(transfers), 'transfer')} of {format_bytes(sent)}"
    short = "yes" if share < WORTHWHILE else "no"
    return Answer(
        short, f"transfers add {share:.1%} to the step; {which} together take {format_seconds(took_s)}"
    )


@_of_step
def _faster(step: LastStep) -> Answer:
    # steps that are submitted ahead wait for each other, which costs nothing
    costly = [advice for advice in step.advice if advice.item != "queue"]
    first = (costly or list(step.advice))[0]
    return Answer(
        first.title or "nothing stands out", f"in this step: {first.text}" if first.item else first.text
    )


@_of_step
def _controller(step: LastStep) -> Answer:
    bill = step.timeline.bill
    late_s = bill.reply_s + bill.dispatch_s
    share = step.share(late_s)
    return Answer(
        f"{share:.1%}",
        f"{format_seconds(bill.dispatch_s)} until ready tasks began, {format_seconds(bill.reply_s)} until "
        "this process knew of the end",
    )


# ---------------------------------------------------------------- memory


@_of_run
def _memory(run: RunState) -> Answer:
    used = {actor: memory.most_bytes for actor, memory in run.memory.items()}
    if not used:
        return UNKNOWN
    most = max(used, key=used.__getitem__)
    memory = run.memory[most]
    more = f"{format_bytes(memory.peak_bytes)} in buffers of the step"
    if memory.needed_bytes is not None:
        more = f"{format_bytes(memory.needed_bytes)} on each device at most, {more}"
    return Answer(f"actor {most}", more)


@_of_run
def _sent(run: RunState) -> Answer:
    if (main := run.main) is None:
        return UNKNOWN
    total = f"{format_bytes(run.totals.sent_bytes)} since the start"
    return Answer(f"{format_bytes(main.sent_bytes)} a step", total)


@_of_run
def _fits(run: RunState) -> Answer:
    known = {actor: m for actor, m in run.memory.items() if m.needed_bytes is not None}
    if not known:
        return Answer("not known yet", "no compiled step has run")
    factors: dict[int, float] = {}
    for actor, memory in known.items():
        if memory.limit_bytes and memory.needed_bytes is not None and memory.batch_bytes:
            factors[actor] = 1 + (memory.limit_bytes - memory.needed_bytes) / memory.batch_bytes
    if not factors:
        grows = max(memory.batch_bytes or 0 for memory in known.values())
        return Answer(
            "not known", f"these devices do not tell their memory; at most {format_bytes(grows)} grow"
        )
    least = min(factors, key=factors.__getitem__)
    memory = known[least]
    factor = factors[least]
    needed, limit = memory.needed_bytes or 0, memory.limit_bytes or 0
    more = f"actor {least} needs {format_bytes(needed)} of {format_bytes(limit)} a device"
    if factor < 1:
        return Answer("no", f"{more}, more than there is", True)
    shown = f"{factor:.1f}" if factor < 10 else f"{factor:,.0f}"
    return Answer(
        "yes" if factor >= 1.1 else "no",
        f"{more}; microbatches could be about {shown} times as large",
    )


# ---------------------------------------------------------------- state


@_of_run
def _alive(run: RunState) -> Answer:
    if not run.mesh.actors:
        return Answer("no actors yet")
    bad = [actor for actor in run.mesh.actors if actor.state != "ready"]
    if not bad:
        return Answer(
            "yes",
            f"all {len(run.mesh.actors)} actors are ready" if len(run.mesh.actors) > 1 else "it is ready",
        )
    if run.status in ("closed", "cancelled"):
        return Answer("no", "the mesh is closed")
    said = ", ".join(f"actor {actor.id} is {actor.state}" for actor in bad[:4])
    return Answer("no", said + (f", and {len(bad) - 4} more" if len(bad) > 4 else ""), True)


@_of_run
def _where(run: RunState) -> Answer:
    hosts = list(dict.fromkeys(actor.host for actor in run.mesh.actors))
    if not hosts:
        return Answer("nowhere yet")
    said = ", ".join(f"actor {a.id}: {a.host}, pid {a.pid}" for a in run.mesh.actors[:4])
    more = f", and {len(run.mesh.actors) - 4} more below" if len(run.mesh.actors) > 4 else ""
    return Answer(count(len(hosts), "host"), said + more)


@_of_run
def _pending(run: RunState) -> Answer:
    if not run.mesh.num_under_way:
        return Answer("nothing", "no step is under way")
    waiting = [activity for activity in run.mesh.doing.values() if activity.is_waiting]
    short = f"{count(len(waiting), 'actor')} for data" if waiting else "nobody"
    doing = "; ".join(
        f"actor {actor}: {activity.text}" for actor, activity in list(run.mesh.doing.items())[:4]
    )
    return Answer(short, doing or f"{count(run.mesh.num_under_way, 'step')} under way")


@_of_run
def _stopped(run: RunState) -> Answer:
    if not run.causes:
        if run.status == "closed":
            return Answer("it was closed", "the script left the mesh without an error")
        if run.status == "cancelled":
            return Answer("it was cancelled", "by Ctrl-C, or by a signal or code that cancels the script")
        return Answer("it has not stopped", run.status)
    cause = run.causes[0]
    return Answer(f"{cause.kind}: {cause.text.splitlines()[0]}", "the first cause is above, in full", True)


@_of_run
def _restarts(run: RunState) -> Answer:
    more = f"{count(run.totals.num_deaths, 'actor')} lost since the start"
    if (died := run.latest.get("died")) is not None:
        more += f"; the last: {died.text}"
    return Answer(f"{run.totals.num_restarts}", more, False)


@_of_run
def _happened(run: RunState) -> Answer:
    if not run.events:
        return Answer("nothing yet")
    event = run.events[-1]
    return Answer(event.kind, f"{event.at:%H:%M:%S} UTC: {event.text}")


@_of_run
def _saved(run: RunState) -> Answer:
    if (event := run.latest.get("checkpointed")) is None:
        return Answer("not yet", "no checkpoint was made since the start")
    return Answer(f"{event.at:%H:%M:%S} UTC", event.text)


@_of_run
def _compiled(run: RunState) -> Answer:
    more = f"{format_seconds(run.totals.compile_s)} in all"
    if (event := run.latest.get("compiled")) is not None:
        more += f"; the last: {event.text}"
    return Answer(count(run.totals.num_compiled, "time"), more)


@_of_run
def _logged(run: RunState) -> Answer:
    latest = dict(run.mesh.logged)
    if not latest:
        return Answer("nothing is logged", "mesh.log(step, {'loss': loss}) shows a value here")
    first = next((name for name in latest if "loss" in name.lower()), next(iter(latest)))
    step, value = latest.pop(first)
    others = "".join(f"; {other} {number:.5g}" for other, (_, number) in list(latest.items())[:3])
    return Answer(f"{first} {value:.5g}", f"at step {step}{others}", not math.isfinite(value))


@_of_run
def _loggers(run: RunState) -> Answer:
    if not run.mesh.loggers:
        return Answer("no loggers", "RemoteMesh(loggers=[...]) gives them what is logged")
    behind = [logger for logger in run.mesh.loggers if not logger.keeps_up]
    if not behind:
        waiting = max(run.mesh.loggers, key=lambda logger: logger.num_waiting)
        verb = "waits" if waiting.num_waiting == 1 else "wait"
        return Answer("yes", f"at most {count(waiting.num_waiting, 'step')} {verb}, for {waiting.name}")
    told = []
    for logger in behind:
        facts = [
            f"did not get {count(logger.num_dropped, 'step')}" * bool(logger.num_dropped),
            f"has been busy for {format_seconds(logger.busy_s)}" * bool(logger.busy_s),
            f"raised {count(logger.num_failed, 'error')}, the last: {logger.last_error}"
            * bool(logger.num_failed),
        ]
        told.append(f"{logger.name} {', '.join(filter(None, facts))}")
    return Answer("no", "; ".join(told), True)


# ---------------------------------------------------------------- the table


class Group(NamedTuple):
    """A section of the page with questions.

    Args:
        id: the id of its element.
        title: its heading.
        is_wide: whether it is as wide as the page.
    """

    id: str
    title: str
    is_wide: bool


SPEED = Group("answers-speed", "Speed", True)
STEP = Group("answers-step", "The last step", True)
MEMORY = Group("answers-memory", "Memory", False)
STATE = Group("answers-state", "State", False)

GROUPS = (SPEED, STEP, MEMORY, STATE)


class Question(NamedTuple):
    """A question, and who answers it.

    Args:
        id: the value of `data-answer`.
        group: the section in which the page shows it.
        text: the question.
        answer: answers it.
    """

    id: str
    group: Group
    text: str
    answer: Answerer


QUESTIONS = (
    Question("step", SPEED, "How far is it?", _step),
    Question("rate", SPEED, "How fast is it?", _rate),
    Question("steady", SPEED, "Is it as fast as before?", _steady),
    Question("goodput", SPEED, "How much of the time was useful?", _goodput),
    Question(
        "lost-start",
        SPEED,
        "How long did the start take?",
        _lost("start", lambda run: count(len(run.mesh.actors), "actor")),
    ),
    Question(
        "lost-compile",
        SPEED,
        "How long did compiling take?",
        _lost("compile", lambda run: f"compiled {count(run.totals.num_compiled, 'time')}"),
    ),
    Question(
        "lost-restarts",
        SPEED,
        "How much time was lost to restarts?",
        _lost("restarts", lambda run: count(run.totals.num_restarts, "restart")),
    ),
    Question(
        "lost-between",
        SPEED,
        "How much time passes between steps?",
        _lost("between", lambda run: "data, saving, evaluation, your own code"),
    ),
    Question("slow-stage", STEP, "Which stage is slow?", _slow_stage),
    Question("faster", STEP, "How can it be faster?", _faster),
    Question("bubble", STEP, "How large is the bubble?", _bubble),
    Question("balance", STEP, "Is the work divided evenly?", _balance),
    Question("network", STEP, "Is the network hidden?", _network),
    Question("busy-actor", STEP, "Which actor is the bottleneck?", _busy_actor),
    Question("idle-actor", STEP, "Which actor waits most, and for what?", _idle_actor),
    Question("overhead", STEP, "How much does the framework itself cost?", _controller),
    Question("memory", MEMORY, "Which actor holds most memory?", _memory),
    Question("fits", MEMORY, "Does a bigger batch fit?", _fits),
    Question("sent", MEMORY, "How much do actors send to each other?", _sent),
    Question("alive", STATE, "Are all actors alive?", _alive),
    Question("where", STATE, "Where does it run?", _where),
    Question("pending", STATE, "Who waits for what right now?", _pending),
    Question("stopped", STATE, "Why did it stop?", _stopped),
    Question("restarts", STATE, "How often was it restarted?", _restarts),
    Question("happened", STATE, "What happened last?", _happened),
    Question("saved", STATE, "When was it saved?", _saved),
    Question("compiled", STATE, "How often was something compiled?", _compiled),
    Question("logged", STATE, "How is the loss?", _logged),
    Question("loggers", STATE, "Does every logger keep up?", _loggers),
)
"""The questions, in the order in which the page shows them."""
