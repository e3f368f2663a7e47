"""Define `RemoteMesh`, the class with which users run steps, keep arrays on actors, and save checkpoints.

The mesh owns the controller of its actors. Other modules do the work: `session.step_compiler` compiles steps,
`session.step_runner` runs them, `session.host_transfers` puts and fetches arrays, `checkpoint.save` and
`checkpoint.restore` save and restore them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NoReturn

from jaxpp_async.base.events import EventLog, Events
from jaxpp_async.base.printable import shown
from jaxpp_async.checkpoint.restore import restore
from jaxpp_async.checkpoint.save import OnProgress, Saver, Saving
from jaxpp_async.controller.controller import Controller
from jaxpp_async.controller.options import BACKUP_EVERY, LAUNCH_TIMEOUT_S, ControllerOptions
from jaxpp_async.controller.stall_detector import PROGRESS_S
from jaxpp_async.errors import MeshError
from jaxpp_async.jax_bridge.compilation_cache import DEFAULT as DEFAULT_CACHE
from jaxpp_async.jax_bridge.tracebacks import HiddenFrames, deliberate
from jaxpp_async.page import RunPage, check_packages
from jaxpp_async.planning.cost_model import CostModel
from jaxpp_async.planning.devices import Device
from jaxpp_async.planning.machine import Machine, argument_types
from jaxpp_async.planning.memory import memory_needs
from jaxpp_async.planning.mesh_planner import MeshPlanner
from jaxpp_async.planning.plan import Plan
from jaxpp_async.program.work import DeviceModel
from jaxpp_async.protocol.actor_info import ActorInfo
from jaxpp_async.protocol.messages import StepStats
from jaxpp_async.protocol.parent_watch import LEASE_S
from jaxpp_async.session import mesh_options
from jaxpp_async.session.awaiting import says_to_await
from jaxpp_async.session.host_transfers import RemoteValues
from jaxpp_async.session.metrics import Metrics
from jaxpp_async.session.owned_thread import run_in_owned_thread
from jaxpp_async.session.progress import MeshProgress, choose_mode
from jaxpp_async.session.step import DistributedStep
from jaxpp_async.session.step_compiler import MeshStepCompiler
from jaxpp_async.session.step_future import StepFuture
from jaxpp_async.session.step_request import make_options
from jaxpp_async.session.step_runner import StepRunner
from jaxpp_async.storage.checkpoint_folder import CheckpointPath
from jaxpp_async.timeline import Timeline
from jaxpp_async.view import to_html_table

_LOG = logging.getLogger("jaxpp_async")


class RemoteMesh:
    """A group of actors, each a group of devices that run one SPMD program.

    The mesh is an async context manager that starts and ends the actors: `async with RemoteMesh(4) as mesh:`.

    Args:
        num_actors: the number of actors, an int or a tuple of one.
        spmd_mesh: the shape of each actor's device mesh: axis name to size, or sizes alone (of axes `"data"`,
            `"model"`). Empty for one device.
        axis_types: the type of each axis, `"auto"` (the default) or `"explicit"`, by axis name.
        axis_rules: the mesh axis of each logical axis name, for `shard` and for shardings by name.
        hosts: the machines to run on over ssh: the path of a hostfile, or a list such as `["node1 slots=2",
            "node2"]`.
        launcher: `"local"` (processes on this machine, the default), `"inline"` (actors inside this process),
            `"ssh"` (the default with `hosts`), `"slurm"`, `"ray"`, or a `Launcher`. docs/launching.md
            describes them, and the options from `python` to `ssh_options`.
        python: the interpreter on the hosts; default: the path of this process's interpreter. A setting that
            a host has in `hosts` takes precedence over this option and over the next ones, up to `ports`.
        cpus, devices: CPU numbers (`"0-15"`) and `CUDA_VISIBLE_DEVICES` (`"0-7"`) that a host's actors divide
            among themselves.
        interface, ports: the network device and the range of TCP ports of the data plane (`"ib0"`,
            `"47000-47100"`).
        control_address: the address at which this process listens for actors on other hosts; default: the
            address at which those hosts can connect to this machine.
        ssh_options: words for `ssh`, such as `["-o", "ProxyJump=gate"]`.
        transport: `"ucx"` (the default), `"nccl"` (GPUs only: see docs/nccl.md) or `"memory"` (inline only).
        platform: `"cpu"` or `"cuda"`; default: what this machine has (`"cuda"` if it has GPUs and a JAX for
            them), whatever the hosts have.
        setup: a function that is called in each actor before JAX starts, as `"module:function"`.
        env: environment variables of the actors' processes.
        processes_per_actor: the number of processes of each actor, which divide its devices among themselves;
            default: one, or with `hosts` as many as it takes if an actor is larger than a host. See
            docs/processes.md.
        max_restarts: how often actors that died or hang may be replaced within ten minutes; training then
            continues from where it was, with the same numerical results. With 0, a failure ends the mesh. See
            docs/restarts.md.
        backup_every: with `max_restarts`, the number of steps between two copies of the state in the actors'
            memory.
        progress_timeout_s: the seconds for which a step may make no progress while no actor computes (one
            second more for each 50 MB that are being transferred). After that, the actors are asked for the
            reason, and the step is given up.
        max_inflight: how many steps may be under way at the same time.
        compilation_cache: the folder of JAX's persistent compilation cache, or None for no cache; default:
            the folder that `JAX_COMPILATION_CACHE_DIR` names, else one for each host in the user's cache
            folder. With `launcher="inline"` this process's JAX uses it until the mesh closes, unless JAX has
            a cache of its own.
        launch_timeout_s: the most seconds that each of the two stages of starting an actor may take. The
            first stage starts the actor's process and connects it; the second starts JAX and the transport.
        lease_s: the seconds without a heartbeat from this process after which each actor ends itself. This
            process sends heartbeats unless the process is stopped, or a native call holds Python's GIL. See
            docs/operations.md.
        device_model: an object with a method `task_s(work)`, such as a cost model, which takes the
            `TaskWork` of an executable and returns seconds. Each task of a step then lasts, from its start,
            at least that long: it computes, and waits for the rest of the time. Processes, transfers and
            scheduling stay real. `step.init` and moves of arrays are not lengthened. Actors on GPUs are
            refused. With None (the default), tasks last as long as they compute. See docs/planning.md.
        loggers: objects with a method `log(step, values)`, plain or `async`, which get what `log` is given.
            A logger that raises or blocks does not hold training up. See docs/operations.md.
        progress: how starting, compiling, the first step, saving and restoring are told: True for a line on
            the terminal, False for nothing, None (the default) for a line on a terminal that shows no log
            records of level `INFO`, and else for such records. See docs/operations.md.
        page: whether a page at `page_url` shows the run while it goes on, at any free port of this machine or
            at the given one. See docs/page.md.

    Attributes:
        metrics: what was logged so far: `names`, `latest()` and `history(name)`.
        saver: the object that runs the saves of this mesh; `Checkpoints` uses it.

    Raises:
        MeshError: options contradict each other, or ask for something that the machines do not have.
        ShardingError: a rule names an unknown axis.
    """

    @mesh_options.only_known
    def __init__(
        self,
        num_actors: int | tuple[int],
        *,
        spmd_mesh: Mapping[str, int] | tuple[int, ...] = {},
        axis_types: Mapping[str, str] | Sequence[str] = {},
        axis_rules: Mapping[str, Any] = {},
        hosts: Any = None,
        launcher: Any = None,
        transport: str | None = None,
        platform: str | None = None,
        setup: str | None = None,
        env: Mapping[str, str] = {},
        python: str | None = None,
        cpus: str | Sequence[int] | None = None,
        devices: str | Sequence[int | str] | None = None,
        interface: str | None = None,
        ports: str | tuple[int, int] | None = None,
        control_address: str | None = None,
        ssh_options: Sequence[str] = (),
        processes_per_actor: int | None = None,
        max_restarts: int = 0,
        backup_every: int = BACKUP_EVERY,
        progress_timeout_s: float = PROGRESS_S,
        max_inflight: int = 2,
        compilation_cache: str | None = DEFAULT_CACHE,
        launch_timeout_s: float = LAUNCH_TIMEOUT_S,
        lease_s: float = LEASE_S,
        device_model: DeviceModel | None = None,
        loggers: Sequence[Any] = (),
        progress: bool | None = None,
        page: bool | int = False,
    ):
        self.num_actors = mesh_options.check_actor_count(num_actors)
        self.spmd_mesh = mesh_options.check_axes(spmd_mesh)
        self.axis_rules = mesh_options.check_axis_rules(axis_rules, self.spmd_mesh)
        max_restarts = mesh_options.check_count("max_restarts", max_restarts, least=0)
        kinds, given = mesh_options.check_axis_types(axis_types, self.spmd_mesh), platform
        platform = mesh_options.choose_platform(given)
        device_model = mesh_options.check_device_model(device_model, platform)
        self._launcher, inline, each = mesh_options.make_launcher(
            launcher,
            self.num_actors,
            processes_per_actor,
            hosts=hosts,
            python=python,
            cpus=cpus,
            devices=devices,
            interface=interface,
            ports=ports,
            control_address=control_address,
            ssh_options=ssh_options,
            spmd_mesh=self.spmd_mesh,
            platform=platform,
            lease_s=mesh_options.check_seconds("lease_s", lease_s, least=1.0, most=1e6),
            max_restarts=max_restarts,
            env=env,
        )
        self._same_python = launcher in (None, "local") and hosts is None and python is None
        mesh_options.refuse_idle_devices(given, platform, self._launcher, devices)
        mesh_options.spare_gpus(platform, inline=inline)
        config = mesh_options.make_actor_config(
            spmd_mesh=self.spmd_mesh,
            axis_types=kinds,
            platform=platform,
            setup=setup,
            env=env,
            cache_dir=compilation_cache,
            transport=mesh_options.choose_transport(
                transport, self._launcher, inline, platform=platform, num_actors=self.num_actors
            ),
            inline=inline,
            processes_per_actor=each,
        )
        max_inflight = mesh_options.check_count("max_inflight", max_inflight, least=1)
        self._options = ControllerOptions(
            config,
            max_restarts=max_restarts,
            progress_s=mesh_options.check_seconds("progress_timeout_s", progress_timeout_s),
            backup_every=mesh_options.check_count("backup_every", backup_every, least=1),
            launch_timeout_s=mesh_options.check_seconds("launch_timeout_s", launch_timeout_s),
        )
        self._running = _RunningController()
        self._start_failed = self._is_starting = False
        target = mesh_options.make_target(self.spmd_mesh, kinds, self.axis_rules, config.platform)
        machine = Machine(
            self.num_actors,
            spmd_mesh=self.spmd_mesh,
            device=Device(config.platform, config.platform),
            axis_types=dict(zip(self.spmd_mesh, kinds, strict=True)),
            axis_rules=self.axis_rules,
        )
        self._planner = MeshPlanner(machine, device_model)
        self._values = RemoteValues(self._running, target)
        self.metrics = Metrics(self._values, mesh_options.check_loggers(loggers))
        self._progress = MeshProgress(choose_mode(progress))
        self._events = EventLog()
        self.saver = Saver(self._running, self._values, self._events.emit, self._progress)
        if (port := mesh_options.check_page(page)) is not None:
            check_packages(f"page={page}")
        running = self._running
        self._page = RunPage(
            f"{self.num_actors} actor{'s' * (self.num_actors != 1)}, {type(self._launcher).__name__}",
            port,
            controller=lambda: running.controller,
            logged=self.metrics,
            memory_needs=memory_needs,
        )
        self._events.listen(self._page.on_event)
        compiler = MeshStepCompiler(
            self._running,
            actor_config=config.jax_config,
            planner=self._planner,
            device_model=device_model,
            progress=self._progress,
        )
        self._runner = StepRunner(
            self._running,
            self._values,
            compiler,
            num_actors=self.num_actors,
            target=target,
            max_inflight=max_inflight,
            progress=self._progress,
            on_step_end=self._page.on_step_end,
        )

    def __repr__(self) -> str:
        count, each = self.num_actors, self._options.actors.processes_per_actor
        split = f" of {each} processes" if each > 1 else ""
        if self._controller is None:
            state = "not started"
        elif self.is_closed:
            state = "failed" if any(actor.state == "failed" for actor in self.actors) else "closed"
        else:
            state = "running"
        return (
            f"<RemoteMesh: {count} actor{'s' * (count != 1)}{split}, {type(self._launcher).__name__}, "
            f"{state}>"
        )

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the actors, and the last finished step."""
        actors = [] if self._controller is None else self.actors
        rows = [(a.id, a.state, a.host, a.pid, ", ".join(map(str, a.devices))) for a in actors]
        table = to_html_table(repr(self).strip("<>"), ("actor", "state", "host", "pid", "devices"), rows)
        last, url = self._runner.last, self.page_url
        if url is not None:
            link = f'<a href="{escape(url)}" target="_blank" rel="noreferrer">the page of this run</a>'
            table += f"<p>{link}</p>"
        return table + ("" if last is None else last.timeline().to_svg())

    # ---------------------------------------------------------------- life

    async def __aenter__(self) -> RemoteMesh:
        if self._controller is not None:
            raise MeshError("this mesh has been entered before; make a new RemoteMesh for another run")
        if self._is_starting:
            raise MeshError("this mesh is being started already; await that start, and start it once")
        with HiddenFrames():
            self._is_starting, self._start_failed = True, False
            try:
                self._page.on_starting()
                await self._page.start()
                await mesh_options.prepare(
                    self._launcher, self._options.actors, same_python=self._same_python
                )
                with self._progress.launch() as launch:
                    self._running.controller = await Controller.start(
                        self.num_actors,
                        self._launcher,
                        self._options,
                        events=self._events,
                        on_progress=launch.tell,
                    )
                    launch.note_ready(actor.host for actor in self.actors)
            except BaseException as error:  # also a cancellation: such a mesh counts as closed
                self._start_failed = True
                self._page.on_end(error)
                await self._page.aclose()
                raise
            finally:
                self._is_starting = False
        self._page.on_started()
        self.metrics.on_started()
        return self

    def __enter__(self) -> NoReturn:
        with HiddenFrames():
            raise MeshError(
                "a mesh starts and ends asynchronously; write `async with RemoteMesh(...) as mesh:`"
            )

    def __exit__(self, *exc: object) -> None:
        """Do nothing. `with` looks for this method before it calls `__enter__`, which raises an error that
        says to use `async with`.
        """

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._page.on_end(error)
        await self.aclose()

    async def start(self) -> RemoteMesh:
        """Start the actors outside `async with`, as a notebook does: `mesh = await RemoteMesh(2).start()`.

        End the mesh with `await mesh.aclose()`. A mesh that nothing refers to any more, for example because a
        cell made another one of the same name, warns and ends by itself.

        Returns:
            The mesh itself.

        Raises:
            MeshError: the mesh has been started before, or an actor cannot be started.
        """
        return await self.__aenter__()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        running = getattr(self, "_running", None)  # the options may have been wrong
        if running is not None and not is_ending():  # at its end Python empties modules, also this one
            running.end_dropped(repr(self))
            if (page := getattr(self, "_page", None)) is not None:
                page.abandon()
            if (metrics := getattr(self, "metrics", None)) is not None:
                metrics.abandon()

    async def aclose(self) -> None:
        """End the actors; the mesh's arrays cannot be used afterwards. A second call does nothing.

        Loggers get what was logged, within a few seconds; what they have not got then is lost, with a
        warning.
        """
        if self._controller is not None:
            try:
                await self.saver.aclose()
                await self.metrics.aclose()
            finally:
                self.metrics.abandon()
                self._progress.close()
                try:
                    await self._controller.aclose()
                finally:
                    await self._page.aclose()

    @property
    def is_closed(self) -> bool:
        """Whether the mesh has closed or failed, also in its start, so that nothing can be run on it."""
        return self._start_failed if self._controller is None else self._controller.is_closed

    @property
    def actors(self) -> tuple[ActorInfo, ...]:
        """The mesh's actors, one entry per actor with its `id`, `host`, `pid`, `devices` and `state`, and its
        `processes`.
        """
        return tuple(self._running().actors)

    def events(self, *, history: bool = True) -> Events:
        """Return an async iterator over the events of the mesh and its actors, as they happen.

        Any number of iterators may be open; one that is not read does not slow the mesh down. See
        docs/operations.md.

        Args:
            history: whether to begin with the oldest event that the mesh remembers; if False, begin with the
                next event that happens.

        Returns:
            An async iterator of `Event`s, which ends after the event `closed`.
        """
        return self._events.subscribe(history=history)

    @property
    def page_url(self) -> str | None:
        """The link to the live page of this run, with its token; None without `page=`, and before and after
        the mesh runs. Whoever has the link, on this machine, can look at the run and change nothing.
        """
        return self._page.url

    def write_page(self, path: str | os.PathLike[str]) -> None:
        """Write the page of this run, as it is now, to one HTML file that loads nothing; see docs/page.md.

        This also works without `page=`, and when the mesh has failed or is closed: the file then opens with
        the first cause.

        Args:
            path: the file. A file that exists is replaced at once, so that no reader sees half of one.

        Raises:
            OSError: the file cannot be written.
        """
        self._page.save(path)

    @property
    def _controller(self) -> Controller | None:
        return self._running.controller

    # ---------------------------------------------------------------- steps

    @mesh_options.only_known
    def distributed(
        self,
        fn: Callable,
        *,
        in_shardings: Any = None,
        out_shardings: Any = None,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        name: str | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
    ) -> DistributedStep:
        """Make a step for this mesh from an ordinary step function.

        The step is traced and compiled at its first run for each set of shapes, dtypes and static values. If
        the function calls `accumulate_grads`, its loops are pipelined.

        Args:
            fn: the step function.
            in_shardings: how the step's arguments are sharded over one actor's devices: a tree prefix of the
                arguments whose leaves are `PartitionSpec`s, `NamedSharding`s, tuples of logical names, and
                None (inferred).
            out_shardings: how the step's results are sharded, in the same form.
            donate_argnums: the positions of arguments whose buffers the step may reuse. Such an argument
                cannot be used afterwards, unless the step's `run` is cancelled. A host value is never
                changed.
            static_argnums: the positions of hashable arguments that are part of the program.
            name: the step's name in logs and errors; None for the name of `fn`.
            plan: a plan that was made for this function, its arguments and a mesh of this shape, or the path
                of its file, whose schedule and cut take the place of those in the function; None keeps the
                latter.

        Returns:
            The step, to be passed to `run` or `submit`.

        Raises:
            PlanError: the plan was made for another step or another mesh, or its file is damaged. For other
                arguments, the first call raises it, before anything is sent to an actor.
            OSError: the file of the plan cannot be read.
            TypeError: `fn` cannot be called, or `plan` is neither a plan nor a path.
            ValueError: an option names an argument that `fn` does not have.
        """
        if isinstance(plan, (str, os.PathLike)):
            plan = Plan.load(plan)
        if plan is not None:
            if not isinstance(plan, Plan):
                raise deliberate(
                    TypeError(
                        f"plan is {plan!r:.80}; pass what `mesh.plan` or `jaxpp_async.plan` returned, or the "
                        "path of its file"
                    )
                )
            plan.check_mesh(getattr(fn, "__name__", "step"), self.num_actors, self.spmd_mesh)
        options = make_options(
            fn,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            donate_argnums=donate_argnums,
            static_argnums=static_argnums,
            caller="mesh.distributed",
            schedule=None if plan is None else plan.schedule,
            plan=plan,
        )
        step = DistributedStep(self._runner, fn, options)
        step.__name__ = name or step.__name__
        return step

    @says_to_await
    async def run(self, step: DistributedStep, *args: Any) -> Any:
        """Run one step, and return when every actor has finished it.

        If a `run` is cancelled after its step was sent (also by Ctrl-C and `asyncio.timeout`), the actors
        still finish the step, and its effect is kept. If a donated argument has a new value among the step's
        results (a result of the same structure, shapes and dtypes), the argument's `RemoteArray`s then refer
        to that result, so that the same variables can be used with the next batch. Other results are lost. A
        warning in the log says so, and docs/failures.md says which result continues which argument. The next
        step waits until the cancelled one has ended; if this takes longer than 5 s, the event `waiting` is
        reported. Numpy arrays that were passed to the cancelled step may not have been sent completely yet.
        With `max_restarts=0`, do not change these arrays in place before another step has returned.

        Args:
            step: a step that `distributed` has made.
            args: the arguments of the step function.

        Returns:
            The result tree of the step function, of `RemoteArray`s.

        Raises:
            ActorError: an actor died or its code failed.
            ArrayError: an argument is not valid; no actor has run anything.
            UnsupportedError, StageError, ScheduleError, ShardingError: the step cannot be compiled; no actor
                has run anything.
        """
        with HiddenFrames():
            return await self._runner.run(self._checked(step), args)

    @says_to_await
    async def submit(self, step: DistributedStep, *args: Any) -> StepFuture:
        """Start one step, and return once it is compiled and started.

        If `max_inflight` steps are under way already, this method first waits until one of them has ended.

        Args:
            step: a step that `distributed` has made.
            args: the arguments of the step function.

        Returns:
            A future of the step, whose `outputs` may be passed to the next step immediately.

        Raises:
            ActorError: an actor or the mesh failed before the step was started.
            ArrayError: an argument is not valid; no actor has run anything.
            UnsupportedError, StageError, ScheduleError, ShardingError: the step cannot be compiled; no actor
                has run anything.
        """
        with HiddenFrames():
            return await self._runner.submit(self._checked(step), args)

    @says_to_await
    async def plan(
        self,
        step: DistributedStep,
        *args: Any,
        memory: int | str | None = None,
        costs: CostModel | None = None,
        microbatches: Sequence[int] | None = None,
        num_stages: int | None = None,
        batch_argnums: int | Sequence[int] | None = None,
        iterations: int | None = None,
        seed: int = 0,
    ) -> Plan:
        """Choose the cut, the schedule and the order with which a step is shortest on this mesh.

        Nothing is run on the actors, and other steps may run meanwhile. Run the plan with
        `mesh.distributed(fn, plan=plan)`. If the await is cancelled, the planning ends. See docs/planning.md.

        Args:
            step: a step that `distributed` has made, with a `pipeline_yield` behind each layer at which it
                may be cut.
            args: the arguments of a call; each array may be a `jax.ShapeDtypeStruct` instead.
            memory: the memory of each device that the step may use, in bytes or as text such as `"70GB"`;
                None for any.
            costs: the costs of tasks and transfers; None for the mesh's `device_model` if that is a
                `CostModel` with links, else for those measured in the last steps of this mesh.
            microbatches, num_stages, batch_argnums, iterations, seed: as for `jaxpp_async.plan`.

        Returns:
            The plan.

        Raises:
            PlanError: nothing fits into the memory, the step has no marks, or no steps were measured.
            MissingCost: the cost model has no cost for a task or a transfer.
            UnsupportedError, StageError, ShardingError: the step cannot be compiled.
        """
        with HiddenFrames():
            step = self._checked(step)
            recent = [] if costs is not None else [s for s in self._runner.recent if s.kind == "step"]
            planning = partial(
                self._planner.plan,
                step,
                argument_types(args, step.options.static_argnums),
                [s.timeline() for s in recent],
                costs=costs,
                memory=memory,
                microbatches=microbatches,
                num_stages=num_stages,
                batch_argnums=batch_argnums,
                iterations=iterations,
                seed=seed,
            )
            with self._progress.phase(f"planning {step.__name__}") as phase:

                def plan(tell: Callable[[str], None]) -> Plan:
                    return planning(on_progress=lambda text: (tell(text), phase.update(text)))

                found = await run_in_owned_thread(plan)
                phase.update("")
                return found

    def last_step_stats(self) -> list[StepStats]:
        """Return how each actor's time was spent in the last finished step, and how much memory its buffers
        used.

        The list has one entry per actor; it is empty before the first step has finished.
        """
        return [] if self._runner.last is None else self._runner.last.stats()

    def last_step_timeline(self) -> Timeline:
        """Return what each actor did in the last finished step, instruction by instruction, and when.

        Printing the timeline shows where the time went, by actor, by task and by cause; its `.write(path)`
        makes a trace for Perfetto. Actors stamp every instruction of every step, so nothing has to be
        switched on before. With several steps under way, `StepFuture.timeline()` returns the timeline of one
        of them. See docs/timeline.md.

        A step that failed or was aborted has no timeline; this method then still returns the timeline of the
        last step that finished. A step that a restart ran again has the timeline of the run that counted. The
        timeline can still be read when the mesh has failed or is closed.

        Returns:
            The timeline, with times in seconds since the step's start on this process's clock; its
            `clock_error_s` says how far off the times of actors on other hosts may be.

        Raises:
            MeshError: no step has finished yet.
        """
        if self._runner.last is None:
            raise MeshError(
                "no step has finished on this mesh; a timeline is there after the first `mesh.run`"
            )
        return self._runner.last.timeline()

    @contextlib.asynccontextmanager
    async def profile(self, folder: str | os.PathLike[str]) -> AsyncIterator[Path]:
        """Record XLA's profiles of all actors: `async with mesh.profile("profile"):` around some steps.

        The profiles have markers of steps and tasks, and open in xprof and in Perfetto; see docs/timeline.md.
        The recording ends behind the steps that are under way when the block is left. If an actor dies or is
        replaced meanwhile, a warning says so, and the profiles of the others are written.

        Args:
            folder: a new or empty folder. The files are in `actor-0/` and so on below it, or in `inline/`;
                only this user can read them.

        Yields:
            The folder, as an absolute path.

        Raises:
            MeshError: another profile of this mesh is being recorded, the folder has files, JAX's profiler is
                in use, or no profile could be written.
        """
        profiling = self._running().profiling
        path = await profiling.start(folder)
        try:
            yield path
        except BaseException:  # also a cancellation: the actors stop recording
            try:
                await profiling.stop()
            except MeshError as error:  # the error of the block is raised
                _LOG.warning("%s", error)
            raise
        await profiling.stop()

    def _checked(self, step: DistributedStep) -> DistributedStep:
        self._running()
        if not isinstance(step, DistributedStep) or step.runner is not self._runner:
            what = "a step of another mesh" if isinstance(step, DistributedStep) else "no step of this mesh"
            raise MeshError(f"{step!r} is {what}; make one with `mesh.distributed(fn)`")
        return step

    # ---------------------------------------------------------------- values

    @mesh_options.only_known
    @says_to_await
    async def put(self, tree: Any, like: Any = None) -> Any:
        """Put host values on actors.

        Args:
            tree: a tree of arrays, scalars and PRNG keys.
            like: where to put the values. With a pair `(step, argnum)`, the values are put where `step`,
                which must have been compiled already, keeps its argument number `argnum`. With a tree of
                `RemoteArray`s of the same structure as `tree`, each value is put where the corresponding
                `RemoteArray` is. With None, the values stay in this process until their first use.

        Returns:
            The tree, of `RemoteArray`s.

        Raises:
            ArrayError: `like` and `tree` do not have the same leaves, `like` is of another mesh, or a
                sharding in `like` does not divide its array.
            ActorError: an actor or the mesh failed.
        """
        with HiddenFrames():
            return await self._values.put(tree, like)

    @mesh_options.only_known
    @says_to_await
    async def fetch(self, tree: Any) -> Any:
        """Fetch the values of arrays from the actors.

        Args:
            tree: a tree of `RemoteArray`s; other leaves stay as they are.

        Returns:
            The tree, of numpy arrays (PRNG keys as JAX key arrays).

        Raises:
            ArrayError: an array was donated, deleted, lost to a failure, or belongs to another mesh.
            ActorError: an actor or the mesh failed.
        """
        with HiddenFrames():
            return await self._values.fetch(tree)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log numbers for a step, such as its loss, and return at once: they are kept in `metrics`, shown on
        the mesh's page, and given to the loggers in the order of these calls.

        Args:
            step: the number of the step, from 0.
            values: a mapping of names to numbers: Python's, numpy's, or arrays without dimensions of numpy,
                JAX or this mesh. A `RemoteArray` need not be awaited: it is fetched in the background, and
                may be donated or deleted afterwards.

        Raises:
            TypeError, ValueError: the step is no whole number, or a value is no single number.
            ArrayError: an array was donated, deleted, lost to a failure, or belongs to another mesh.
            MeshError: the mesh has not started.
            MeshClosedError: the mesh is closed.
        """
        with HiddenFrames():
            self._running()
            self.metrics.log(step, values)

    # ---------------------------------------------------------------- checkpoints

    @mesh_options.only_known
    @says_to_await
    async def save(
        self, path: CheckpointPath, tree: Any, *, wait: bool = True, on_progress: OnProgress | None = None
    ) -> Saving:
        """Save a tree of arrays, with the values that they have after all steps submitted before this call.

        Each actor writes the arrays that it has; an array on several actors is written once. The folder then
        contains this checkpoint. If anything fails, the folder keeps its previous content. Only one save is
        under way at a time; a further save waits until the current one has ended.

        Args:
            path: the checkpoint's folder, created if it is missing. Text, bytes or a `Path`.
            tree: a tree of `RemoteArray`s, host arrays, PRNG keys, and Python's bool, int, float, complex and
                str.
            wait: whether to return only when the save is complete. If False, return as soon as the actors
                have retained the arrays' values. The arrays may then be donated to steps while the files are
                written.
            on_progress: called with the `Saving` each time that a file has been written to the disk; None for
                no calls.

        Returns:
            The save, which is complete; with `wait=False` it may still be under way and can be awaited.

        Raises:
            CheckpointError: the save failed, or another save has replaced the folder's content meanwhile; the
                message names the file and the cause. Nothing of the failed save is left.
            ActorError: the mesh failed before the save was complete; a note names the checkpoint.
            ArrayError: an array was donated, deleted, or belongs to another mesh.
            MeshClosedError: the mesh is closed or has failed.
        """
        with HiddenFrames():
            return await self.saver.save(path, tree, wait=wait, on_progress=on_progress)

    @mesh_options.only_known
    @says_to_await
    async def restore(self, path: CheckpointPath, like: Any) -> Any:
        """Restore a tree that `save` saved. The saving mesh may have had another number of actors, and the
        step another schedule.

        Args:
            path: the checkpoint's folder, which this process and every actor must be able to read under this
                path.
            like: a tree that says what to restore and where to put it; its leaves have the same paths as in
                the saved tree. A pair `(step, argnum)` stands for the argument number `argnum` of `step`,
                which must have been compiled already; each array is put where the step keeps this argument. A
                `RemoteArray` asks for an array in the place of that `RemoteArray`. A `ShapeDtypeStruct` (as
                `jax.eval_shape` returns) asks for a `RemoteArray` whose value stays in this process until its
                first use. Numpy and JAX arrays and Python scalars ask for a value of their kind.

        Returns:
            The restored tree.

        Raises:
            CheckpointError: there is no checkpoint, or it is broken, or differs from `like` in its tree
                structure, a shape or a dtype; the message names the path.
            ArrayError: `like` has an array or a step of another mesh.
            ActorError: the mesh failed; a note names the checkpoint, which is as it was.
        """
        with HiddenFrames():
            controller = self._running()
            with self._progress.phase(f"restoring {shown(path)}"):
                return await restore(controller, self._values, path, like)


class _RunningController:
    """The controller of a mesh once it has started.

    Steps, arrays and saves hold this and not the mesh, so that a mesh that its user drops can end.
    """

    controller: Controller | None = None

    def __call__(self) -> Controller:
        """Return the controller.

        Raises:
            MeshError: the mesh has not started.
        """
        if self.controller is None:
            raise MeshError(
                "this mesh has not started; use it inside `async with RemoteMesh(...) as mesh:`, or write "
                "`mesh = await RemoteMesh(...).start()`"
            )
        return self.controller

    def end_dropped(self, name: str) -> None:
        """End the actors of a mesh that nothing refers to any more, and warn, unless they have ended.

        Args:
            name: the mesh, for the warning.
        """
        if self.controller is None or self.controller.is_closed:
            return
        _LOG.warning("%s is dropped while it runs; its actors end. `await mesh.aclose()` ends a mesh", name)
        self.controller.abandon()
