"""Users of the admin with different permissions, and time limits that a busy machine keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from django_delayq.console.admin import panels
from django_delayq.console.search import listing
from django_delayq.console.statements import TooSlow

ACTION_PERMISSIONS = ("cancel_message", "reschedule_message", "run_message", "requeue_message")


def person(name: str, *permissions: str) -> User:
    """Create a member of the staff with these permissions."""
    user = User.objects.create_user(name, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    assert user.user_permissions.count() == len(permissions)
    return user


def logged_in(user: User, *, enforce_csrf_checks: bool = False) -> Client:
    client = Client(enforce_csrf_checks=enforce_csrf_checks)
    client.force_login(user)
    return client


@pytest.fixture(autouse=True)
def _forget_panels(overrides_forgotten: None) -> None:
    """Drop what the pages of the test before have kept for some seconds; the overrides of this one end with it."""
    panels.forget()


@pytest.fixture
def viewer(db: None) -> Client:
    return logged_in(person("vera", "view_message"))


@pytest.fixture
def operator(db: None) -> Client:
    return logged_in(person("otto", "view_message", *ACTION_PERMISSIONS))


@pytest.fixture
def chief(db: None) -> Client:
    """A user with all permissions for messages, bulk actions, operations and the audit."""
    more = ("purge_message", "bulk_message", "view_operation", "view_auditevent")
    return logged_in(person("cora", "view_message", *ACTION_PERMISSIONS, *more))


@pytest.fixture
def restorer(db: None) -> Client:
    return logged_in(person("rosa", "view_message", "restore_message", "view_operation"))


@pytest.fixture
def boss(db: None) -> Client:
    return logged_in(User.objects.create_superuser("boss"))


@pytest.fixture
def slow_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no list of messages be found in time."""

    def too_slow(*given: Any, **options: Any) -> Any:
        raise TooSlow

    monkeypatch.setattr(listing.Listing, "ids", too_slow)


@pytest.fixture(autouse=True)
def _no_page_gives_up_on_a_busy_machine(timed: Callable[..., None], redis_has_time: None) -> None:
    timed(60_000)
