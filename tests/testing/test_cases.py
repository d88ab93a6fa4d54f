"""The mixin, in each of Django's test cases."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import pytest
from django.db import connections, transaction
from django.test import SimpleTestCase, TestCase, TransactionTestCase

from django_delayq import aschedule_message, cancel_message, schedule_message, schedule_messages
from django_delayq.core import in_tests
from django_delayq.models import Message
from django_delayq.project import conf
from django_delayq.testing import DelayqMixin
from tests.app.models import Effect


class TestInATransaction(DelayqMixin, TestCase):
    message: Message

    @classmethod
    def setUpTestData(cls) -> None:
        cls.message = schedule_message("t.tx", delay="15m")

    def setUp(self) -> None:
        self.delayq.assert_scheduled("t.tx", due="15m", within="1m")

    def test_a_message_of_the_class_runs_in_the_first_test(self) -> None:
        assert [ran.message for ran in self.delayq.drain("15m")] == [self.message]
        assert Effect.objects.count() == 1

    def test_a_message_of_the_class_runs_in_the_second_test(self) -> None:
        self.test_a_message_of_the_class_runs_in_the_first_test()

    async def test_a_message_runs_in_an_async_test(self) -> None:
        message = await aschedule_message("t.async")
        assert await self.delayq.ascheduled("t.async") == [message]
        assert [ran.message for ran in await self.delayq.adrain()] == [message]
        await self.delayq.aassert_not_scheduled("t.async")
        await self.delayq.aassert_scheduled("t.tx", count=1)
        await self.delayq.aperform("t.ok")


class TestWithACaptureOfTheClass(DelayqMixin, TestCase):
    @classmethod
    def setUpTestData(cls) -> None:
        with cls.captureOnCommitCallbacks(execute=True):
            transaction.on_commit(lambda: schedule_message("t.ok", {"n": 5}))

    def test_a_function_on_commit_that_it_has_called_is_not_called_again(self) -> None:
        assert [ran.message.payload for ran in self.delayq.drain()] == [{"n": 5}]


class TestWithoutATransaction(DelayqMixin, TransactionTestCase):
    def test_a_message_runs(self) -> None:
        message = schedule_message("t.tx", delay="15m")
        self.delayq.travel("15m")
        assert [ran.message for ran in self.delayq.drain()] == [message]
        assert Effect.objects.count() == 1


class TestWithoutADatabase(DelayqMixin, SimpleTestCase):
    def test_a_handler_is_called(self) -> None:
        self.delayq.perform("t.ok", attempt=2)

    def test_nothing_can_be_drained(self) -> None:
        with self.assertRaisesMessage(Exception, "to 'default' are not allowed in SimpleTestCase"):
            self.delayq.drain()


class ForOneDatabase(TestCase):
    """It is run while a connection to the other database is open, as after the making of the test databases."""

    __test__ = False
    databases = {"default"}

    def test_the_other_database_is_forbidden(self) -> None:
        calls: list[Callable[[], object]] = [
            lambda: schedule_message("t.ok", using="other"),
            lambda: schedule_messages([{"topic": "t.ok"}], using="other"),
            lambda: cancel_message(1, using="other"),
        ]
        for call in calls:
            with self.assertRaisesMessage(AssertionError, "queries to 'other' are not allowed"):
                call()


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_call_writes_to_no_database_that_the_test_case_does_not_name() -> None:
    connections["other"].ensure_connection()
    result = unittest.TestResult()
    unittest.TestSuite([ForOneDatabase("test_the_other_database_is_forbidden")]).run(result)
    assert (result.testsRun, result.errors, result.failures) == (1, [], [])
    assert not Message.objects.using("other").exists()


def test_nothing_is_left_of_a_test(redis_server: object, settings: Any) -> None:
    TestWithoutADatabase("test_a_handler_is_called").debug()
    assert in_tests.clock is None
    assert not in_tests.without_redis
    assert conf.get().REDIS is not None
