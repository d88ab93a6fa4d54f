"""The mixin of Django's test cases."""

from __future__ import annotations

import unittest
from typing import TYPE_CHECKING

from .helper import Delayq

if TYPE_CHECKING:
    Base = unittest.TestCase
else:
    Base = object


class DelayqMixin(Base):
    """Gives each test ``self.delayq``. Write it before ``TestCase``, ``TransactionTestCase`` or ``SimpleTestCase``.

    ``delayq`` is there from before ``setUp`` until after the cleanups.
    """

    delayq: Delayq

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        with Delayq() as self.delayq:
            return super().run(result)

    def debug(self) -> None:
        with Delayq() as self.delayq:
            super().debug()
