"""The performance page shows every workload of the benchmarks, with its caption."""

from __future__ import annotations

import pytest

from benchmarks.captions import CAPTIONS, FEATURES, TARGETS
from benchmarks.workloads import WORKLOADS, Workload

from .blocks import text_of

PAGE = text_of("explanation/performance")


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: str(workload.name))
def test_a_workload_has_its_caption_under_its_title(workload: Workload) -> None:
    assert f"\n{workload.title}\n{'-' * len(workload.title)}\n\n{CAPTIONS[workload.name]}\n" in PAGE


def test_the_other_tables_have_their_captions() -> None:
    assert TARGETS in PAGE
    assert FEATURES in PAGE
    assert CAPTIONS.keys() == {workload.name for workload in WORKLOADS}
