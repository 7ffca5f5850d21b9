"""What tests of a store, or of an application that embeds one, can use."""

from __future__ import annotations

from librmq.testing.files import Event, FailingFiles, RecordingFiles
from librmq.testing.images import CrashImages, Image

__all__ = ["CrashImages", "Event", "FailingFiles", "Image", "RecordingFiles"]
