"""Tests of applications that send and consume messages: a kit, an explorer of schedules, a checker of histories.

`Kit` is a broker under a clock that the test moves; with pytest it is the fixture ``rmq``. `explore` runs a test under
many legal schedules; with pytest it is the marker ``rmq_explore``. `check_history` finds what is wrong in the history
of a run. Its face is what it exports, `served` for the command that serves a kit, and `histories` for the one that
checks recorded runs; the parts of a kit are inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from librmq.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from librmq.testing._drills import Drill as Drill
    from librmq.testing._drills import DrillReport as DrillReport
    from librmq.testing._drills import run_drill as run_drill
    from librmq.testing._evidence import HistoryAnomalyError as HistoryAnomalyError
    from librmq.testing._evidence import UndeliveredWarning as UndeliveredWarning
    from librmq.testing._evidence import UnknownGroupError as UnknownGroupError
    from librmq.testing._faults import Faults as Faults
    from librmq.testing._kit import Kit as Kit
    from librmq.testing._kit import UnsoundStoreError as UnsoundStoreError
    from librmq.testing._kit_runner import NotAwaitedError as NotAwaitedError
    from librmq.testing._process import Process as Process
    from librmq.testing._process import ProcessDied as ProcessDied
    from librmq.testing._process import ProcessStateError as ProcessStateError
    from librmq.testing._replica import one_cluster as one_cluster
    from librmq.testing._served import NotSettledError as NotSettledError
    from librmq.testing._served import ServedKit as ServedKit
    from librmq.testing.exploring._exploration import Exploration as Exploration
    from librmq.testing.exploring._exploration import explore as explore
    from librmq.testing.histories._history import History as History
    from librmq.testing.histories.anomalies import Anomaly as Anomaly
    from librmq.testing.histories.anomalies import check_history as check_history
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "librmq.testing._evidence": ("HistoryAnomalyError", "UndeliveredWarning", "UnknownGroupError"),
            "librmq.testing.exploring._exploration": ("Exploration", "explore"),
            "librmq.testing._faults": ("Faults",),
            "librmq.testing.histories.anomalies": ("Anomaly", "check_history"),
            "librmq.testing.histories._history": ("History",),
            "librmq.testing._kit": ("Kit", "UnsoundStoreError"),
            "librmq.testing._kit_runner": ("NotAwaitedError",),
            "librmq.testing._process": ("Process", "ProcessDied", "ProcessStateError"),
            "librmq.testing._replica": ("one_cluster",),
            "librmq.testing._drills": ("Drill", "DrillReport", "run_drill"),
            "librmq.testing._served": ("NotSettledError", "ServedKit"),
        },
    )
