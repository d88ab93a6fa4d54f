"""The reference and the README agree with the code: settings, commands, checks, signals, the record, Redis keys."""

from __future__ import annotations

import inspect
import re
import shlex
from argparse import Action, _SubParsersAction
from collections.abc import Iterator
from dataclasses import astuple
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from django.apps import apps
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand
from django.db.models import Model
from django.dispatch import Signal

import django_delayq
from django_delayq import (
    cancel_message,
    checks,
    extensions,
    handler,
    recurring,
    run_message,
    schedule_message,
    signals,
)
from django_delayq.broker.keys import keys, namespace
from django_delayq.broker.redis import META_FIELDS
from django_delayq.contrib.tasks import backend
from django_delayq.management._common import MEANINGS
from django_delayq.models import Message, Transition
from django_delayq.project import conf
from django_delayq.recurring import declarations
from django_delayq.recurring import services as recurring_checks
from django_delayq.testing import immediate
from django_delayq.worker.processes.process import ROLES
from docs.findings import findings
from tests.support.commands import run
from tests.support.receivers import receiving
from tests.support.rows import unguarded
from tests.torture.sizes import DELAYQ, LIFETIME

from .blocks import DOCS, PAGES, README, ROOT, blocks, run_python, text_of
from .conftest import deliver

COMMANDS = sorted(
    path.stem
    for app in ("", "http/", "recurring/")
    for path in (ROOT / f"django_delayq/{app}management/commands").glob("[!_]*.py")
)
# Those of every Django command.
DJANGOS = {option for action in BaseCommand().create_parser("", "")._actions for option in action.option_strings}


def list_rows(text: str) -> Iterator[list[str]]:
    """The rows of the list-tables of a page."""
    for row in re.findall(r"^   \* - (.*\n(?:     .*\n)*)", text, re.MULTILINE):
        yield [" ".join(cell.split()) for cell in re.split(r"\n     - ", row)]


def literals(text: str) -> list[str]:
    return re.findall(r"``([^`]+)``", text)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_the_example_of_settings_is_valid() -> None:
    given = run_python(DOCS / "reference/settings.rst", {})
    assert conf.parse(given["DELAYQ"])[1] == []


# --- commands ---------------------------------------------------------------------------------------------------------


def section(command: str) -> str:
    head = f"\n``{command}``\n"
    found = text_of("reference/commands").partition(head)[2]
    assert found
    return re.split(r"\n``\w+``\n=+\n", found)[0]


def actions(command: str) -> list[Action]:
    """The arguments of a command, and those of its verbs."""
    parsers = [load_command_class(get_commands()[command], command).create_parser("manage.py", command)]
    for action in parsers[0]._actions:
        parsers += action.choices.values() if isinstance(action, _SubParsersAction) else []
    given = [action for parser in parsers for action in parser._actions if action.dest not in ("help", "version")]
    return [action for action in given if not set(action.option_strings) & DJANGOS]


def exit_codes(command: str) -> tuple[int, ...]:
    """The exit codes that the page names."""
    found = re.search(r"^Exit codes: ([\d, ]+)\.$", section(command), re.MULTILINE)
    assert found is not None
    return tuple(map(int, found[1].split(", ")))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_documented_with_its_options_their_choices_and_its_exit_codes(command: str) -> None:
    assert f"``{command}``" in README.read_text("utf-8")
    text = section(command)
    options: set[str] = set()
    named: set[str] = set()
    for line in re.findall(r"^\.\. option:: (.*)$", text, re.MULTILINE):
        options |= {option.split()[0] for option in re.split(r", (?=--)", line)}
    for action in actions(command):
        names = action.option_strings or [str(action.metavar)]
        named.update(names)
        if action.choices:
            choices = f"{{{','.join(map(str, action.choices))}}}"
            # Each verb of a command has states of its own.
            assert (f"``{choices}``" if action.dest == "state" else f"{names[0]} {choices}") in text
    assert options == named
    assert set(exit_codes(command)) <= MEANINGS.keys()
    described = load_command_class(get_commands()[command], command)
    assert getattr(described, "exits", exit_codes(command)) == exit_codes(command)


# --- signals ----------------------------------------------------------------------------------------------------------


class Boom(Exception):
    """A handler fails."""


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("free_topics", "redis_client")
def test_every_signal_has_the_documented_arguments() -> None:
    """By sending each of them."""
    names = {signal: name for name, signal in vars(signals).items() if isinstance(signal, Signal)}
    sent: dict[str, set[str]] = {}

    def receive(sender: Any, signal: Signal, **facts: Any) -> None:
        assert sender is Message
        assert sent.setdefault(names[signal], set(facts)) == set(facts)

    with receiving(receive, *names):
        handler("docs.ok")(lambda message: None)
        handler("docs.fails", retry=["1m"])(fail)
        schedule_message("docs.ok")
        failing = schedule_message("docs.fails")
        schedule_message("docs.ok", key="gone", delay="1h")
        assert cancel_message(topic="docs.ok", key="gone")
        late = schedule_message("docs.ok", expires="1s", delay="1h")
        unguarded(Message).filter(pk=late.pk).update(
            due_at=late.due_at - timedelta(hours=2), expires_at=late.due_at - timedelta(hours=2)
        )
        deliver()
        run_message(failing)
        deliver()
        schedule_message("docs.ok", delay="1m")
        assert run("delayq_restore").code == 0
        assert run("delayq_queue", "pause", "docs").code == 0
    table = [row for row in list_rows(text_of("reference/signals")) if "``" in row[0]]
    documented = {literals(name)[0]: set(literals(arguments)) for name, arguments, _when in table}
    assert sent == documented


def fail(message: Any) -> None:
    raise Boom


# --- lists ------------------------------------------------------------------------------------------------------------


def listed(page: str, after: str = "", before: str = "\n\n\n") -> set[str]:
    """The names in the first column of the list-tables of a part of a page."""
    text = text_of(page).partition(after)[2] if after else text_of(page)
    return {name for row in list_rows(text.partition(before)[0]) for name in literals(row[0])}


def directives(page: str) -> set[str]:
    """The objects that a page describes by their docstrings."""
    return set(re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)$", text_of(page), re.MULTILINE))


def columns(model: type[Model]) -> set[str]:
    return {field.name for field in model._meta.concrete_fields} - {"pk"}


def checks_of(app: str, *homes: ModuleType) -> set[str]:
    """The ids of the system checks that modules report."""
    return {f"{app}.{number}" for home in homes for number in re.findall(r"\b[EW]\d{3}\b", inspect.getsource(home))}


SCRIPTS = {path.stem: path.read_text() for path in (ROOT / "django_delayq/broker/scripts").glob("*.lua")}
WRITES = re.compile(r'"(ZADD|ZREM|ZPOPMIN|HSET|HDEL|HINCRBY|LPUSH|SET)"|@include notify')
META = {*META_FIELDS, *re.findall(r'"H[GS]ET", meta, "(\w+)"', "".join(SCRIPTS.values()))}

# By the page and what it lists: the names that stand there, and those that there are.
LISTS: dict[str, tuple[set[str], set[str]]] = {
    "commands: findings": (
        set(re.findall(r"^   \* - \*([\w -]+)\*$", section("delayq_check"), re.MULTILINE)),
        {*findings()},
    ),
    "checks": (
        listed("reference/checks"),
        checks_of("delayq", checks, conf, immediate, backend)
        | checks_of("delayq_recurring", recurring_checks, declarations),
    ),
    "record: Message": (listed("reference/record", "\nMessage\n===", "\nTransition\n==="), columns(Message)),
    "record: Transition": (listed("reference/record", "\nTransition\n==="), columns(Transition)),
    "recurring: Schedule": (listed("reference/recurring", "Schedule\n"), columns(recurring.Schedule)),
    "redis-keys": (listed("reference/redis-keys", before="The fields of"), set(astuple(keys("delayq", "mail")))),
    "redis-keys: meta": (listed("reference/redis-keys", "The fields of ``meta``", "Who writes what"), META),
    "redis-keys: scripts": (
        listed("reference/redis-keys", "Who writes what"),
        {name for name, text in SCRIPTS.items() if WRITES.search(text)},
    ),
    "api": (directives("reference/api") - {"Message", "Transition"}, {*django_delayq.__all__}),
    "extensions": (
        directives("reference/extensions"),
        {name for name in extensions.__all__ if getattr(extensions, name).__module__ == extensions.__name__},
    ),
    "recurring": (directives("reference/recurring"), {*recurring.__all__}),
}


@pytest.mark.parametrize("what", LISTS)
def test_a_list_of_the_reference_has_all_that_there_is_and_nothing_else(what: str) -> None:
    documented, there = LISTS[what]
    assert documented == there


@pytest.mark.console
def test_every_permission_is_documented_and_no_other() -> None:
    given = set()
    for label in ("delayq", "delayq_console", "delayq_http", "delayq_recurring"):
        for model in apps.get_app_config(label).get_models():
            given |= {f"{word}_{model._meta.model_name}" for word in model._meta.default_permissions}
            given |= {codename for codename, _name in model._meta.permissions}
    table = text_of("reference/permissions").partition("codename")[2].partition("Three groups")[0]
    assert given == set(re.findall(r"^``(\w+)``  ", table, re.MULTILINE))


# --- words ------------------------------------------------------------------------------------------------------------


# The names under which the log tells of services.
SERVICES = {
    name
    for path in (ROOT / "django_delayq").rglob("*.py")
    for name in re.findall(
        r'^class \w+\(Service\):.*?^    name = "([^"]+)"', path.read_text(), re.DOTALL | re.MULTILINE
    )
}
assert "rollup writer" in SERVICES

# By the page: what it has to say somewhere, though in no list.
SAID: dict[str, list[str]] = {
    "reference/commands": [f"{', '.join(ROLES[:-1])} and {ROLES[-1]}", "role operator"],
    "reference/glossary": [f"{', '.join(ROLES[:-1])} or {ROLES[-1]}", "operator", *sorted(SERVICES)],
    "reference/recurring": [f'* - ``{missed.name}``, ``"{missed.value}"``' for missed in recurring.Missed],
    "reference/redis-keys": [f"``{{{namespace('delayq', 'other')}}}``"],
    "explanation/testing": [
        f"Leases last {DELAYQ['LEASE']} s and the horizon is {DELAYQ['HORIZON']} s",
        f"are replaced in order after {LIFETIME} messages",
    ],
}


@pytest.mark.parametrize("page", SAID)
def test_a_page_says_what_the_code_says(page: str) -> None:
    text = " ".join(text_of(page).split())
    assert [words for words in SAID[page] if words not in text] == []


def test_an_example_that_is_not_run_needs_the_package_that_is_given_as_the_reason() -> None:
    for page in sorted(DOCS.rglob("*.rst")):
        reasons = re.findall(r"^\.\. not run: (\w+)$", page.read_text("utf-8"), re.MULTILINE)
        not_run = [block for block in blocks(page) if not block.is_run]
        for reason, block in zip(reasons, not_run, strict=True):
            assert re.search(rf"^(import|from) {reason}\b", block.text, re.MULTILINE), block


# --- shell ------------------------------------------------------------------------------------------------------------

OF_A_SHELL = [
    command
    for page in PAGES
    for block in blocks(page)
    if block.language == "console"
    for command, _output in block.commands
    # A server does not end by itself.
    if command.startswith("python manage.py delayq_") and "delayq_http" not in command and "|" not in command
]


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("redis_client")
@pytest.mark.parametrize("command", OF_A_SHELL)
def test_a_command_of_an_example_ends_with_a_documented_code(command: str, settings: Any) -> None:
    # The queues of the examples are known ones: else a command asks about one that is like a queue of the tests.
    settings.DELAYQ = {**settings.DELAYQ, "QUEUES": ["default", "mail", "sms"]}
    _python, _manage, *words = shlex.split(command)
    ran = run(*words)
    assert ran.code in set(exit_codes(words[0])) - {1, 2, 69, 78}, ran.err
