"""The reference and the README agree with the code: settings, commands, checks, signals, the record, Redis keys."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
from argparse import Action, _SubParsersAction
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
from django.apps import apps
from django.core.management import get_commands, load_command_class
from django.core.management.base import BaseCommand
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
from django_delayq.contrib.tasks import backend
from django_delayq.management._common import MEANINGS
from django_delayq.models import Message, Transition
from django_delayq.project import conf
from django_delayq.recurring import services as recurring_checks
from django_delayq.testing import immediate
from django_delayq.worker.processes.process import ROLES
from docs.findings import findings
from tests.support.commands import run
from tests.support.receivers import receiving
from tests.torture.sizes import DELAYQ, LIFETIME

from .blocks import DOCS, PAGES, README, ROOT, blocks, run_python, text_of
from .conftest import deliver

COMMANDS = sorted(
    path.stem
    for app in ("", "recurring/")
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
    parser = load_command_class(get_commands()[command], command).create_parser("manage.py", command)
    verbs = [one for action in parser._actions if isinstance(action, _SubParsersAction) for one in verbs_of(action)]
    return [
        action
        for action in (*parser._actions, *verbs)
        if not set(action.option_strings) & DJANGOS and action.dest not in ("help", "version")
    ]


def verbs_of(action: _SubParsersAction[Any]) -> Iterator[Action]:
    for parser in action.choices.values():
        yield from parser._actions


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_documented_and_no_other(command: str) -> None:
    documented = set()
    for line in re.findall(r"^\.\. option:: (.*)$", section(command), re.MULTILINE):
        documented |= {option.split()[0] for option in re.split(r", (?=--)", line)}
    parsed = {option for action in actions(command) for option in action.option_strings}
    positional = {str(action.metavar) for action in actions(command) if not action.option_strings}
    assert documented == parsed | positional


@pytest.mark.parametrize("command", COMMANDS)
def test_the_choices_of_an_option_are_the_documented_ones(command: str) -> None:
    for action in actions(command):
        if action.choices:
            option = action.option_strings[0] if action.option_strings else action.metavar
            choices = f"{{{','.join(map(str, action.choices))}}}"
            # Each verb of a command has states of its own.
            assert (f"``{choices}``" if action.dest == "state" else f"{option} {choices}") in section(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_exit_codes_of_a_command_are_the_documented_ones(command: str) -> None:
    found = re.search(r"^Exit codes: ([\d, ]+)\.$", section(command), re.MULTILINE)
    assert found is not None
    codes = tuple(map(int, found[1].split(", ")))
    assert set(codes) <= MEANINGS.keys()
    assert getattr(load_command_class(get_commands()[command], command), "exits", codes) == codes


def test_every_finding_of_delayq_check_is_documented() -> None:
    assert findings().keys() == set(re.findall(r"^   \* - \*([\w -]+)\*$", section("delayq_check"), re.MULTILINE))


@pytest.mark.parametrize("page", ["reference/commands", "reference/glossary"])
def test_every_role_is_documented(page: str) -> None:
    text = " ".join(text_of(page).split())
    assert f"{', '.join(ROLES[:-1])} {'and' if page == 'reference/commands' else 'or'} {ROLES[-1]}" in text
    assert "operator" in text


def test_every_service_that_the_log_names_is_in_the_glossary() -> None:
    services = [
        name
        for path in sorted((ROOT / "django_delayq").rglob("*.py"))
        for name in re.findall(
            r'^class \w+\(Service\):.*?^    name = "([^"]+)"', path.read_text(), re.DOTALL | re.MULTILINE
        )
    ]
    assert "rollup writer" in services
    text = " ".join(text_of("reference/glossary").split())
    described = text.partition(" service One periodic duty")[2].partition(" rollup A row")[0]
    assert [name for name in services if not re.search(rf"\b{name}\b", described)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_the_readme_names_every_command(command: str) -> None:
    assert f"``{command}``" in README.read_text("utf-8")


@pytest.mark.parametrize("app", ["delayq", "delayq_recurring"])
def test_every_check_is_described(app: str) -> None:
    homes: dict[str, list[ModuleType]] = {
        "delayq": [checks, conf, immediate, backend],
        "delayq_recurring": [recurring_checks],
    }
    raised = {number for home in homes[app] for number in re.findall(r"\b[EW]\d{3}\b", inspect.getsource(home))}
    assert {f"{app}.{number}" for number in raised} == set(
        re.findall(rf"``({app}\.\w+)``", text_of("reference/checks"))
    )


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
        Message._base_manager.filter(pk=late.pk).update(
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


# --- the record -------------------------------------------------------------------------------------------------------


def fields_of(title: str) -> set[str]:
    text = text_of("reference/record").partition(f"\n{title}\n===")[2].partition("\n===")[0]
    return {name for row in list_rows(text) for name in literals(row[0])}


@pytest.mark.parametrize("model", [Message, Transition])
def test_every_field_of_the_record_is_documented_and_no_other(model: type[Message | Transition]) -> None:
    assert fields_of(model.__name__) == {field.name for field in model._meta.concrete_fields} - {"pk"}


@pytest.mark.console
def test_every_permission_is_documented_and_no_other() -> None:
    given = set()
    for label in ("delayq", "delayq_console", "delayq_recurring"):
        for model in apps.get_app_config(label).get_models():
            given |= {f"{word}_{model._meta.model_name}" for word in model._meta.default_permissions}
            given |= {codename for codename, _name in model._meta.permissions}
    table = text_of("reference/permissions").partition("codename")[2].partition("Three groups")[0]
    assert given == set(re.findall(r"^``(\w+)``  ", table, re.MULTILINE))


# --- Redis ------------------------------------------------------------------------------------------------------------


def test_every_redis_key_is_documented() -> None:
    rows = list_rows(text_of("reference/redis-keys"))
    documented = {literals(row[0])[0] for row in rows if row[0].startswith("``{")}
    assert documented == set(dataclasses.astuple(keys("delayq", "mail")))
    other = keys(namespace("delayq", "other"), "mail")
    assert f"``{other.meta.rpartition(':')[0]}``" in text_of("reference/redis-keys")


def test_every_field_of_meta_is_documented() -> None:
    broker = ROOT / "django_delayq/broker"
    text = "".join(source.read_text() for source in (*(broker / "scripts").rglob("*.lua"), broker / "redis.py"))
    table = text_of("reference/redis-keys").partition("The fields of ``meta``")[2].partition("Who writes what")[0]
    documented = {name for row in list_rows(table) for name in literals(row[0])}
    written = {name for name in documented if f'"{name}"' in text}
    assert written == documented
    assert set(re.findall(r'HGET", meta, "(\w+)"', text)) <= documented


def test_the_scripts_that_are_named_exist() -> None:
    names = {path.stem for path in (ROOT / "django_delayq/broker/scripts").glob("*.lua")}
    table = text_of("reference/redis-keys").partition("Who writes what")[2]
    documented = {name for row in list_rows(table) for name in literals(row[0])}
    writing = {name for name in names if _writes((ROOT / "django_delayq/broker/scripts" / f"{name}.lua").read_text())}
    assert documented == writing


def _writes(script: str) -> bool:
    return re.search(r'"(ZADD|ZREM|ZPOPMIN|HSET|HDEL|HINCRBY|LPUSH|SET)"|@include notify', script) is not None


# --- API --------------------------------------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference() -> None:
    directives = re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)$", text_of("reference/api"), re.MULTILINE)
    assert set(directives) - {"Message", "Transition"} == set(django_delayq.__all__)


def test_an_example_that_is_not_run_needs_the_package_that_is_given_as_the_reason() -> None:
    for page in sorted(DOCS.rglob("*.rst")):
        reasons = re.findall(r"^\.\. not run: (\w+)$", page.read_text("utf-8"), re.MULTILINE)
        not_run = [block for block in blocks(page) if not block.is_run]
        for reason, block in zip(reasons, not_run, strict=True):
            assert re.search(rf"^(import|from) {reason}\b", block.text, re.MULTILINE), block


def test_every_public_name_of_extensions_is_in_the_reference() -> None:
    public = {
        name
        for name, member in vars(extensions).items()
        if getattr(member, "__module__", "") == extensions.__name__ and not name.startswith("_")
    }
    text = text_of("reference/extensions")
    documented = set(re.findall(r"^\.\. auto(?:function|class):: (\w+)$", text, re.MULTILINE))
    # Those that the package itself calls.
    of_the_package = {
        "roles",
        "findings",
        "statistics",
        "worker_options",
        "WorkerExtensions",
        "WorkerOption",
        "RestoreObservers",
    }
    assert documented == public - of_the_package


def test_every_public_name_of_recurring_messages_is_in_the_reference() -> None:
    text = text_of("reference/recurring")
    assert set(re.findall(r"^\.\. auto(?:function|class):: (\w+)$", text, re.MULTILINE)) == set(recurring.__all__)
    table = {name for row in list_rows(text.partition("Schedule\n")[2]) for name in literals(row[0])}
    assert table == {field.name for field in recurring.Schedule._meta.concrete_fields}
    assert all(f'* - ``{missed.name}``, ``"{missed.value}"``' in text for missed in recurring.Missed)


def test_the_page_of_the_tests_tells_the_times_of_the_torture() -> None:
    text = " ".join(text_of("explanation/testing").split())
    assert f"Leases last {DELAYQ['LEASE']} s and the horizon is {DELAYQ['HORIZON']} s" in text
    assert f"are replaced in order after {LIFETIME} messages" in text


# --- shell ------------------------------------------------------------------------------------------------------------

OF_A_SHELL = [
    command
    for page in PAGES
    for block in blocks(page)
    if block.language == "console"
    for command, _output in block.commands
    if command.startswith("python manage.py delayq_") and "|" not in command
]


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("redis_client")
@pytest.mark.parametrize("command", OF_A_SHELL)
def test_a_command_of_an_example_ends_with_a_documented_code(command: str) -> None:
    _python, _manage, *words = shlex.split(command)
    codes = re.search(r"^Exit codes: ([\d, ]+)\.$", section(words[0]), re.MULTILINE)
    assert codes is not None
    ran = run(*words)
    assert str(ran.code) in codes[1].split(", ")
    assert ran.code not in (1, 2, 69, 78), ran.err
