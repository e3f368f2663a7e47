"""Cases: training steps that people write, small."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp_async as jpp
from tests.torture.blocks import chain, cut, dense, descended, error
from tests.torture.registry import array, batch, gradients_of, loss, step, weights


def experts():
    params = [{"router": array(k, 4, 3), "up": array(10 + k, 3, 4, 4)} for k in range(3)]
    return params, batch()


def routed(params, x):
    """Each row goes to the best two of three experts; and the loss that balances them."""
    scores = jax.nn.softmax(x @ params["router"])
    values, chosen = jax.lax.top_k(scores, 2)
    dispatch = jnp.sum(jax.nn.one_hot(chosen, 3) * values[..., None], axis=1)  # (rows, experts)
    made = jnp.tanh(jnp.einsum("rw,ewv->erv", x, params["up"]))
    load = jnp.mean(jax.nn.one_hot(chosen[:, 0], 3), 0)
    return jnp.einsum("re,erv->rv", dispatch, made), 3 * jnp.sum(load * jnp.mean(scores, 0)), load


@step(stages=3, make_args=experts)
def mixture_of_experts_with_a_loss_from_each_stage(pipe, params, batches):
    def fn(params, mb):
        x, balance, loads = mb["x"], 0.0, []
        for k, layer in enumerate(params):
            y, aux, load = routed(layer, cut(x) if k else x)
            x, balance = x + y, balance + aux
            loads.append(load)
        return error(x, mb) + 0.01 * balance, {"balance": balance, "loads": loads}

    def of_one(mb):
        (value, metrics), grads = jax.value_and_grad(fn, has_aux=True)(params, mb)
        return grads, value, metrics

    reduce = (jpp.Sum(), jpp.Stack(), jpp.Mean())
    grads, losses, metrics = jpp.accumulate_grads(of_one, pipe(3), reduce=reduce)(batches)
    return descended(params, grads), losses, metrics


@step(stages=4, make_args=lambda: (weights(2), weights(6)[2:4], batch()))
def teacher_and_student(pipe, student, teacher, batches):
    """Two models one behind the other; the teacher is frozen and follows the student slowly."""

    def of_one(mb):
        target = jax.lax.stop_gradient(cut(chain(teacher, mb["x"])))

        def fn(student):
            x = cut(dense(mb["x"] + 0 * target, student[0])) @ student[1]
            return jnp.mean((x - target) ** 2)

        value, grads = jax.value_and_grad(fn)(student)
        return grads, value

    grads, losses = jpp.accumulate_grads(of_one, pipe(4))(batches)
    student = descended(student, grads)
    return student, jax.tree.map(lambda t, s: 0.99 * t + 0.01 * s, teacher, student), losses


@loss(stages=2, make_args=lambda: ({"student": weights(2), "teacher": weights(4)[2:]}, batch()))
def distillation_stage_by_stage(w, mb):
    """The teacher runs beside the student in the same stages."""
    teacher = jax.lax.stop_gradient(w["teacher"])
    s, t = dense(mb["x"], w["student"][0]), dense(mb["x"], teacher[0])
    (s, t), first = cut((s, t)), jnp.mean((s - t) ** 2)
    return first + jnp.mean((s @ w["student"][1] - t @ teacher[1]) ** 2)


@step(stages=3, make_args=lambda: (weights(3), np.float32(16), batch()))
def loss_scaling_that_skips_bad_steps(pipe, w, scale, batches):
    def fn(w, mb):
        return error(chain(w, mb["x"]), mb) * scale

    grads, losses = gradients_of(fn, 3)(pipe, w, batches)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in grads]))
    new = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g / scale, p), w, grads)
    return new, jnp.where(finite, scale * 2, scale / 2), losses / scale


def adam_state():
    params = {"layers": weights(3), "gain": np.ones(4, np.float32)}
    return params, jax.device_get(ADAM.init(params)), batch()


ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.cosine_decay_schedule(0.1, 5)))


@step(stages=3, make_args=adam_state, rtol=1e-3)  # Adam divides by tiny gradients: rounding grows
def adamw_with_clipping_and_a_schedule(pipe, params, state, batches):
    def fn(params, mb):
        return error(chain(params["layers"], mb["x"]) * params["gain"], mb)

    grads, losses = gradients_of(fn, 3)(pipe, params, batches)
    updates, state = ADAM.update(grads, state, params)
    return optax.apply_updates(params, updates), state, losses


@step(stages=2)
def two_optimizer_steps_in_one_step(pipe, w, batches):
    def fn(w, mb):
        return error(chain(w, mb["x"]), mb)

    w = w[:2]
    state = optax.sgd(0.1, momentum=0.9).init(w)
    for _ in range(2):
        grads, _ = gradients_of(fn, 2)(pipe, w, batches)
        updates, state = optax.sgd(0.1, momentum=0.9).update(grads, state, w)
        w = optax.apply_updates(w, updates)
    return w, state


@step(stages=2, make_args=lambda: (weights(2), array(95, 4), batch()))
def diffusion_with_random_times(pipe, w, levels, batches):
    def of_one(mb, i):
        key = jax.random.fold_in(jax.random.key(0), i)
        level = levels[jax.random.randint(key, (3,), 0, 4)][:, None]
        noise = jax.random.normal(key, (3, 4))

        def fn(w):
            x = cut(dense(mb["x"] * (1 - level) + noise * level, w[0]))
            return jnp.mean((x @ w[1] + level - noise) ** 2)

        value, grads = jax.value_and_grad(fn)(w)
        return grads, value

    return jpp.accumulate_grads(of_one, pipe(2), pass_index=True)(batches)


@step(stages=2)
def policy_gradient_with_a_value_baseline(pipe, w, batches):
    def fn(w, mb):
        hidden = cut(dense(mb["x"], w[0]))
        logits, values = hidden @ w[1], (hidden @ w[2])[:, 0]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), mb["tokens"][:, None], 1)[:, 0]
        advantage = jax.lax.stop_gradient(mb["y"][:, 0] - values)
        entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits))
        return jnp.mean(-chosen * advantage + (mb["y"][:, 0] - values) ** 2) - 0.01 * entropy

    return gradients_of(fn, 2)(pipe, w[:3], batches)


@loss(stages=3)
def attention_with_norms_and_residuals(w, mb):
    def norm(x):
        return (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-3)

    x = mb["x"]
    for k in range(3):
        h = norm(cut(x) if k else x)
        x = x + jax.nn.softmax(h @ w[k] @ h.T) @ h
        x = x + jax.nn.gelu(norm(x) @ w[3 + k])
    return error(x, mb)


@step(stages=2)
def weights_normalized_before_the_loop(pipe, w, batches):
    """Weight normalization: the gradient goes through work that is done once, by the chain rule in the user's
    hands."""

    def normalized(w):
        return [x / jnp.sqrt(jnp.sum(x**2)) for x in w]

    unit, pullback = jax.vjp(normalized, w[:2])
    grads, losses = gradients_of(lambda w, mb: error(chain(w, mb["x"]), mb), 2)(pipe, unit, batches)
    return pullback(grads)[0], losses
