"""People who look at the admin: one who may only look, and one who may steer."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

STEER = ("cancel_message", "reschedule_message", "run_message", "requeue_message")


def person(name: str, *permissions: str) -> User:
    """A member of the staff with these permissions."""
    user = User.objects.create_user(name, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    assert user.user_permissions.count() == len(permissions)
    return user


def logged_in(user: User, *, enforce_csrf_checks: bool = False) -> Client:
    client = Client(enforce_csrf_checks=enforce_csrf_checks)
    client.force_login(user)
    return client


@pytest.fixture
def viewer(db: None) -> Client:
    return logged_in(person("vera", "view_message"))


@pytest.fixture
def operator(db: None) -> Client:
    return logged_in(person("otto", "view_message", *STEER))
