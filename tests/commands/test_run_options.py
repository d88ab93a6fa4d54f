"""The command line of ``run_delayq``: what it refuses, and the hints that it gives."""

from __future__ import annotations

from typing import Any

import pytest

from django_delayq import extensions
from django_delayq.management.commands import run_delayq
from tests.support.commands import run


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--concurrency", "4"], "instead of --concurrency write --threads"),
        (["--concurrency=4"], "instead of --concurrency write --threads"),
        (["-c", "4"], "instead of -c write --threads"),
        (["-Q", "mail"], "instead of -Q write --queue, once for each queue"),
        (["-w", "8"], "instead of -w write --processes and --threads"),
        (["--beat"], "leave out --beat"),
    ],
)
def test_an_option_of_another_queue_is_refused_with_the_one_that_is_meant(words: list[str], hint: str) -> None:
    ran = run("run_delayq", *words)
    assert ran.code != 0
    assert ran.err.endswith(f"unrecognized arguments: {' '.join(words)}; {hint}")


def test_a_runtime_of_zero_is_refused() -> None:
    """Else a worker would exit at once, and be started again and again. No limit is said by leaving it out."""
    assert "--max-runtime: must be more than 0" in run("run_delayq", "--max-runtime", "0").err


def test_an_option_that_nobody_has_is_refused_without_a_hint() -> None:
    assert run("run_delayq", "--zzz").err.endswith("unrecognized arguments: --zzz")


@pytest.mark.usefixtures("own_additions")
def test_a_role_of_an_extension_may_end_in_s() -> None:
    extensions.add_to_workers(extensions.WorkerExtension, roles=["metrics"])
    chosen = run_delayq.Command().create_parser("", "").parse_args(["--roles", "metrics, consumers"])
    assert chosen.roles == {"metrics", "consumer"}
    ran = run("run_delayq", "--roles", "metric")
    assert "there is no role metric (did you mean metrics?); the roles are" in ran.err


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("argument", [{"action": "store_true"}, {"dest": "trace_to"}, {"default": "x"}], ids=repr)
def test_an_option_of_an_extension_counts_only_when_it_is_given(own_additions: None, argument: dict[str, Any]) -> None:
    extensions.add_worker_option("--tracing", lambda options, value: None, **argument)
    assert run("run_delayq", "--once").code == 0
    given = ["--tracing"] if "action" in argument else ["--tracing=here"]
    assert run("run_delayq", "--once", *given).err.startswith("--tracing: only for a worker that stays")
