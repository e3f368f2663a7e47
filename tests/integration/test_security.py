"""Hostile input has no effect: lines of host agents, names of hosts, code in data. These tests start no
actor."""

from __future__ import annotations

import ast
import json
import random
import re
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import TESTS

import jaxpp_async
from jaxpp_async.actors import __main__ as actor_main
from jaxpp_async.actors.heartbeat import Heartbeat
from jaxpp_async.errors import MeshError
from jaxpp_async.launch import LaunchSpec
from jaxpp_async.launch import host_agent_protocol as kp
from jaxpp_async.launch.hosts import Host, ProcessPlacement, Settings, parse_hostfile
from jaxpp_async.launch.slurm import srun_command
from jaxpp_async.launch.spawn import ActorRequest
from jaxpp_async.launch.ssh import ssh_command
from jaxpp_async.protocol.actor_info import Position
from jaxpp_async.protocol.frames import Identity, Wire, derive_keys
from jaxpp_async.protocol.line_protocol import RECORD

PACKAGE = Path(jaxpp_async.__file__).parent

# ---------------------------------------------------------------- host agents

SECRET = "ab" * 32
REQUEST = ActorRequest("/py", {"A": "1"}, {"secret": SECRET, "process_id": 0}, 1, 2, (0, 1))
ORDERS = [kp.StartActor("0.1", REQUEST, "/"), kp.SignalActor("0.1", 9), kp.Close()]
RECORDS = [
    kp.AgentHello("h", 1, "/py", {"jax": None, "jaxlib": "1"}),
    kp.ActorStarted("0.0", 7),
    kp.StartFailed("0.0", "no"),
    kp.OutputLine("0.0", "caf\u00e9 \x1e"),
    kp.ActorEnded("0.0", -9, Position(1, 2, 3, True, False)),
    kp.ActorEnded("0.0", 0, None),
]
HOSTILE = [None, -1, 2**70, 1e400, "", "x" * 1000, [], {}, [[[]]], True, {"a": {}}, "\ud800", "\0", 0.5]


@pytest.mark.parametrize("record", RECORDS)
def test_records_come_back_as_they_were(record):
    assert kp.read_record(kp.write_record(record).decode().rstrip("\n")) == record


WRONG_FIELDS = [
    ["AgentHello", 5, 1, "", {}],
    ["AgentHello", "h", 1, "", None],
    ["AgentHello", "h", 1, "", {"jax": 1}],
    ["AgentHello", "h", 1, ""],
    ["AgentHello", ["h", 1, "", {}]],
    ["ActorStarted", ["0.0"], 1],
    ["ActorStarted", "0.0", "1"],
    ["OutputLine", "0.0", 5],
    ["OutputLine", "0.0", "", 1],
    {"type": "OutputLine", "key": "0.0", "text": ""},
    ["ActorEnded", "0.0", 1, "abcde"],
    ["ActorEnded", "0.0", 1, [1, 2]],
    ["ActorEnded", "0.0", None, None],
    ["StartActor"],
    ["Close"],
    [["OutputLine"], "0.0", ""],
    [{}, {}],
    ["OutputLine", {}],
    {"OutputLine": 1},
    5,
]


@pytest.mark.parametrize("values", WRONG_FIELDS, ids=str)
def test_records_with_wrong_fields(values):
    with pytest.raises(ValueError, match="no message of a host agent"):
        kp.read_record(RECORD + json.dumps(values))


@pytest.mark.parametrize("text", ["[" * 100_000, '["Line", ' + '{"a":' * 50_000, "1" * 5000, "NaN", '"', ""])
def test_records_that_are_no_json(text):
    with pytest.raises(ValueError, match="no message of a host agent"):
        kp.read_record(RECORD + text)
    with pytest.raises(ValueError, match="no message of a host agent"):
        kp.read_order((text or "[").encode())


@pytest.mark.parametrize("signum", [-1, 0, 65, 2**70, "9", None, 9.0, True])
def test_signals_that_are_none(signum):
    with pytest.raises(ValueError, match="no message of a host agent"):
        kp.read_order(json.dumps(["SignalActor", "0", signum]).encode())


def test_mutated_lines_are_read_or_refused():
    rng, ends = random.Random(0), {"read": 0, "refused": 0}
    lines = [(kp.read_order, kp.write_order(order)) for order in ORDERS]
    lines += [
        (lambda line: kp.read_record(line.decode(errors="replace")), kp.write_record(r)) for r in RECORDS
    ]
    for _ in range(3000):
        read, line = rng.choice(lines)
        data: Any = _mutated_json(line, rng) if rng.random() < 0.5 else bytearray(line.rstrip(b"\n"))
        if isinstance(data, bytearray):
            for _ in range(rng.randint(1, 3)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            message = read(bytes(data))
        except ValueError as error:
            assert SECRET not in str(error)
            ends["refused"] += 1
            continue
        ends["read"] += 1
        if isinstance(message, kp.StartActor):
            assert isinstance(message.request, ActorRequest) and message.request.environment()
        elif isinstance(message, kp.ActorEnded):
            assert message.position is None or isinstance(message.position, Position)
        assert message is None or hash(getattr(message, "key", "")) is not None
    assert min(ends.values()) > 300


def _mutated_json(line: bytes, rng: random.Random) -> bytes:
    mark, text = (line[:1], line[1:]) if line.startswith(RECORD.encode()) else (b"", line)
    values = json.loads(text)
    here: Any = values
    while here:
        key = rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
        if not isinstance(here[key], dict | list) or rng.random() < 0.5:
            if rng.random() < 0.2:
                del here[key]
            else:
                here[key] = rng.choice(HOSTILE)
            break
        here = here[key]
    return mark + json.dumps(values).encode()


# ---------------------------------------------------------------- hosts and shells

OPTIONS_IN_DISGUISE = [
    "-oProxyCommand=touch x",
    "--",
    "-l",
    "a b",
    "a;b",
    "a$(b)",
    "a`b`",
    "a|b",
    "a\nb",
    "a'b",
    "a\0b",
    "",
]


@pytest.mark.parametrize("word", OPTIONS_IN_DISGUISE, ids=ascii)
def test_names_of_hosts_and_users_are_names(word):
    with pytest.raises(MeshError, match="is no host name"):
        Host(word)
    with pytest.raises(MeshError, match="is no user name"):
        Host("a", user=word)
    with pytest.raises(MeshError, match="give a network device"):
        Settings(interface=word)
    with pytest.raises(MeshError):
        parse_hostfile(f'"{word}"')


@pytest.mark.parametrize(
    "settings", [{"env": {"A": "x\0y"}}, {"env": {"A B": ""}}, {"env": {"-x": ""}}, {"env": {"A=B": ""}}]
)
def test_environments_are_environments(settings):
    with pytest.raises(MeshError, match="env has"):
        Settings(**settings)


@pytest.mark.parametrize("python", ["", "-c", "a\0b"])
def test_interpreters_are_paths(python):
    with pytest.raises(MeshError, match="give the path of an interpreter"):
        Settings(python=python)


@pytest.mark.parametrize("cpus", [(), (-1,), (1 << 16,), (1 << 70,)])
def test_cpus_are_numbers_of_cpus(cpus):
    with pytest.raises(MeshError, match="give CPU numbers"):
        Settings(cpus=cpus)


HOSTILE_FOLDERS = [
    "two words",
    "it's",
    'a "quote"',
    "a;touch injected",
    "$(touch injected)",
    "`touch injected`",
    "a&b|c",
    "*",
    "!x",
    "line\nbreak",
]


@pytest.mark.parametrize("folder", HOSTILE_FOLDERS, ids=ascii)
def test_the_shell_there_runs_the_interpreter_and_nothing_else(tmp_path, folder):
    python = tmp_path / folder / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s|" ran "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    command = ssh_command(Host("n1"), [str(python), "-m", "agent", "1; touch injected"])
    assert command[-2] == "n1" and command[-3] == "--"  # all that follows is no option
    shell = ["sh", "-c", command[-1]]
    done = subprocess.run(shell, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=10)
    assert done.stdout.splitlines()[-1] == "ran|-m|agent|1; touch injected|", done
    assert not (tmp_path / "injected").exists()


def test_slurm_gets_no_shell_and_no_option():
    command = srun_command(ProcessPlacement(Host("n1"), 0, 1), ["/a b/python", "-m", "x;y"], (23,))
    assert command[-3:] == ["/a b/python", "-m", "x;y"] and "--nodelist=n1" in command


@pytest.mark.parametrize(
    "values", [{"A": "two\nlines"}, {"A": '"; touch x'}, {"A": "\x1e[]"}, {"PATH": "$(x)"}, {"A": "\ud800"}]
)
def test_values_travel_as_data(values):
    request = ActorRequest("/py", values, {"secret": SECRET})
    line = kp.write_order(kp.StartActor("0", request, "/a;b 'c"))
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert kp.read_order(line) == kp.StartActor("0", request, "/a;b 'c")


# ---------------------------------------------------------------- what holds the secret


def test_nothing_that_holds_the_secret_shows_it():
    """A log line or an assertion may print any of these."""
    secret, place = bytes.fromhex(SECRET), ("127.0.0.1", 1)
    spec = LaunchSpec(0, 1, 0, secret, place)
    holders = [
        spec,
        ActorRequest("/py", {}, spec.config()),
        kp.StartActor("0", REQUEST, "/"),
        actor_main._parse(json.dumps(spec.config()).encode()),
        Heartbeat(Identity(0, 0), secret, place),
        derive_keys(secret, b""),
        Wire("controller", secret, version="1"),
    ]
    for text in map(repr, holders):
        assert secret.hex() not in text and repr(secret)[2:-1] not in text, text
    for key in derive_keys(secret, b"").values():  # they keep hash states, which show nothing, and no bytes
        assert not any(isinstance(getattr(key, name), bytes | str) for name in key.__slots__), repr(key)


# ---------------------------------------------------------------- code in data

BANNED_MODULES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "yaml",
    "xmlrpc",
    "code",
}
BANNED_CALLS = {"eval", "exec", "__import__"}
BANNED_ATTRIBUTES = {("os", "system"), ("os", "popen"), ("np", "load"), ("numpy", "load"), ("torch", "load")}


def _violations(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name for name in names if name.split(".")[0] in BANNED_MODULES)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
            yield f"{node.func.id}()"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            where = (node.value.id, node.attr)
            yield from [".".join(where)] if where in BANNED_ATTRIBUTES else []
        if isinstance(node, ast.keyword) and node.arg in ("shell", "allow_pickle"):
            yield f"{node.arg}="


def test_nothing_in_the_package_makes_code_of_data():
    found = {
        str(path.relative_to(PACKAGE)): list(_violations(ast.parse(path.read_text())))
        for path in PACKAGE.rglob("*.py")
    }
    assert len(found) > 80 and {path: bad for path, bad in found.items() if bad} == {}


def test_the_threat_model_names_tests_that_exist():
    tests = TESTS
    page = (tests.parent / "docs" / "security.md").read_text()
    rows = [line.split("|")[3] for line in page.splitlines() if line.count("|") == 4 and ("test_" in line)]
    assert len(rows) > 10
    for row in rows:
        file, *names = re.findall(r"`([\w/.]+)…?`", row)
        paths = [tests / file] if file.endswith(".py") else list((tests / file).glob("test_*.py"))
        text = "".join(path.read_text() for path in paths)
        assert text and all(f"def {name}" in text for name in names if name.startswith("test_")), row


def test_that_the_search_would_find_it():
    for code in (
        "import pickle",
        "from pickle import loads",
        "eval('1')",
        "import os; os.system('x')",
        "run(shell=True)",
    ):
        assert list(_violations(ast.parse(code)))
