"""PySpark's worker daemon, quiet where the JVM closes a socket before a Python worker is done with it.

That is usual: a LIMIT has rows enough, a session ends. PySpark prints a traceback then. Sessions that librmq starts on
one machine run this module instead of ``pyspark.daemon``.
"""

from __future__ import annotations

import socket

from pyspark import daemon

_work = daemon.worker


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Serve the tasks of a connection; 1, which ends the worker, where the JVM has closed it."""
    try:
        status: int = _work(sock, authenticated)
        return status
    except (BrokenPipeError, ConnectionResetError):
        return 1


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
