"""What tests of a store, or of an application that embeds one, can use."""

from __future__ import annotations

from librmq.testing.files import Event, FailingFiles, RecordingFiles

__all__ = ["Event", "FailingFiles", "RecordingFiles"]
