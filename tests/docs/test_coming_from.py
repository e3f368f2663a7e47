"""The pages for users of other systems: their right columns run, and the tests that they name exist.

Each thing that cost JaxPP's largest public user time (marin-community/marin#7024) is a row of
`docs/howto/from_jaxpp.md`. Tests of rows that no other file tests are here.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from paths import ROOT, TESTS
from planning import plan_step
from resources import inspect_actors

import jaxpp_async as jpp
from jaxpp_async.testing import assert_close

HOWTO = ROOT / "docs" / "howto"
PAGES = ("from_jaxpp", "from_torch_pipelining", "from_maxtext")

NUM_LAYERS, DIM, ROWS = 4, 8, 4


def drawn(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32) * shape[-1] ** -0.5


def pasted(name):
    """The names of a page's program, as a reader pastes it: nothing is imported that the page does not."""
    blocks = re.findall(
        r"^```python\n(.*?)^```", (HOWTO / f"{name}.md").read_text(), re.DOTALL | re.MULTILINE
    )
    names = {"__name__": name}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    assert sum("asyncio.run(main())" in block for block in blocks) == 1
    return names


def expected(page, *state, batches):
    """The state and last loss of the page's step under plain `jax.jit`."""
    step = jax.jit(page["train_step"])
    for batch in batches:
        *state, loss = step(*state, batch)
    return jax.device_get((*state, loss))


# ---------------------------------------------------------------- the right columns


async def test_from_jaxpp(capsys):
    page = pasted("from_jaxpp")
    *state, losses = await page["main"](launcher="inline")
    params = page["make_params"]()
    found = expected(page, params, page["optimizer"].init(params), batches=[page["BATCH"]] * 2)
    assert losses.shape == (6,) and str(losses) in capsys.readouterr().out
    assert_close((*state, losses), found)


async def test_from_torch_pipelining(remote_mesh, tmp_path):
    page = pasted("from_torch_pipelining")
    batch = page["make_batch"]()
    result = await page["main"](tmp_path / "saved", launcher="inline")
    assert_close(result, expected(page, page["make_state"](), batches=[batch] * 2))

    csv = tmp_path / "schedule.csv"  # as `_dump_csv(path, format="compute_only")` writes Schedule1F1B
    csv.write_text("0F0,0F1,,0B0,0F2,0B1,0F3,0B2,,0B3\n,1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3,\n")
    mesh = await remote_mesh(2, launcher="inline")
    step = mesh.distributed(page["make_train_step_from_csv"](csv))
    restored = await mesh.restore(tmp_path / "saved", jax.eval_shape(page["make_state"]))
    got = await mesh.fetch(await mesh.run(step, restored, batch))
    assert_close(got, jax.device_get(jax.jit(page["train_step"])(result[0], batch)))

    params, opt_state = jax.device_get(page["make_state"]())
    weights = {f"layers.{k}.weight": w.T for k, w in enumerate(params["layers"])}
    weights |= {"embed.weight": params["embed"], "head.weight": params["head"].T}
    started = await page["make_state_from"](step, weights)
    assert started[0]["head"].actors == (1,)
    assert_close(await mesh.fetch(started), (params, opt_state))


async def test_from_maxtext():
    """The stacked layers live in parts, two on each actor, and each part is split over its devices."""
    page = pasted("from_maxtext")
    result, report = await page["main"](launcher="inline")
    assert_close(result, expected(page, page["make_state"](), batches=[page["make_batch"]()] * 2), atol=1e-5)
    split = [place for place in report.inputs if "fsdp" in place.type and place.name.startswith("state")]
    assert len(split) == 3 * 4  # parameters and two moments
    (up,) = [place for place in split if place.name == "state[0]['layers']['up']"]
    assert [(part.name[-5:], part.actors) for part in up.parts] == [("[0:2]", (0,)), ("[2:4]", (1,))]
    assert all(t.size_bytes < 2 * up.size_bytes / NUM_LAYERS for t in report.transfers if t.in_loop)


# ---------------------------------------------------------------- the pages themselves


def named_tests(name):
    text = (HOWTO / f"{name}.md").read_text(encoding="utf-8")
    return re.findall(r"`tests/(\w+/test_\w+\.py(?:::\w+)?)`", text)


def test_tests_that_the_pages_name_exist():
    names = [test for page in PAGES for test in named_tests(page)]
    assert len(names) > 20
    for name in names:
        file, _, test = name.partition("::")
        text = (TESTS / file).read_text(encoding="utf-8")
        assert not test or re.search(rf"def {test}\(", text), name


def test_each_row_of_the_diary_has_a_test_or_says_why_it_cannot_happen():
    text = (HOWTO / "from_jaxpp.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.partition("| there |")[2].splitlines()[2:]]
    assert len(rows) > 18
    assert [row for row in rows if "::" not in row[-1] and "cannot happen" not in row[1]] == []


@pytest.mark.parametrize("name", PAGES)
def test_pages_have_two_columns_and_the_version_of_the_other_system(name):
    text = (HOWTO / f"{name}.md").read_text(encoding="utf-8")
    columns = re.findall(r"^::::\{grid\} 1 1 2 2\n(.*?)^::::$", text, re.DOTALL | re.MULTILINE)
    assert len(columns) >= 2
    for block in columns:
        theirs, ours = re.findall(r"^:::\{grid-item\}\n(.*?)^:::$", block, re.DOTALL | re.MULTILINE)
        assert max(map(len, block.splitlines())) <= 64, "wider code is cut off"
        assert "```python" not in theirs and ours.startswith("```python")
    assert re.search(r"\d\d\.\d\d|2\.\d\d|20\d\d", text.partition("##")[0])


def test_schedules_that_the_pages_name_exist():
    names = {
        name
        for page in PAGES
        for line in (HOWTO / f"{page}.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
        for name in re.findall(r"`(?:jpp\.)?([A-Z]\w*1\w*|\w*Bubble\w+|LoopedBFS|GPipe|DualPipeV)\(n", line)
    }
    theirs = {"Interleaved1F1B", "DualPipeV", "ZeroBubble", "InterleavedGPipe"}
    assert len(names) > 6 and [name for name in names - theirs if not hasattr(jpp, name)] == []


# ---------------------------------------------------------------- the diary


SCHEDULES = {"DualPipeV": jpp.DualPipeV(4), "ZeroBubbleH1": jpp.ZeroBubbleH1(4)}


def chain_loss(params, mb):
    x = mb
    for index, weight in enumerate(params):
        x = jnp.tanh(x @ weight)
        x = jpp.pipeline_yield(x) if index < len(params) - 1 else x
    return jnp.mean(x**2)


def clipped_adam():
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2), optax.ema(0.9))


def work_after_the_loop(schedule):
    """Norms of all gradients, a skipped step, a moving average, a second loop, integers, a sorted metric."""
    optimizer = optax.apply_if_finite(clipped_adam(), 2)

    def step(state, batch):
        params, opt_state, counts = state

        def grads_of(mb):
            loss, grads = jax.value_and_grad(chain_loss)(params, mb)
            return grads, loss

        grads, losses = jpp.accumulate_grads(grads_of, schedule)(batch)
        norms = jnp.sort(jnp.stack([jnp.linalg.norm(g) for g in grads]))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        after = jpp.accumulate_grads(lambda mb: chain_loss(params, mb), schedule, reduce=jpp.Stack())(batch)
        counts = counts.at[jnp.argmax(losses)].add(1)
        worst = jax.lax.cond(norms[-1] > 1, after.max, losses.max)
        return (params, opt_state, counts), {"norms": norms, "after": after, "worst": worst}

    params = [drawn(DIM, DIM) for _ in range(4)]
    return step, (params, jax.device_get(optimizer.init(params)), np.zeros(8, np.int32)), drawn(8, ROWS, DIM)


@pytest.mark.parametrize("name", SCHEDULES)
async def test_any_work_after_the_loop_is_placed(name, remote_mesh):
    step, state, batch = work_after_the_loop(SCHEDULES[name])
    mesh = await remote_mesh(2, launcher="inline")
    compiled = mesh.distributed(step)
    got = await mesh.fetch(await mesh.run(compiled, state, batch))
    assert_close(got, jax.device_get(jax.jit(step)(state, batch)))
    report = (await compiled.compile(state, batch)).report()
    weight = state[0][0].nbytes
    assert all(t.size_bytes < weight for t in report.transfers if not t.in_loop)


NUM_EXPERTS, HIDDEN = 4, 16


def experts_of_a_device(x, logits, up, down):
    """Experts that drop no token, as in the diary: gather the tokens, compute those of this device's experts
    by grouped products, add up and scatter."""
    x, logits = (jax.lax.all_gather(a, "expert", tiled=True) for a in (x, logits))
    chosen, num_here = jnp.argmax(logits, axis=-1), up.shape[0]
    first = jax.lax.axis_index("expert") * num_here
    place = jnp.where((chosen >= first) & (chosen < first + num_here), chosen - first, num_here)
    order, sizes = jnp.argsort(place), jnp.bincount(place, length=num_here + 1)[:num_here].astype(jnp.int32)
    made = jax.lax.ragged_dot(jax.nn.gelu(jax.lax.ragged_dot(x[order], up, sizes)), down, sizes)
    made = jnp.where((jnp.arange(len(order)) < sizes.sum())[:, None], made, 0)
    made = jnp.zeros_like(made).at[order].set(made) * jax.nn.softmax(logits).max(axis=-1, keepdims=True)
    counts = jnp.zeros(NUM_EXPERTS, jnp.int32).at[first + jnp.arange(num_here)].set(sizes)
    return jax.lax.psum_scatter(made, "expert", tiled=True), jax.lax.psum(counts, "expert")


def step_of_the_diary(params, batch):
    experts = jax.shard_map(experts_of_a_device, in_specs=P("expert"), out_specs=(P("expert"), P()))

    def loss(params, x):
        balance, counts = 0.0, []
        for index, layer in enumerate(params):
            logits = x @ layer["router"]
            y, of_layer = experts(x, logits, layer["up"], layer["down"])
            x, balance = x + y, balance + jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
            counts.append(of_layer)
            x = jpp.pipeline_yield(x) if index < len(params) - 1 else x
        return jnp.mean(x**2) + 0.01 * balance, counts

    def of_microbatch(mb):
        (value, counts), grads = jax.value_and_grad(loss, has_aux=True)(params, mb)
        return grads, value, counts

    reduce = (jpp.Sum(), jpp.Stack(), jpp.Sum())
    return jpp.accumulate_grads(of_microbatch, SCHEDULES["DualPipeV"], reduce=reduce)(batch)


async def test_experts_that_drop_no_token_run_beside_transfers(remote_mesh):
    """Collectives in every task, transfers at the same time, two steps under way."""
    shapes = {
        "router": (DIM, NUM_EXPERTS),
        "up": (NUM_EXPERTS, DIM, HIDDEN),
        "down": (NUM_EXPERTS, HIDDEN, DIM),
    }
    params = [{name: drawn(*shape) for name, shape in shapes.items()} for _ in range(4)]
    batch = drawn(8, 2 * ROWS, DIM)
    spec = [{"router": P(), "up": P("expert"), "down": P("expert")}] * 4
    mesh = await remote_mesh(2, spmd_mesh={"expert": 2})
    step = mesh.distributed(step_of_the_diary, in_shardings=(spec, P(None, "expert")))
    futures = [await mesh.submit(step, params, batch) for _ in range(3)]
    with jax.set_mesh(jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Auto,))):
        expected = jax.device_get(jax.jit(step_of_the_diary)(params, batch))
    for future in futures:
        got = await mesh.fetch(future.outputs)
        assert_close(got, expected)
        assert [counts.tolist() for counts in got[2]] == [counts.tolist() for counts in expected[2]]
        assert {counts.sum() for counts in got[2]} == {batch[..., 0].size}


def adam_step(schedule):
    optimizer = clipped_adam()

    def step(state, batch):
        params, opt_state = state
        loop = jpp.accumulate_grads(lambda mb: jax.grad(chain_loss)(params, mb), schedule)
        updates, opt_state = optimizer.update(loop(batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step, optimizer


def test_counters_of_the_optimizer_are_on_every_actor_that_uses_them():
    step, optimizer = adam_step(SCHEDULES["DualPipeV"])
    params = [jax.ShapeDtypeStruct((DIM, DIM), jnp.float32)] * 4
    state = params, jax.eval_shape(optimizer.init, params)
    done = plan_step(step, state, jax.ShapeDtypeStruct((8, ROWS, DIM), jnp.float32), actors=2, donate=(0,))
    names, inputs = done.traced.arg_names, done.placed.graph.inputs
    counts = [place.actors for name, place in zip(names, inputs, strict=False) if name.endswith("count")]
    assert len(counts) == 2 and set(counts) == {(0, 1)}


async def test_nothing_is_compiled_once_a_step_is_compiled(remote_mesh):
    """So no actor compiles while another waits for it in a transfer."""
    mesh = await remote_mesh(2, launcher="inline")
    step, optimizer = adam_step(SCHEDULES["DualPipeV"])
    params = [drawn(DIM, DIM) for _ in range(4)]
    state, batch = (params, jax.device_get(optimizer.init(params))), drawn(8, ROWS, DIM)

    async def compilations():
        return sum(n["compilations"] for n in (await inspect_actors(mesh._controller)).values())

    step = mesh.distributed(step, donate_argnums=0)
    await step.compile(state, batch)
    compiled = await compilations()
    for _ in range(2):
        state = await mesh.run(step, state, batch)
    assert await compilations() == compiled > 0


def test_twice_the_microbatches_are_faster_and_take_no_memory():
    """A folded pipeline of eight GPUs and sixteen stages, as in the diary, simulated before it runs."""
    schedule, width = jpp.DualPipeV(16), 2048

    def step(params, batch):
        loop = jpp.accumulate_grads(lambda mb: jax.grad(chain_loss)(params, mb), schedule)
        return jax.tree.map(lambda p, g: p - g, params, loop(batch))

    found = {}
    for num_microbatches in (16, 32):
        params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 16
        batch = jax.ShapeDtypeStruct((num_microbatches, 4096, width), jnp.float32)
        done = plan_step(step, params, batch, actors=8, donate=(0,))
        costs = jpp.CostModel.from_device("h100-sxm")
        simulation = jpp.simulate(SimpleNamespace(compiled=done, works=done.works), costs)
        found[num_microbatches] = (num_microbatches / simulation.step_s.p50, max(simulation.peak_bytes))
    faster = found[32][0] / found[16][0]
    assert 1.02 < faster < 1.25
    assert found[32][1] == found[16][1]
