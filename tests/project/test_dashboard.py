"""The dashboard shows metrics that exist, by labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from librmq.metrics import METRICS
from tests.project.test_docs import DOCS

BOARD: dict[str, Any] = json.loads((DOCS / "grafana.json").read_text("utf-8"))


def plots() -> Iterator[tuple[str, str]]:
    """Yield the expression and the names of the lines of each plot."""
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]


@pytest.mark.parametrize(("expression", "legend"), list(plots()))
def test_a_plot_uses_metrics_and_labels_that_exist(expression: str, legend: str) -> None:
    names = re.findall(r"librmq_(\w+)", expression)
    assert names
    for name in names:
        metric = METRICS[name.removesuffix("_total")]
        assert name.endswith("_total") == (metric.kind == "counter")
        used = set(re.findall(r"(\w+)=~", expression)) | set(re.findall(r"\{\{(\w+)\}\}", legend))
        for by in re.findall(r"by \(([\w, ]+)\)", expression):
            used |= set(by.split(", "))
        assert used <= set(metric.labels)
