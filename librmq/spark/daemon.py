"""PySpark's worker daemon, without a traceback when the JVM closes a socket before a Python worker has finished.

The JVM often does so, when a LIMIT has enough rows or a session ends. Sessions that librmq starts on one machine run
this module instead of ``pyspark.daemon``.
"""

from __future__ import annotations

import socket

from pyspark import daemon

_work = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Serve the tasks of a connection; return 1, which ends the worker, if the JVM has closed it."""
    try:
        status: int = _work(sock, authenticated)
        return status
    except (BrokenPipeError, ConnectionResetError):
        return 1


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
