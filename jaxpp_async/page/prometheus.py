"""Write the state of a run as metrics in Prometheus's text format.

`prometheus_client` formats them. Names follow Prometheus's rules: base units, and `_total` behind counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jaxpp_async.page.run_state import STEP_BUCKETS, RunState
from jaxpp_async.protocol.actor_info import ACTOR_STATES

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The value of `Content-Type` that Prometheus expects."""

Sample: TypeAlias = "tuple[Sequence[str], *tuple[Any, ...]]"
"""The values of a metric's labels, and what `add_metric` of its kind takes behind them."""


@dataclass(frozen=True, slots=True)
class MetricRow:
    """A metric, and who samples it.

    Args:
        name: the name, without what Prometheus adds to that of a counter or of a histogram.
        kind: the kind.
        help: a sentence that says what it measures.
        labels: the names of its labels.
        samples: returns its samples; none if the value is not known.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    samples: Callable[[RunState], Iterable[Sample]]

    @property
    def shown_name(self) -> str:
        """The name as Prometheus and docs/page.md show it, with its labels."""
        labels = f"{{{','.join(self.labels)}}}" if self.labels else ""
        return self.name + "_total" * (self.kind == "counter") + labels


def _one(value: Callable[[RunState], float | None]) -> Callable[[RunState], Iterable[Sample]]:
    """Return the samples of a metric without labels; none while its value is None."""

    def samples(run: RunState) -> Iterable[Sample]:
        found = value(run)
        return [] if found is None else [((), found)]

    return samples


def _step_seconds(run: RunState) -> Iterable[Sample]:
    bounds = [*map(str, STEP_BUCKETS), "+Inf"]
    yield (), list(zip(bounds, run.step_counts, strict=True)), run.totals.step_s


METRICS = (
    MetricRow("jaxpp_step_seconds", "histogram", "Time of a step.", (), _step_seconds),
    MetricRow(
        "jaxpp_steps",
        "counter",
        "Steps that ended and count.",
        ("name",),
        lambda run: [([steps.name], steps.count) for steps in run.steps],
    ),
    MetricRow(
        "jaxpp_last_step",
        "gauge",
        "Number of the last step.",
        (),
        _one(lambda run: run.main.last if run.main else None),
    ),
    MetricRow(
        "jaxpp_goodput_ratio",
        "gauge",
        "Share of the time in steps that count.",
        (),
        _one(lambda run: run.goodput.ratio),
    ),
    MetricRow(
        "jaxpp_run_seconds",
        "counter",
        "Time since the start, by its use.",
        ("use",),
        lambda run: [([item], seconds) for item, seconds in run.goodput.decided_s.items()],
    ),
    MetricRow(
        "jaxpp_run_undecided_seconds",
        "gauge",
        "Latest time, whose use is known when a step, a compilation or a restart ends.",
        (),
        _one(lambda run: run.goodput.undecided_s),
    ),
    MetricRow(
        "jaxpp_idle_ratio",
        "gauge",
        "Share of the actors' time in the last step without a task.",
        (),
        _one(lambda run: run.main.idle if run.main else None),
    ),
    MetricRow(
        "jaxpp_bubble_ratio",
        "gauge",
        "Share of a recent step in which tasks wait for tasks of other actors.",
        (),
        _one(lambda run: run.bubble),
    ),
    MetricRow(
        "jaxpp_restarts", "counter", "Restarts of actors.", (), _one(lambda run: run.totals.num_restarts)
    ),
    MetricRow(
        "jaxpp_actor_deaths", "counter", "Actors that were lost.", (), _one(lambda run: run.totals.num_deaths)
    ),
    MetricRow(
        "jaxpp_compilations",
        "counter",
        "Steps that were compiled.",
        (),
        _one(lambda run: run.totals.num_compiled),
    ),
    MetricRow(
        "jaxpp_sent_bytes",
        "counter",
        "Bytes from actor to actor.",
        (),
        _one(lambda run: run.totals.sent_bytes),
    ),
    MetricRow(
        "jaxpp_peak_bytes",
        "gauge",
        "Most bytes of buffers in the last step.",
        ("actor",),
        lambda run: [([str(actor)], memory.peak_bytes) for actor, memory in run.memory.items()],
    ),
    MetricRow(
        "jaxpp_actors",
        "gauge",
        "Actors in each state.",
        ("state",),
        lambda run: [([s], sum(actor.state == s for actor in run.mesh.actors)) for s in ACTOR_STATES],
    ),
    MetricRow(
        "jaxpp_logged",
        "gauge",
        "Values that the script logs.",
        ("name",),
        lambda run: [([name], value) for name, (_, value) in run.mesh.logged.items()],
    ),
    MetricRow(
        "jaxpp_logger_dropped",
        "counter",
        "Steps that a logger did not get.",
        ("logger",),
        lambda run: [([logger.name], logger.num_dropped) for logger in run.mesh.loggers],
    ),
    MetricRow(
        "jaxpp_logger_errors",
        "counter",
        "Errors that a logger raised.",
        ("logger",),
        lambda run: [([logger.name], logger.num_failed) for logger in run.mesh.loggers],
    ),
    MetricRow(
        "jaxpp_up",
        "gauge",
        "1 while the run goes on.",
        (),
        _one(lambda run: int(run.status not in ("failed", "cancelled", "closed"))),
    ),
)
"""The metrics, in the order of docs/page.md."""


def write_metrics(run: RunState) -> bytes:
    """Return the metrics of a run.

    Args:
        run: the state of the run.
    """
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(run))
    return generate_latest(registry)


class _Collector:
    def __init__(self, run: RunState):
        self._run = run

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        from prometheus_client import metrics_core

        families: dict[str, Any] = {
            "counter": metrics_core.CounterMetricFamily,
            "gauge": metrics_core.GaugeMetricFamily,
            "histogram": metrics_core.HistogramMetricFamily,
        }
        for row in METRICS:
            family = families[row.kind](row.name, row.help, labels=row.labels)
            for labels, *values in row.samples(self._run):
                family.add_metric(labels, *values)
            yield family
