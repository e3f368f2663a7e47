"""Predict how long each task and transfer of a step takes, from measured steps or from a table of devices.

A `CostModel` says of every number whether it was measured or assumed; a simulation lists what it assumed.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NoReturn

import msgspec

from jaxpp_async.errors import CostError, MissingCost
from jaxpp_async.planning.devices import (
    BETWEEN_DEVICES,
    BETWEEN_HOSTS,
    MEMORY,
    SAME_HOST,
    Device,
    Link,
    find_device,
    find_link,
    missing_figures,
)
from jaxpp_async.planning.machine import Machine
from jaxpp_async.planning.measurements import MeasuredCut, Measurements, fit_link, read_timelines
from jaxpp_async.planning.samples import ZERO, LinkCost, Samples, check_rate, fit_line
from jaxpp_async.planning.versioned_file import load_versioned, save_versioned
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.program.work import Collective, CollectiveKind, TaskWork
from jaxpp_async.timeline import Timeline

NETWORK = "infiniband-ndr"
"""The link between hosts that is assumed where none is named."""

KIND, VERSION = "jaxpp_async costs", 2
"""The kind and the version of the files that `CostModel.save` writes."""


_PASSES: Mapping[CollectiveKind, int] = {
    "all-reduce": 2,  # a reduce-scatter, and then an all-gather
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 1,
    "collective-permute": 1,
}
"""How often each kind of exchange passes parts of the array around the ring of devices."""

LINE_ERROR = 0.01
"""The root mean square of relative errors up to which measured tasks lie on a line with its overhead."""


class TaskFormula(msgspec.Struct, frozen=True):
    """A formula for the time of a task that was not measured.

    A task takes `overhead_s + max(flops / flops_per_s, bytes / bytes_per_s)`, and the time of its exchanges
    between devices.

    Args:
        overhead_s: the time of a task without any work.
        flops_per_s: the floating-point operations that a device does in a second; None if they take no time.
        bytes_per_s: the bytes that a device reads and writes in a second; None if they take no time.

    Raises:
        CostError: a number is negative, or not finite, or too large or small to compute with.
    """

    overhead_s: float = 0.0
    flops_per_s: float | None = None
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        Samples((self.overhead_s,))  # not negative, and finite
        check_rate(self.flops_per_s, "flops_per_s")
        check_rate(self.bytes_per_s, "bytes_per_s")

    def task_s(self, work: TaskWork) -> float:
        """Return the seconds that a task takes, without its exchanges between devices."""
        flops_s = work.flops / self.flops_per_s if self.flops_per_s is not None else 0.0
        bytes_s = work.size_bytes / self.bytes_per_s if self.bytes_per_s is not None else 0.0
        return self.overhead_s + max(flops_s, bytes_s)


class CostModel(msgspec.Struct, frozen=True):
    """The costs of tasks, transfers and everything between them on one kind of machine.

    Make one with `from_timelines`, `from_device`, `for_machine` or `load`.

    Args:
        tasks: the times of tasks that were measured, by the key of their work.
        cuts: the cuts of steps that were measured, the latest one at the end, which say of each layer by
            what share the stage that contained it took longer than the formula; see `calibration`.
        formula: the formula for all other tasks; None if there is none.
        formula_error: the root mean square of the relative errors of the formula for the measured tasks that
            it was fitted to; 0 if it was fitted to none.
        spread: the ratios of single times of a task to their mean, for tasks that have only the formula. The
            ratios of short tasks are left out, since what delays a task for a moment would be many times the
            length of a short one.
        links: the costs of links by their kind: `"memory"` between actors of one process, `"same host"`,
            `"between hosts"`, and `"devices"` between the devices of one actor.
        axes: the costs of the link of one device to the next along a mesh axis of an actor, by the axis; an
            axis that is not here has those of `"devices"`.
        actors_per_host: the number of neighbouring actors on one host; 0 if all are on one host.
        dispatch: from the end of a task until the next one begins, if it waits for nothing else.
        wake: from the arrival of the data for which a task waits until the task begins.
        post: from the end of a task until the send of a result starts.
        queue: from when the controller sends a step until the first actor begins it.
        skew: from then until an actor begins the step.
        arguments: by number of a step argument: from when an actor begins until it has the argument. An
            argument that is not here is on its actors already.
        reply: from the end of the last instruction until the controller has all replies.
        assumed: sentences, one for each number that was assumed and not measured.

    Raises:
        CostError: a cost is of another type, or the number of actors of a host is negative.
    """

    tasks: dict[str, Samples] = {}
    cuts: tuple[MeasuredCut, ...] = ()
    formula: TaskFormula | None = None
    formula_error: float = 0.0
    spread: Samples = Samples((1.0,))
    links: dict[str, LinkCost] = {}
    axes: dict[str, LinkCost] = {}
    actors_per_host: int = 0
    dispatch: Samples = ZERO
    wake: Samples = ZERO
    post: Samples = ZERO
    queue: Samples = ZERO
    skew: Samples = ZERO
    arguments: dict[int, Samples] = {}
    reply: Samples = ZERO
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, mapping, kind in (
            ("tasks", self.tasks, Samples),
            ("links", self.links, LinkCost),
            ("axes", self.axes, LinkCost),
            ("arguments", self.arguments, Samples),
        ):
            if not isinstance(mapping, Mapping):
                _refuse(name, mapping, f"a dictionary of {kind.__name__}")
            for key, value in mapping.items():
                if not isinstance(value, kind):
                    _refuse(f"{name}[{key!r}]", value, f"a {kind.__name__}")
        for name in ("spread", "dispatch", "wake", "post", "queue", "skew", "reply"):
            if not isinstance(getattr(self, name), Samples):
                _refuse(name, getattr(self, name), "a Samples")
        if self.formula is not None and not isinstance(self.formula, TaskFormula):
            _refuse("formula", self.formula, "a TaskFormula or None")
        hosts = self.actors_per_host
        if not isinstance(hosts, int) or isinstance(hosts, bool) or hosts < 0:
            _refuse("actors_per_host", hosts, "a number of at least 1, or 0 if all are on one host")

    def __repr__(self) -> str:
        count = sum(len(samples.seconds) for samples in self.tasks.values())
        parts = [
            f"{len(self.tasks)} measured tasks with {count} samples" if self.tasks else "no measured task"
        ]
        if self.formula is not None:
            rates = ((self.formula.flops_per_s, "FLOPs/s"), (self.formula.bytes_per_s, "bytes/s"))
            known = [f"{rate:.3g} {unit}" for rate, unit in rates if rate is not None]
            parts.append(f"others at {' and '.join(known)}" if known else "others in a fixed time")
        parts += [
            f"{kind} {link.latency.mean * 1e6:.3g} us"
            + ("" if link.bytes_per_s is None else f" and {link.bytes_per_s:.3g} bytes/s")
            for kind, link in self.links.items()
        ]
        return (
            f"<CostModel: {', '.join(parts)}; dispatch {self.dispatch.mean * 1e6:.3g} us; .assumed "
            f"({len(self.assumed)})>"
        )

    @classmethod
    def from_timelines(cls, timelines: Iterable[Timeline]) -> CostModel:
        """Return the costs that were measured in some steps, as distributions.

        A few steps in a row are a good measurement; leave out the first two, in which much is done for the
        first time. Steps should not overlap (`mesh.run` one after the other, not `mesh.submit`), and nothing
        else should run on the machines, since the costs would contain its time.

        Args:
            timelines: timelines as `mesh.last_step_timeline()` returns them.

        Raises:
            CostError: there is no timeline, or one does not say which work its tasks are.
        """
        found = read_timelines(timelines)
        formula, error, how = _fit_formula(found)
        assumed = [
            f"a task that was not measured takes {how}, fitted to {len(found.tasks)} measured kinds of task"
        ]
        links = {kind: fit_link(transfers) for kind, transfers in found.transfers.items()}
        assumed += [
            f"the bytes of a transfer ({kind}) take no time: no large transfer was measured"
            for kind, link in links.items()
            if link.bytes_per_s is None
        ]
        tasks = {key: Samples.of(times) for key, times in found.tasks.items()}
        return cls(
            tasks=tasks,
            cuts=tuple(found.cuts),
            formula=formula,
            formula_error=error,
            spread=_spread(found),
            links=links,
            actors_per_host=found.actors_per_host,
            dispatch=_samples(found.dispatch),
            wake=_samples(found.wake or found.dispatch),
            post=_samples(found.post),
            queue=_samples(found.queue),
            skew=_samples(found.skew),
            arguments={arg: Samples.of(late) for arg, late in found.arguments.items() if max(late) > 0},
            reply=_samples(found.reply),
            assumed=tuple(assumed),
        )

    @classmethod
    def from_device(
        cls,
        device: str | Device,
        *,
        network: str | Link = NETWORK,
        devices_per_actor: int = 1,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        matmul: float = 1.0,
        memory: float = 1.0,
        links: float | Mapping[str, float] = 1.0,
        overhead_s: float = 0.0,
        dispatch_s: float = 0.0,
    ) -> CostModel:
        """Return costs that follow from a device's published figures, without measuring anything.

        Args:
            device: the name of a device in `planning.devices`, such as `"h100-sxm"`, or figures of one's own.
            network: the link between hosts, for each device.
            devices_per_actor: the number of devices of an actor. If they are on several hosts, exchanges
                between them go over the network; `for_machine` knows along which mesh axes they do.
            dtype, matmul, memory, links, overhead_s, dispatch_s: as for `for_machine`.

        Raises:
            MeshError: no device or link has this name.
            CostError: a figure of the device is not published, or a share is not between 0 and 1.
        """
        return cls.for_machine(
            Machine(1, {"devices": devices_per_actor}, device, {BETWEEN_HOSTS: network}),
            dtype=dtype,
            matmul=matmul,
            memory=memory,
            links=links,
            overhead_s=overhead_s,
            dispatch_s=dispatch_s,
        )

    @classmethod
    def for_machine(
        cls,
        machine: Machine,
        *,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        matmul: float = 1.0,
        memory: float = 1.0,
        links: float | Mapping[str, float] = 1.0,
        overhead_s: float = 0.0,
        dispatch_s: float = 0.0,
    ) -> CostModel:
        """Return costs that follow from the published figures of a machine's devices and links.

        Programs reach a part of the published rates. `matmul`, `memory` and `links` say how large a part is;
        take them from a measured step, since 1 is never reached. Every number is listed in `assumed`.

        Neighbouring devices fill the hosts, and an actor's devices lie in the order of its mesh, whose last
        axis varies fastest. So a mesh axis whose devices are all on one host has the devices' own link, and
        any other axis the network. The devices of an actor send their parts of an array to another actor at
        the same time.

        Args:
            machine: the machine. Without a link between hosts, `NETWORK` is assumed.
            dtype: the type of numbers in which tasks compute.
            matmul, memory: the shares of the published rates that are reached, above 0 and at most 1: of
                operations, and of bytes read and written.
            links: the share of the published rates of links that is reached; a mapping has one for each kind
                of link that does not reach all of its rate.
            overhead_s: the seconds that a task takes in addition to its work.
            dispatch_s: the seconds from when a task could begin until it begins.

        Raises:
            CostError: a figure of the device is not published, there are no rates of `dtype`, or a share is
                not between 0 and 1.
        """
        row, kinds = find_device(machine.device), (BETWEEN_DEVICES, SAME_HOST, BETWEEN_HOSTS)
        shares = links if isinstance(links, Mapping) else dict.fromkeys(kinds, links)
        given = {"matmul": matmul, "memory": memory, **{f"links[{kind!r}]": x for kind, x in shares.items()}}
        for name, share in given.items():
            if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share <= 1:
                raise CostError(
                    f"{name}={share!r} is no share of a published rate; give one above 0 and at most 1"
                )
        if dtype not in ("bfloat16", "float32"):
            raise CostError(
                f"dtype is {dtype!r:.40}, of which there are no rates; write 'bfloat16' or 'float32' (on "
                "GPUs float16 has the rate of bfloat16)"
            )
        if unknown := [repr(kind) for kind in shares if kind not in kinds]:
            raise CostError(f"links has {', '.join(unknown)}; its keys are {', '.join(map(repr, kinds))}")
        flops_per_s = row.bf16_flops_per_s if dtype == "bfloat16" else row.f32_flops_per_s
        if flops_per_s is None or row.memory_bytes_per_s is None:
            raise CostError(missing_figures(row, dtype))
        network = machine.links.get(BETWEEN_HOSTS, NETWORK)
        found = {kind: find_link(machine.links.get(kind, network)) for kind in kinds}
        costs = {
            kind: LinkCost(Samples((link.latency_s or 0.0,)), shares.get(kind, 1.0) * link.bytes_per_s)
            for kind, link in found.items()
        }
        per_actor, group = machine.devices_per_actor, row.devices_in_group
        axes: dict[str, LinkCost] = {}
        span = per_actor  # the neighbouring devices among which a ring along the axis lies
        for axis, count in machine.spmd_mesh.items():
            axes[axis] = costs[BETWEEN_DEVICES if span <= group else BETWEEN_HOSTS]
            span //= count

        assumed = [
            f"matrix products reach {matmul:z.0%} of {flops_per_s:.3g} FLOPs/s ({row.name}, {dtype})",
            f"tasks reach {memory:z.0%} of {row.memory_bytes_per_s:.3g} bytes/s of memory ({row.name})",
            *dict.fromkeys(
                f"links reach {shares.get(kind, 1.0):z.0%} of {link.bytes_per_s:.3g} bytes/s a device "
                f"({link.name})"
                for kind, link in found.items()
            ),
            f"a task takes {overhead_s * 1e6:.3g} us in addition, and begins {dispatch_s * 1e6:.3g} us after "
            "it could",
            "nothing else takes time, and no time varies",
        ]
        if BETWEEN_HOSTS not in machine.links:
            assumed.append(f"the network between hosts is {network}: the machine names none")
        if row.note:
            assumed.append(row.note)
        assumed += [
            f"a transfer over {link.name} has no latency: none is published"
            for link in dict.fromkeys(found.values())
            if link.latency_s is None
        ]
        dispatch = Samples((dispatch_s,))
        return cls(
            formula=TaskFormula(overhead_s, matmul * flops_per_s, memory * row.memory_bytes_per_s),
            links={
                BETWEEN_DEVICES: costs[BETWEEN_DEVICES if per_actor <= group else BETWEEN_HOSTS],
                **{kind: costs[kind].of_lanes(per_actor) for kind in (SAME_HOST, BETWEEN_HOSTS)},
            },
            axes=axes,
            actors_per_host=max(1, group // per_actor),
            dispatch=dispatch,
            wake=dispatch,
            assumed=tuple(assumed),
        )

    # ------------------------------------------------------------ tasks and links

    @property
    def is_constant(self) -> bool:
        """Whether each distribution has one value, so that all draws are equal."""
        links = (link.latency for link in (*self.links.values(), *self.axes.values()))
        delays = (self.spread, self.dispatch, self.wake, self.post, self.queue, self.skew, self.reply)
        every = (*delays, *links, *self.tasks.values(), *self.arguments.values())
        return all(len(samples.seconds) == 1 for samples in every)

    def is_measured(self, work: TaskWork) -> bool:
        """Return whether the time of a task was measured."""
        return work.key in self.tasks

    def task_s(self, work: TaskWork) -> float:
        """Return the mean time of a task in seconds.

        Args:
            work: the work of the task.

        Raises:
            MissingCost: the task was not measured, and there is no formula; or a link between the devices of
                an actor is missing.
        """
        return self.tasks[work.key].mean if work.key in self.tasks else self.formula_s(work)

    def formula_s(self, work: TaskWork) -> float:
        """Return the time of a task in seconds by the formula, whether or not the task was measured.

        Args:
            work: the work of the task.

        Raises:
            MissingCost: there is no formula, or a link between the devices of an actor is missing.
        """
        if self.formula is None:
            raise MissingCost(
                f"there is no cost for a task of {work.flops:g} FLOPs and {work.size_bytes:g} bytes: it was "
                "not measured, and the cost model has no formula; measure a step that runs it, or give the "
                "model a `formula`"
            )
        return self.formula.task_s(work) + sum(map(self.exchange_s, work.collectives))

    def samples(self, work: TaskWork) -> Samples:
        """Return the distribution of a task's time: the measured times, or the formula's time spread as the
        times of other tasks were.

        Raises:
            MissingCost: as `task_s` does.
        """
        if work.key in self.tasks:
            return self.tasks[work.key]
        mean_s = self.task_s(work)
        return Samples(tuple(mean_s * ratio for ratio in self.spread.seconds))

    def exchange_s(self, collective: Collective) -> float:
        """Return the seconds of an exchange between the devices of an actor.

        The devices along an axis form a ring, which passes parts of the array on, one latency a part. An
        exchange along several axes goes along one after the other, so that the slowest carries least: a
        gather begins with it and a reduce-scatter ends with it.

        Args:
            collective: the exchange.

        Raises:
            MissingCost: there is no cost for a link between the devices, or for this kind of exchange.

        Source: Chan et al., Collective communication: theory, practice, and experience, 2007.
        """
        if collective.kind not in _PASSES:
            raise MissingCost(
                f"there is no cost for an exchange of the kind {collective.kind!r} between devices of an "
                f"actor: the kinds are {', '.join(_PASSES)}"
            )
        found: list[tuple[LinkCost, int]] = []
        for axis, count in collective.axes:
            link = self.axes.get(axis, self.links.get(BETWEEN_DEVICES))
            if link is None:
                raise MissingCost(
                    f"there is no cost for an exchange ({collective.kind}) between {count} devices of an "
                    f"actor along its mesh axis {axis!r}: the cost model has no link {BETWEEN_DEVICES!r}; "
                    "give it one in `links`, or one for the axis in `axes`"
                )
            found.append((link, count))
        found.sort(key=lambda link: link[0].bytes_per_s or math.inf, reverse=True)  # the fastest first
        size = collective.size_bytes
        if collective.kind == "collective-permute":  # each device sends its array to one other
            return max(link.latency.mean + link.occupied_s(size) for link, _ in found)
        seconds = 0.0
        for link, count in found:
            seconds += (count - 1) * (link.latency.mean + link.occupied_s(size / count))
            if collective.kind != "all-to-all":  # the next axis carries only what one device of this one has
                size /= count
        return _PASSES[collective.kind] * seconds

    def link_between(self, a: ActorId, b: ActorId) -> tuple[str, str]:
        """Return the kind of link between two actors, and the kind of link whose costs stand for it.

        The two differ if no link of the first kind was measured, but one of another kind was.

        Raises:
            MissingCost: the model has no link between actors at all.
        """
        hosts = self.actors_per_host
        if hosts and a // hosts != b // hosts:
            wanted = BETWEEN_HOSTS
        else:
            wanted = MEMORY if MEMORY in self.links and SAME_HOST not in self.links else SAME_HOST
        for kind in (wanted, SAME_HOST, MEMORY, BETWEEN_HOSTS):
            if kind in self.links:
                return wanted, kind
        raise MissingCost(
            f"there is no cost for a transfer from actor {a} to actor {b} ({wanted}): the cost model has no "
            "link between actors; measure a step with transfers, or give the model one in `links`"
        )

    # ------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a file as JSON; see `load`.

        Args:
            path: the file to write. A file that exists is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        save_versioned(path, KIND, VERSION, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read a model that `save` wrote.

        Args:
            path: the file to read.

        Raises:
            CostError: the file is no cost model, or one of another version, or it is damaged.
            OSError: the file cannot be read.
        """
        return load_versioned(
            path,
            KIND,
            VERSION,
            CostModel,
            CostError,
            "make it anew with `CostModel.from_timelines` or `from_device`, and save that",
        )


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise CostError(f"{name} of a cost model is {value!r:.60}; write {wanted}")


def _samples(values: list[float]) -> Samples:
    return Samples.of(values) if values else ZERO


def _spread(found: Measurements) -> Samples:
    """Return the ratios of single times of long tasks to their means."""
    long = _long_tasks(found)
    return Samples.of(
        [t / mean_s for key, mean_s in long.items() if mean_s for t in found.tasks[key]] or [1.0]
    )


def _long_tasks(found: Measurements) -> dict[str, float]:
    """Return the mean times of the tasks that are at least a tenth as long as the longest, by their keys."""
    means = {key: sum(times) / len(times) for key, times in found.tasks.items()}
    longest_s = max(means.values())
    return {key: mean_s for key, mean_s in means.items() if mean_s >= longest_s / 10}


def _fit_formula(found: Measurements) -> tuple[TaskFormula, float, str]:
    """Fit the formula to the mean times of the measured tasks, by FLOPs or, where that fits better, by bytes.

    Only long tasks count, each kind by the share of the steps' time that it took. The part added to the time
    of a short task, such as making zeros, says little of what is added to that of a long one. But where the
    long ones do not lie on a line (`LINE_ERROR`), no more is added than the short ones take.

    Returns:
        The formula, the root mean square of its relative errors, and the words that say what it is.
    """
    long = _long_tasks(found)
    works, means = [found.works[key] for key in long], list(long.values())
    shares = [sum(found.tasks[key]) for key in long]
    short = [statistics.fmean(times) for key, times in found.tasks.items() if key not in long]

    def fit(sizes: Sequence[float]) -> tuple[float, float, float]:
        line = fit_line(sizes, means, shares)
        if line[2] > LINE_ERROR**2 * sum(shares):
            return fit_line(sizes, means, shares, max(short, default=math.inf))
        return line

    overhead_s, per_flop, error = fit([w.flops for w in works])
    by_bytes_s, per_byte, bytes_error = fit([w.size_bytes for w in works])
    if bytes_error < error or (per_flop == 0 and per_byte > 0):
        rate = 1 / per_byte if per_byte > 0 else None
        formula, amount, error = TaskFormula(by_bytes_s, bytes_per_s=rate), "bytes", bytes_error
    else:
        rate = 1 / per_flop if per_flop > 0 else None
        formula, amount = TaskFormula(overhead_s, flops_per_s=rate), "FLOPs"
    at = f" and its {amount} at {rate:.3g} a second" if rate is not None else ""
    root = math.sqrt(error / sum(shares)) if sum(shares) else 0.0
    return formula, root, f"{formula.overhead_s * 1e6:.3g} us{at}"
