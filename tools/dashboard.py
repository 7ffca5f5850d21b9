"""Writes docs/grafana.json: a dashboard of the metrics that `librmq.metrics.export_to_prometheus` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).resolve().parent.parent / "docs" / "grafana.json"
OF_GROUP = '{topic=~"$topic",group=~"$group"}'
OF_TOPIC = '{topic=~"$topic"}'


class Panel(NamedTuple):
    """A plot: its title, unit, expression, and the labels that name a line."""

    title: str
    unit: str
    expression: str
    legend: str


def rate(name: str, labels: str, by: str) -> str:
    """Return the rate of a counter by labels."""
    return f"sum by ({by}) (rate(librmq_{name}_total{labels}[$__rate_interval]))"


def average(total: str, count: str, labels: str, by: str) -> str:
    """Return a total time divided by the number of events."""
    return f"{rate(total, labels, by)} / {rate(count, labels, by)}"


ROWS = {
    "What to look at": [
        Panel("Lag", "short", f"sum by (group, topic) (librmq_lag{OF_GROUP})", "{{group}} {{topic}}"),
        Panel(
            "Dead letters in an hour",
            "short",
            f"sum by (group) (increase(librmq_dead_letters_total{OF_GROUP}[1h]))",
            "{{group}}",
        ),
        Panel("Redeliveries", "cps", rate("send_backs", OF_GROUP, "group"), "{{group}}"),
        Panel("Refused as busy", "cps", rate("busy", OF_TOPIC, "topic"), "{{topic}}"),
        Panel(
            "Deleted before they were consumed",
            "short",
            f"sum by (group) (increase(librmq_unread_deleted_total{OF_GROUP}[1h]))",
            "{{group}}",
        ),
        Panel("Consumers that rest", "cps", rate("rests", OF_GROUP, "group"), "{{group}}"),
    ],
    "Producers": [
        Panel("Sends", "cps", rate("sends", OF_TOPIC, "topic, status"), "{{topic}} {{status}}"),
        Panel("Time of a send", "s", average("send_seconds", "sends", OF_TOPIC, "topic"), "{{topic}}"),
        Panel("Bytes sent", "Bps", rate("send_bytes", OF_TOPIC, "topic"), "{{topic}}"),
        Panel("Retries of sends", "cps", rate("send_retries", OF_TOPIC, "topic"), "{{topic}}"),
        Panel("Transactions", "cps", rate("transactions", OF_TOPIC, "outcome"), "{{outcome}}"),
        Panel("Checks of transactions", "cps", rate("transaction_checks", OF_TOPIC, "topic"), "{{topic}}"),
    ],
    "Consumers": [
        Panel("Consumed", "cps", rate("consumed", OF_GROUP, "group, result"), "{{group}} {{result}}"),
        Panel("Time of a listener", "s", average("consume_seconds", "consumed", OF_GROUP, "group"), "{{group}}"),
        Panel("Held in memory", "short", f"sum by (group) (librmq_waiting_messages{OF_GROUP})", "{{group}}"),
        Panel("Assigned queues", "short", f"sum by (group, topic) (librmq_queues{OF_GROUP})", "{{group}} {{topic}}"),
        Panel("Rebalances", "cps", rate("rebalances", OF_GROUP, "group"), "{{group}}"),
        Panel("Duplicates", "cps", rate("duplicates", OF_GROUP, "group, outcome"), "{{group}} {{outcome}}"),
    ],
    "Broker": [
        Panel("Messages stored", "cps", rate("messages_in", OF_TOPIC, "topic"), "{{topic}}"),
        Panel("Messages delivered", "cps", rate("messages_out", OF_GROUP, "group"), "{{group}}"),
        Panel("Delayed messages delivered", "cps", rate("delayed_out", "", "level"), "level {{level}}"),
        Panel("Length of the log", "bytes", "librmq_log_bytes", "log"),
        Panel("Used part of the disk", "percentunit", "librmq_disk_used", "disk"),
        Panel("Bytes that replicas lack", "bytes", "librmq_replica_lag_bytes", "replicas"),
    ],
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard: three plots in a line."""
    source = {"type": "prometheus", "uid": "${source}"}
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}, "panels": []})
        for number, panel in enumerate(row):
            panels.append(
                {
                    "type": "timeseries",
                    "title": panel.title,
                    "datasource": source,
                    "gridPos": {"h": 7, "w": 8, "x": 8 * (number % 3), "y": y + 1 + 7 * (number // 3)},
                    "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                    "targets": [{"refId": "A", "expr": panel.expression, "legendFormat": panel.legend}],
                }
            )
        y += 1 + 7 * -(-len(row) // 3)
    for number, made in enumerate(panels, 1):
        made["id"] = number
    variables: list[dict[str, Any]] = [{"name": "source", "type": "datasource", "query": "prometheus"}]
    for name, metric in (("group", "librmq_consumed_total"), ("topic", "librmq_pulls_total")):
        query = f"label_values({metric}, {name})"
        choice = {"includeAll": True, "allValue": ".*", "multi": True, "refresh": 2}
        variables.append({"name": name, "type": "query", "datasource": source, "query": query, **choice})
    return {
        "title": "librmq",
        "uid": "librmq",
        "tags": ["librmq"],
        "schemaVersion": 39,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": variables},
        "panels": panels,
    }


def main() -> None:
    """Write the dashboard."""
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
