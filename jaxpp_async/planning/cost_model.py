"""Predict how long each task and transfer of a step takes, from measured steps or from a table of devices.

A `CostModel` says of every number whether it was measured or assumed; a simulation lists what it assumed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from jaxpp_async.errors import CostError, MissingCost
from jaxpp_async.planning.devices import Device, Link, find_device, find_link
from jaxpp_async.planning.measurements import (
    BETWEEN_HOSTS,
    MEMORY,
    SAME_HOST,
    Measurements,
    fit_link,
    read_timelines,
)
from jaxpp_async.planning.samples import ZERO, LinkCost, Samples, check_rate, fit_line
from jaxpp_async.program.instructions import ActorId
from jaxpp_async.program.work import Collective, TaskWork
from jaxpp_async.timeline import Timeline

DEVICES = "devices"
"""The kind of the links between the devices of one actor."""

VERSION = 1
"""The version of the files that `CostModel.save` writes."""


class TaskFormula(msgspec.Struct, frozen=True):
    """A formula for the time of a task that was not measured.

    A task takes `overhead_s + max(flops / flops_per_s, bytes / bytes_per_s)`, and the time of its exchanges
    between devices.

    Args:
        overhead_s: the time of a task without any work.
        flops_per_s: the floating-point operations that a device does in a second; None if they take no time.
        bytes_per_s: the bytes that a device reads and writes in a second; None if they take no time.

    Raises:
        ValueError: a number is negative, or not finite.
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

    Make one with `from_timelines`, `from_device` or `load`.

    Args:
        tasks: the times of tasks that were measured, by the key of their work.
        formula: the formula for all other tasks; None if there is none.
        spread: the ratios of single times of a task to their mean, for tasks that have only the formula. The
            ratios of short tasks are left out, since what delays a task for a moment would be many times the
            length of a short one.
        links: the costs of links by their kind: `"memory"` between actors of one process, `"same host"`,
            `"between hosts"`, and `"devices"` between the devices of one actor.
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
    """

    tasks: dict[str, Samples] = {}
    formula: TaskFormula | None = None
    spread: Samples = Samples((1.0,))
    links: dict[str, LinkCost] = {}
    actors_per_host: int = 0
    dispatch: Samples = ZERO
    wake: Samples = ZERO
    post: Samples = ZERO
    queue: Samples = ZERO
    skew: Samples = ZERO
    arguments: dict[int, Samples] = {}
    reply: Samples = ZERO
    assumed: tuple[str, ...] = ()

    @classmethod
    def from_timelines(cls, timelines: Iterable[Timeline]) -> CostModel:
        """Return the costs that were measured in some steps, as distributions.

        A few steps in a row are a good measurement; leave out the first two, in which much is done for the
        first time. Steps should not overlap (`mesh.run` one after the other, not `mesh.submit`).

        Args:
            timelines: timelines as `mesh.last_step_timeline()` returns them.

        Raises:
            CostError: there is no timeline, or one does not say which work its tasks are.
        """
        found = read_timelines(timelines)
        formula, how = _fit_formula(found)
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
            formula=formula,
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
        network: str | Link = "infiniband-ndr",
        devices_per_actor: int = 1,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        matmul: float = 1.0,
        memory: float = 1.0,
        links: float = 1.0,
        overhead_s: float = 0.0,
        dispatch_s: float = 0.0,
    ) -> CostModel:
        """Return costs that follow from a device's published figures, without measuring anything.

        Programs reach a part of the published rates. `matmul`, `memory` and `links` say how large a part is;
        take them from a measured step, since 1 is never reached. Every number is listed in `assumed`.

        Args:
            device: the name of a device in `planning.devices`, such as `"h100-sxm"`, or figures of one's own.
            network: the link between hosts, for each device.
            devices_per_actor: the number of devices of an actor, which send their parts of an array to
                another actor at the same time.
            dtype: the type of numbers in which tasks compute.
            matmul, memory, links: the shares of the published rates that are reached, above 0 and at most 1:
                of operations, of bytes read and written, and of bytes sent.
            overhead_s: the seconds that a task takes in addition to its work.
            dispatch_s: the seconds from when a task could begin until it begins.

        Raises:
            MeshError: no device or link has this name.
            CostError: a figure of the device is not published, or a share is not between 0 and 1.
        """
        row, outside = find_device(device), find_link(network)
        for name, share in (("matmul", matmul), ("memory", memory), ("links", links)):
            if not 0 < share <= 1:
                raise CostError(
                    f"{name}={share} is no share of a published rate; give one above 0 and at most 1"
                )
        flops_per_s = row.bf16_flops_per_s if dtype == "bfloat16" else row.f32_flops_per_s
        if flops_per_s is None or row.memory_bytes_per_s is None:
            raise CostError(
                f"of device {row.name!r} no rate of {dtype} or of memory is published; measure steps on it "
                "(`CostModel.from_timelines`), or pass a `Device` with your own figures"
            )
        within_a_host = row.link is not None and devices_per_actor <= row.devices_in_group
        inside = find_link(row.link) if within_a_host and row.link is not None else outside

        def link(of: Link, lanes: int) -> LinkCost:
            return LinkCost(Samples((of.latency_s or 0.0,)), lanes * links * of.bytes_per_s)

        assumed = [
            f"matrix products reach {matmul:.0%} of {flops_per_s:.3g} FLOPs/s ({row.name}, {dtype})",
            f"tasks reach {memory:.0%} of {row.memory_bytes_per_s:.3g} bytes/s of memory ({row.name})",
            f"links reach {links:.0%} of {inside.bytes_per_s:.3g} bytes/s a device ({inside.name}), and of "
            f"{outside.bytes_per_s:.3g} between hosts ({outside.name})",
            f"a task takes {overhead_s * 1e6:.3g} us in addition, and begins {dispatch_s * 1e6:.3g} us after "
            "it could",
            "nothing else takes time, and no time varies",
        ]
        assumed += [
            f"a transfer over {of.name} has no latency: none is published"
            for of in dict.fromkeys((inside, outside))
            if of.latency_s is None
        ]
        dispatch = Samples((dispatch_s,))
        return cls(
            formula=TaskFormula(overhead_s, matmul * flops_per_s, memory * row.memory_bytes_per_s),
            links={
                DEVICES: link(inside, 1),
                SAME_HOST: link(inside, devices_per_actor),
                BETWEEN_HOSTS: link(outside, devices_per_actor),
            },
            actors_per_host=max(1, row.devices_in_group // devices_per_actor),
            dispatch=dispatch,
            wake=dispatch,
            assumed=tuple(assumed),
        )

    # ------------------------------------------------------------ tasks and links

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
        if work.key in self.tasks:
            return self.tasks[work.key].mean
        if self.formula is None:
            raise MissingCost(
                f"there is no cost for the task with key {work.key!r} ({work.flops:g} FLOPs, "
                f"{work.size_bytes:g} bytes): it was not measured, and the cost model has no formula; "
                "measure a step that runs it, or give the model a `formula`"
            )
        return self.formula.task_s(work) + sum(map(self._exchange_s, work.collectives))

    def sample(self, work: TaskWork, u: float) -> float:
        """Return the time of a task in seconds at a quantile of its distribution.

        Args:
            work: the work of the task.
            u: the quantile, at least 0 and less than 1.

        Raises:
            MissingCost: as `task_s` does.
        """
        return self.samples(work).quantile(u)

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

    def _exchange_s(self, collective: Collective) -> float:
        link, count = self.links.get(DEVICES), collective.devices
        if count < 2:
            return 0.0
        if link is None:
            raise MissingCost(
                f"there is no cost for an {collective.kind} between {count} devices of an actor: the cost "
                f"model has no link {DEVICES!r}; give it one in `links`"
            )
        rounds = 2 if collective.kind == "all-reduce" else 1  # reduce-scatter, then all-gather
        return rounds * (link.latency.mean + link.occupied_s(collective.size_bytes * (count - 1) / count))

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
        text = msgspec.json.format(msgspec.json.encode(_File("jaxpp_async costs", VERSION, self)), indent=1)
        path = Path(path)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        try:
            unfinished.write_bytes(text)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CostModel:
        """Read a model that `save` wrote.

        Args:
            path: the file to read.

        Raises:
            CostError: the file is no cost model, or one of another version, or it is damaged.
            OSError: the file cannot be read.
        """
        text = Path(path).read_bytes()
        again = "make it anew with `CostModel.from_timelines` or `from_device`, and save that"
        try:
            head = msgspec.json.decode(text, type=_Head)
            if head.format != "jaxpp_async costs":
                raise CostError(f"{os.fspath(path)!r} holds no cost model, but {head.format!r}; {again}")
            if head.version != VERSION:
                raise CostError(
                    f"{os.fspath(path)!r} is a cost model of version {head.version}, and this package reads "
                    f"version {VERSION}; {again}"
                )
            return msgspec.json.decode(text, type=_File).costs
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CostError(
                f"{os.fspath(path)!r} is no cost model, or it is damaged: {error}; {again}"
            ) from error


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    costs: CostModel


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


def _fit_formula(found: Measurements) -> tuple[TaskFormula, str]:
    """Fit the formula to the mean times of the measured tasks, by FLOPs or, where that fits better, by bytes.

    Only long tasks count, each kind by the share of the steps' time that it took. What is added to the time
    of a short task, such as making zeros, says little of what is added to that of a long one.

    Returns:
        The formula, and the words that say what it is.
    """
    long = _long_tasks(found)
    works, means = [found.works[key] for key in long], list(long.values())
    shares = [sum(found.tasks[key]) for key in long]
    overhead_s, per_flop, error = fit_line([w.flops for w in works], means, shares)
    by_bytes_s, per_byte, bytes_error = fit_line([w.size_bytes for w in works], means, shares)
    if bytes_error < error or (per_flop == 0 and per_byte > 0):
        rate = 1 / per_byte if per_byte > 0 else None
        formula, amount = TaskFormula(by_bytes_s, bytes_per_s=rate), "bytes"
    else:
        rate = 1 / per_flop if per_flop > 0 else None
        formula, amount = TaskFormula(overhead_s, flops_per_s=rate), "FLOPs"
    at = f" and its {amount} at {rate:.3g} a second" if rate is not None else ""
    return formula, f"{formula.overhead_s * 1e6:.3g} us{at}"
