"""The files for Prometheus, Grafana and Kubernetes can be loaded, and name what there is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from django.core.management import get_commands, load_command_class
from django.urls import resolve

from django_delayq import pause_queue, schedule_message
from django_delayq.contrib.prometheus.counts import BOUNDS, OUTCOMES, Counting, SharedCounts
from django_delayq.contrib.prometheus.server import Gauges
from tests.support.commands import run

from .blocks import DOCS, blocks, text_of

ALERTS = DOCS / "howto/delayq-alerts.yml"
DASHBOARD = DOCS / "howto/delayq-dashboard.json"
PANELS: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Prometheus, on PATH")


def promtool(*words: str | Path) -> None:
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def names(text: str) -> set[str]:
    """Return the metrics that a query or a page names, without the suffixes of histograms."""
    return {re.sub("_(bucket|sum|count)$", "", name) for name in re.findall(r"\bdelayq_\w+", text)}


@pytest.fixture
def metrics(transactional_db: None, redis_client: redis.Redis) -> set[str]:
    """The names of all metrics that a worker serves."""
    schedule_message("t.ok")
    pause_queue("default")
    assert run("delayq_restore").code == 0
    shared = SharedCounts(1)
    Counting("default", "host/1/abc", shared)
    gauges = [*Gauges("default").collect()]
    assert all(gauge.samples for gauge in gauges)
    families = [*shared.collect(), *gauges]
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in families}


def test_every_metric_is_documented_and_no_other(metrics: set[str]) -> None:
    documented = re.findall(r"^   \* - ``(delayq_\w+)``$", text_of("reference/metrics"), re.MULTILINE)
    # Here is no cluster: tests/contrib/test_prometheus.py has one.
    assert sorted(documented) == sorted({*metrics, "delayq_redis_cluster_replicas"})


def test_the_documented_buckets_are_those_of_the_histograms() -> None:
    sentence = re.search(r"buckets up to (.*) ms, and (.*) s\.", text_of("reference/metrics"))
    assert sentence is not None
    milliseconds, seconds = (map(float, re.findall(r"[\d.]+", part)) for part in sentence.groups())
    assert (*(bound / 1000 for bound in milliseconds), *seconds) == BOUNDS


def test_alerts_and_panels_name_metrics_and_outcomes_that_there_are(metrics: set[str]) -> None:
    # The dashboard shows all of them.
    assert set().union(*map(names, QUERIES)) == metrics
    assert set().union(*(names(rule["expr"]) for rule in RULES)) <= metrics
    outcomes = re.findall(r'outcome=~?"([\w|]+)"', " ".join([*QUERIES, *(rule["expr"] for rule in RULES)]))
    assert outcomes
    assert set("|".join(outcomes).split("|")) <= set(OUTCOMES)


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    for rule in RULES:
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_the_panels_of_the_dashboard_stand_side_by_side() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert max(x for x, _y in cells) < 24
        taken |= cells


@needs_promtool
def test_prometheus_takes_the_alerts_and_they_fire() -> None:
    promtool("check", "rules", ALERTS)
    promtool("test", "rules", Path(__file__).with_name("alerts_fire.yml"))


@needs_promtool
def test_prometheus_understands_the_queries_of_the_dashboard(tmp_path: Path) -> None:
    variables = {"$__rate_interval": "5m", "$job": ".*", "$queue": ".*"}
    queries = [re.sub(r"\$\w+", lambda found: variables[found[0]], query) for query in QUERIES]
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "rules.yml")


# --- examples in YAML -------------------------------------------------------------------------------------------------

YAML = [
    (block, document)
    for page in ("howto/deploy", "howto/monitoring")
    for block in blocks(DOCS / f"{page}.rst")
    if block.language == "yaml"
    for document in yaml.safe_load_all(block.text)
]


def containers() -> list[dict[str, Any]]:
    """Return all containers of the examples, those of Docker Compose too."""
    found: list[dict[str, Any]] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if "image" in value:
                found.append(value)
            for one in value.values():
                look(one)
        elif isinstance(value, list):
            for one in value:
                look(one)

    look([document for _block, document in YAML])
    return found


def test_the_manifests_are_of_kinds_that_kubernetes_knows() -> None:
    manifests = [document for _block, document in YAML if "kind" in document]
    kinds = [(manifest["apiVersion"], manifest["kind"]) for manifest in manifests]
    assert kinds == [
        ("v1", "Secret"),
        ("batch/v1", "Job"),
        ("apps/v1", "Deployment"),
        ("apps/v1", "Deployment"),
        ("batch/v1", "CronJob"),
    ]
    for manifest in manifests[2:4]:
        spec = manifest["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        assert len(spec["template"]["spec"]["containers"]) == 1


def test_the_commands_of_the_manifests_are_understood() -> None:
    commands = [[*one.get("command", ()), *one.get("args", ())] for one in containers() if "command" in one]
    assert len(commands) == 4
    for _python, _manage, name, *words in commands:
        load_command_class(get_commands()[name], name).create_parser("manage.py", name).parse_args(words)


def test_all_containers_of_the_manifests_have_the_secret() -> None:
    secret = next(document for _block, document in YAML if document.get("kind") == "Secret")
    # The service of Docker Compose has none.
    in_kubernetes = [one for one in containers() if "name" in one]
    assert len(in_kubernetes) == 4
    for one in in_kubernetes:
        assert one["envFrom"] == [{"secretRef": {"name": secret["metadata"]["name"]}}]


@pytest.mark.urls("tests.test_urls")
def test_the_probes_of_the_manifests_lead_to_the_pages() -> None:
    probed = [one[probe]["httpGet"]["path"] for one in containers() for probe in one if "httpGet" in (one[probe] or {})]
    assert [resolve(path).view_name for path in probed] == ["delayq:live", "delayq:ready"]
