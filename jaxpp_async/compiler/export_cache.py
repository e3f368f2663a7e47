"""Export equal recipes (the operations of executables) only once.

Two recipes are equal if they differ only in their value ids. Everything else that `emit` reads must be equal:
names, types, shardings, constants' bytes, the parameters of every operation including nested jaxprs, and the
source lines that become part of an executable's bytes. An object that cannot be compared counts as equal only
to itself. A shared executable therefore has the same bytes as a second export would give, and any number of
identical stages cost one export.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types as python_types
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpp_async.compiler.export import Emitted, Target, emit
from jaxpp_async.compiler.ir import Lit, Recipe, Ref, Types, ValueType, literal_type
from jaxpp_async.jax_bridge import jax_config, private_api, tracebacks
from jaxpp_async.program.instructions import Aval, SpecEntry

Specs = Mapping[int, tuple[SpecEntry, ...]]


class ExportCache:
    """A cache of exported executables, keyed by their computations.

    All compiled forms of one step function, such as forms with different schedules, share one cache. Entries
    are only added, never removed.

    Attributes:
        count: the number of recipes (computations of executables) that were exported.
    """

    def __init__(self) -> None:
        self.count = 0
        self._known: dict[Hashable, Emitted] = {}
        self._without_key: list[tuple[_ExportContext, Recipe, Emitted]] = []

    def emit(
        self, recipes: Sequence[Recipe], types: Types, specs: Specs, target: Target
    ) -> tuple[Emitted, ...]:
        """Return one executable for each recipe (list of operations), and export equal recipes only once.

        Args:
            recipes: the recipes of one step.
            types, specs, target: as for `export.emit`, which makes each executable.
        """
        context = _ExportContext(types, specs, target, jax_config.trace_settings())
        # Keys cost a tenth of an export. A recipe that resembles no other needs none yet.
        resembling: dict[Hashable, list[int]] = defaultdict(list)
        for position, recipe in enumerate(recipes):
            resembling[_outline(recipe)].append(position)
        found: dict[int, Emitted] = {}
        is_first = not (self._known or self._without_key)
        for positions in resembling.values():
            if is_first and len(positions) == 1:
                (p,) = positions
                found[p] = self._export(context, recipes[p])
                self._without_key.append((context, recipes[p], found[p]))
            else:
                found.update((p, self._shared(context, recipes[p])) for p in positions)
        return tuple(found[p] for p in range(len(recipes)))

    def _shared(self, context: _ExportContext, recipe: Recipe) -> Emitted:
        while self._without_key:
            earlier, other, emitted = self._without_key.pop()
            self._known[earlier.key(other)] = emitted
        key = context.key(recipe)
        if key not in self._known:
            self._known[key] = self._export(context, recipe)
        return dataclasses.replace(self._known[key], name=recipe.name)

    def _export(self, context: _ExportContext, recipe: Recipe) -> Emitted:
        self.count += 1
        return emit(recipe, context.types, context.specs, context.target)


def _outline(recipe: Recipe) -> Hashable:
    """Return a key of a recipe (the operations of one executable) that is cheap to compute.

    Recipes with different outlines are never equal, so only recipes with equal outlines need a full key.
    """
    lists = recipe.inputs, recipe.outputs, recipe.slices, recipe.starts, recipe.accumulates
    return recipe.stem, tuple(map(len, lists)), tuple(op.name for op in recipe.ops)


def recipe_keys(
    recipes: Sequence[Recipe], types: Types, specs: Specs, target: Target, *, only_alike: bool
) -> tuple[Hashable, ...]:
    """Return one key for each recipe (the operations of one executable), by which equal recipes are found.

    Args:
        recipes: the recipes of one step.
        types, specs, target: as for `export.emit`.
        only_alike: whether recipes that are like no other of the step may have a key that is equal to no
            other, which is quicker to make.
    """
    context = _ExportContext(types, specs, target, jax_config.trace_settings())
    resembling = Counter(map(_outline, recipes))
    return tuple(
        _Identity(r) if only_alike and resembling[_outline(r)] == 1 else context.key(r) for r in recipes
    )


# ---------------------------------------------------------------- keys of recipes


@dataclass(frozen=True, eq=False)
class _ExportContext:
    """The data besides a recipe (the operations of one executable) that determines the executable.

    All recipes of one step share one such object.
    """

    types: Types
    specs: Specs
    target: Target
    config: Hashable  # JAX's settings when the recipes are emitted, since a recipe's key may be made later

    @functools.cached_property
    def _common(self) -> Hashable:
        rules = tuple(sorted((name, str(axes)) for name, axes in self.target.axis_rules.items()))
        return self.target.mesh, self.target.platform, rules, self.config

    def key(self, recipe: Recipe) -> Hashable:
        """Return a cache key of a recipe (the operations of one executable).

        Recipes have equal keys only if their executables have equal bytes.
        """
        if {f.name for f in dataclasses.fields(recipe)} != _KEYED_FIELDS:
            return _Identity(recipe)
        return self._common, _RecipeKey(self).key(recipe)


_KEYED_FIELDS = {"name", "inputs", "outputs", "ops", "slices", "index", "literals", "starts", "accumulates"}
"""The fields of `Recipe` that `_RecipeKey` knows. If `Recipe` has any other field, no two recipes share an
executable."""


class _RecipeKey:
    """A maker of the cache key of one recipe (the operations of one executable).

    In the key, value ids are replaced by numbers that count values in the order in which they are made.
    """

    def __init__(self, context: _ExportContext) -> None:
        self.context, self.contents = context, _ContentKeys()
        self.numbers: dict[int, int] = {}
        self.literals: dict[int, Lit] = {}

    def key(self, r: Recipe) -> Hashable:
        self.literals = r.literals
        make, read, boundary, key = self.make, self.read, self.boundary, self.contents.key
        inputs = tuple((make(v), boundary(v)) for v in r.inputs)
        index = r.index if r.index is None else read(r.index)
        slices = tuple((read(whole), make(part)) for whole, part in r.slices)
        starts = tuple(
            (s.aval, key(s.reduction), s.num_microbatches, make(s.result), boundary(s.result))
            for s in r.starts
        )
        ops = tuple(
            (op.name, key(op.run), tuple(map(read, op.inputs)), tuple(map(make, op.outputs))) for op in r.ops
        )
        accumulates = tuple(
            (read(a.accumulator), read(a.value), key(a.reduction), make(a.result)) for a in r.accumulates
        )
        outputs = tuple((read(ref), boundary(ref)) for ref in r.outputs)
        return r.stem, inputs, index, slices, starts, ops, accumulates, outputs

    def make(self, value: int) -> int:
        """Return the number that stands for a value in the key, and assign the next number to a new value.

        Args:
            value: the value id; -1 for a result that is not used.

        Returns:
            The number; -1 for a result that is not used.
        """
        return self.numbers.setdefault(value, len(self.numbers)) if value >= 0 else -1

    def read(self, ref: Ref) -> Hashable:
        if isinstance(ref, int) and ref not in self.numbers:
            ref = self.literals[ref]
        return self.contents.key(ref.value) if isinstance(ref, Lit) else self.numbers[ref]

    def boundary(self, ref: Ref) -> tuple[ValueType, Hashable]:
        """Return the type and sharding of an argument or a result of the executable, as a part of the key.

        Arguments and results are the values at the executable's boundary.
        """
        if isinstance(ref, Lit):
            return literal_type(ref), ()
        return self.context.types[ref], self.context.specs.get(ref, ())


# ---------------------------------------------------------------- keys of anything


@dataclass(frozen=True, eq=False)
class _Identity:
    """A key for an object that counts as equal only to itself; the key also keeps the object alive."""

    thing: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)


class _ContentKeys:
    """A maker of keys for the functions and parameters of one recipe's operations.

    A recipe lists the operations of one executable. JAX lowers a jaxpr object that occurs several times in a
    recipe only once, so the bytes depend on which jaxprs are the same object. The keys therefore number the
    jaxpr objects.
    """

    def __init__(self) -> None:
        self._jaxprs: dict[int, int] = {}
        self._open: list[Any] = []  # functions whose key is being made: one may close over itself

    def key(self, value: Any) -> Hashable:
        """Return a key of any value; two values share a key only if they are exported to the same bytes.

        A value that cannot be compared gets an `_Identity`, which equals no other value's key.
        """
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind is float:
            return kind, value.hex()  # 0.0 and -0.0 differ
        if kind in (tuple, list):
            return kind, tuple([self.key(v) for v in value])
        if (special := _special(kind)) is not None:
            return special(self, value)
        if hasattr(value, "dtype") and hasattr(value, "__array__"):
            return self.array(value)
        if dataclasses.is_dataclass(kind) and kind.__module__.startswith("jaxpp_async."):
            # A dataclass of this package is its type and its fields.
            return kind, tuple([self.key(getattr(value, f.name)) for f in dataclasses.fields(kind)])
        if kind.__module__.startswith("jax") and kind.__hash__ not in (object.__hash__, None):
            return kind, value  # JAX's own caches rely on the equality of these values, too
        return _Identity(value)

    # ---- JAX

    def equation(self, eqn: Any) -> Hashable:
        if eqn.effects:
            return _Identity(eqn)
        ignored = _NEVER_LOWERED.get(eqn.primitive.name, ())
        params = tuple((name, self.key(v)) for name, v in eqn.params.items() if name not in ignored)
        return _Identity(eqn.primitive), params, tracebacks.location(eqn), _Identity(eqn.ctx)

    def jaxpr(self, jaxpr: Any) -> Hashable:
        known = len(self._jaxprs)
        if (number := self._jaxprs.setdefault(id(jaxpr), known)) != known:
            return "jaxpr", number
        inner, consts = private_api.open_jaxpr(jaxpr)
        if inner is not jaxpr:
            return "closed", number, self.jaxpr(inner), self.key(consts)
        if jaxpr.effects:
            return _Identity(jaxpr)
        numbers: dict[Any, int] = {}

        def make(var: Any) -> Hashable:
            return numbers.setdefault(var, len(numbers)), var.aval

        def read(atom: Any) -> Hashable:
            is_literal = isinstance(atom, private_api.Literal)
            return (self.key(atom.val), atom.aval) if is_literal else numbers[atom]

        arguments = tuple(map(make, (*jaxpr.constvars, *jaxpr.invars)))
        eqns = tuple(
            (self.equation(e), tuple(map(read, e.invars)), tuple(map(make, e.outvars))) for e in jaxpr.eqns
        )
        names = self.key(tracebacks.debug_names(jaxpr))
        return "jaxpr", number, self.key(consts), arguments, eqns, tuple(map(read, jaxpr.outvars)), names

    def array(self, value: Any) -> Hashable:
        if private_api.is_key_dtype(value.dtype):
            return _Identity(value)
        return type(value), jax.typeof(value), np.asarray(value).tobytes()

    # ---- Python

    def function(self, value: Any) -> Hashable:
        """Return the key of a Python function: its code object, its defaults and the values it closes over.

        Functions with equal keys compute the same.
        """
        if any(value is f for f in self._open):
            return "itself", next(i for i, f in enumerate(self._open) if value is f)
        self._open.append(value)
        try:
            cells = tuple([self.cell(c) for c in value.__closure__ or ()])
            defaults = self.key((value.__defaults__, value.__kwdefaults__))
            return _Identity(value.__code__), _Identity(value.__globals__), defaults, cells
        finally:
            self._open.pop()

    def cell(self, cell: Any) -> Hashable:
        try:
            return self.key(cell.cell_contents)
        except ValueError:  # the cell is empty so far
            return _Identity(cell)

    def partial(self, value: Any) -> Hashable:
        if value.func is private_api.bind_eqn and not value.keywords and len(value.args) == 1:
            return self.equation(value.args[0])
        return "partial", self.key(value.func), self.key(value.args), self.key(value.keywords)

    def method(self, value: Any) -> Hashable:
        return "method", self.key(value.__self__), self.key(value.__func__)

    def mapping(self, value: Any) -> Hashable:
        return dict, tuple((self.key(k), self.key(v)) for k, v in value.items())

    def named(self, value: Any) -> Hashable:
        """Return the key of a tuple subclass, such as a named tuple of dimension numbers."""
        return type(value), tuple(map(self.key, value))

    def same(self, value: Any) -> Hashable:
        return type(value), value


_PLAIN = frozenset((int, bool, str, bytes, type(None)))

_SPECIAL: dict[type, Callable[[_ContentKeys, Any], Hashable]] = {
    functools.partial: _ContentKeys.partial,
    private_api.JaxprEqn: _ContentKeys.equation,
    private_api.ClosedJaxpr: _ContentKeys.jaxpr,
    private_api.Jaxpr: _ContentKeys.jaxpr,
    Aval: _ContentKeys.same,
    np.dtype: _ContentKeys.same,
    enum.Enum: _ContentKeys.same,
    python_types.FunctionType: _ContentKeys.function,
    python_types.MethodType: _ContentKeys.method,
    dict: _ContentKeys.mapping,
    tuple: _ContentKeys.named,
}


@functools.lru_cache(maxsize=1024)
def _special(kind: type) -> Callable[[_ContentKeys, Any], Hashable] | None:
    """Return the method that makes the key of values of a type, or None if no method is for that type."""
    return next((method for each, method in _SPECIAL.items() if issubclass(kind, each)), None)


_NEVER_LOWERED = {
    # These parameters are rules of differentiation, which a task no longer needs.
    "custom_jvp_call": ("jvp_jaxpr_fun",),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees"),
}
