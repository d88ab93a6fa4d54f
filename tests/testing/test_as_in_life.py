"""A handler fares in the transaction of a TestCase as it does without one."""

from __future__ import annotations

from django.db import transaction
from django.test import TestCase

from django_delayq import schedule_message
from django_delayq.testing import DelayqMixin


class TestWithAFunctionOnCommitOfTheClass(DelayqMixin, TestCase):
    @classmethod
    def setUpTestData(cls) -> None:
        transaction.on_commit(lambda: schedule_message("t.ok"))

    def test_it_is_called_in_the_first_test(self) -> None:
        self.delayq.assert_scheduled("t.ok", count=1)
        assert len(self.delayq.drain()) == 1

    def test_it_is_called_in_the_second_test(self) -> None:
        self.test_it_is_called_in_the_first_test()
