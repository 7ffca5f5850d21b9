"""What tests of a store, or of an application that sends and consumes messages, can use.

`Kit` is a broker under a clock that the test moves; with pytest it is the fixture ``rmq``. `explore` runs a test under
many legal schedules; with pytest it is the marker ``rmq_explore``. The rest are file seams for tests of stores.
"""

from __future__ import annotations

from librmq.testing.crash_images import CrashImages, Image
from librmq.testing.explore import Exploration, explore
from librmq.testing.faults import Faults
from librmq.testing.files import Event, FailingFiles, RecordingFiles
from librmq.testing.history import DeliveryAttempt, History
from librmq.testing.kit import Elapsed, Kit, NotAwaitedError, ProcessStateError, UnknownGroupError, UnsoundStoreError
from librmq.testing.process import Process, ProcessDied
from librmq.testing.undelivered import UndeliveredWarning

__all__ = [
    "CrashImages",
    "DeliveryAttempt",
    "Elapsed",
    "Event",
    "Exploration",
    "FailingFiles",
    "Faults",
    "History",
    "Image",
    "Kit",
    "NotAwaitedError",
    "Process",
    "ProcessDied",
    "ProcessStateError",
    "RecordingFiles",
    "UndeliveredWarning",
    "UnknownGroupError",
    "UnsoundStoreError",
    "explore",
]
