"""The settings have typed defaults, and all problems are reported at once."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_delayq.core.retry import RetryPolicy
from django_delayq.project import conf, console_conf

if TYPE_CHECKING:
    from pytest_django import Settings


def test_an_empty_dict_gives_the_defaults() -> None:
    assert conf.parse({}) == (conf.Settings(), [])


def test_times_may_be_written_as_people_write_them() -> None:
    given = {"HORIZON": "10m", "GRACE": timedelta(seconds=3), "LEASE": 90, "TIMEOUT": False, "RETRY": ["4m", "10m"]}
    settings, problems = conf.parse(given)
    assert not problems
    assert (settings.HORIZON, settings.GRACE, settings.LEASE, settings.TIMEOUT) == (600.0, 3.0, 90.0, False)
    assert RetryPolicy.fixed([240, 600]) == settings.RETRY


@pytest.mark.parametrize("name", ["TIMEOUT", "RETENTION", "DEAD_RETENTION"])
@pytest.mark.parametrize("zero", [0, 0.0, "0", "0s", timedelta(0)], ids=repr)
def test_zero_is_refused_where_others_mean_never_by_it(name: str, zero: Any) -> None:
    _settings, [problem] = conf.parse({name: zero})
    told = "must not be 0: write False for never, or a time such as '30d'."
    assert problem == ("E003", f"DELAYQ[{name!r}] is impossible.", told)


@pytest.mark.parametrize("name", ["TIMEOUT", "RETENTION", "DEAD_RETENTION"])
def test_never_is_false_and_nothing_else(name: str) -> None:
    settings, problems = conf.parse({name: False})
    assert not problems
    assert getattr(settings, name) is False
    settings, (problem,) = conf.parse({name: None})
    assert getattr(settings, name) == getattr(conf.Settings(), name)
    assert (problem.id, "write False for never" in problem.hint) == ("E003", True)


def test_the_settings_of_the_console_are_its_own(settings: Settings) -> None:
    settings.DELAYQ = {"CONSOLE": {"READ_ONLY": "yes", "ENVIRONMENT": "production", "COLOUR": "red"}}
    assert conf.get() == conf.Settings()
    found, problems = console_conf.parse(conf.section("CONSOLE"))
    assert found == console_conf.ConsoleSettings(ENVIRONMENT="production")
    assert [(problem.id, problem.message) for problem in problems] == [
        ("E003", "DELAYQ['CONSOLE']['READ_ONLY'] is impossible."),
        ("E002", "DELAYQ['CONSOLE'] has no setting 'COLOUR'."),
    ]
    with pytest.raises(ImproperlyConfigured, match=r"READ_ONLY.*impossible.*COLOUR"):
        console_conf.get()


@pytest.mark.parametrize("given", [True, [], "production", {"ENVIRONMENT": "x" * 41}], ids=repr)
def test_an_impossible_console_is_a_problem(given: Any) -> None:
    found, (problem,) = console_conf.parse(given)
    assert found == console_conf.ConsoleSettings()
    assert "DELAYQ['CONSOLE']" in problem.message
    assert "REDIS" not in problem.hint


def test_an_unknown_key_is_e002_and_named() -> None:
    _settings, (problem,) = conf.parse({"HORIZONT": 600})
    assert problem.id == "E002"
    assert ("'HORIZONT'" in problem.message, problem.hint) == (True, "Write HORIZON.")


def test_the_hint_for_a_key_that_is_like_none_lists_all() -> None:
    _settings, (problem,) = conf.parse({"ZZZ": 600})
    assert "CONSOLE, DEAD_RETENTION, DEFAULT_QUEUE" in problem.hint
    assert "TESTING" in problem.hint


WRONG: dict[str, list[Any]] = {
    "REDIS": ["", 6379],
    "PREFIX": ["a{b", "", "x" * 41],
    "DEFAULT_QUEUE": ["two words"],
    "QUEUES": ["default", ["a", "a"], ["a\n"]],
    "HORIZON": [0, None],
    "GRACE": [-1],
    "LEASE": [10**400],
    "TIMEOUT": [0],
    "RETRY": ["5m", [-1], lambda attempt, error: error.args],
    "PAYLOAD_MAX_BYTES": [0],
    "MIDDLEWARE": ["mysite.middleware.Tenants", ["Tenants"], ["mysite.middleware."], [5]],
    "LOG_ERRORS": ["traceback"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_an_impossible_value_is_e003_and_named(name: str, value: Any) -> None:
    settings, (problem,) = conf.parse({name: value})
    assert settings == conf.Settings()
    assert problem.id == "E003"
    assert f"'{name}'" in problem.message
    assert problem.hint


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ({"mail.*": 0}, "of 'mail.*' must not be 0: write False for never"),
        ({"mail.*": None}, "of 'mail.*' must not be None"),
        ({"mail.*": "often"}, "of 'mail.*' is"),
        ({"mail.*.html": "1d"}, "of 'mail.*.html' must be 1 to 100 of the characters"),
        ({"*": "1d"}, "of '*' must be 1 to 100"),
        ({"queue=": "1d"}, "of 'queue=' must be 1 to 64"),
        ({"queue=a:b": "1d"}, "of 'queue=a:b' must be 1 to 64"),
        ({5: "1d"}, "of 5 is for no name: write a topic"),
        ({f"topic{number}": "1d" for number in range(101)}, "has more than 100 patterns"),
    ],
)
def test_an_impossible_pattern_of_a_retention_is_named(kept: Any, words: str) -> None:
    for name in ("RETENTION", "DEAD_RETENTION"):
        settings, (problem,) = conf.parse({name: kept})
        assert settings == conf.Settings()
        assert problem.hint.startswith(words)


def test_get_raises_with_every_problem(settings: Settings) -> None:
    settings.DELAYQ = {"HORIZON": 0, "COLOUR": "red"}
    with pytest.raises(ImproperlyConfigured, match=r"HORIZON.*impossible.*COLOUR"):
        conf.get()


def test_settings_changed_in_a_test_are_seen(settings: Settings) -> None:
    settings.DELAYQ = {"LEASE": 7}
    assert conf.get().LEASE == 7
    settings.DELAYQ = {"LEASE": 8}
    assert conf.get().LEASE == 8


def test_local_times_are_refused_at_first_use(settings: Any) -> None:
    settings.USE_TZ = False
    with pytest.raises(ImproperlyConfigured, match="USE_TZ is off"):
        conf.get()
