"""PySpark's worker daemon, without a traceback when the JVM closes a socket before a Python worker has finished.

The JVM often does so, when a LIMIT has enough rows or a session ends. Sessions that librmq starts on one machine run
this module instead of ``pyspark.daemon``, for tasks and for planning.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Final

from pyspark import daemon

_work = daemon.worker
_CLOSED: Final = (BrokenPipeError, ConnectionResetError)


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Serve the tasks of a connection; return 1, which ends the worker, if the JVM has closed it."""
    sys.unraisablehook = _report
    try:
        status: int = _work(sock, authenticated)
        return status
    except (*_CLOSED, EOFError):  # errors of user code go to the JVM instead
        return 1


def _report(problem: sys.UnraisableHookArgs) -> None:
    """Print an error of an object's end, except the error of a writer to the closed JVM, which Python 3.14 reports."""
    if not isinstance(problem.exc_value, _CLOSED):
        sys.__unraisablehook__(problem)


if __name__ == "__main__":
    os.environ["PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE"] = "true"  # else PySpark prints a failed flush itself
    daemon.worker = worker
    daemon.manager()
