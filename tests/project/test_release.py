"""A release has what it should have: its changelog, and the files in its wheel and source distribution."""

from __future__ import annotations

import importlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from tests.programs import POSIX
from tests.reference import CHECKOUT

WHEEL = ["librmq/__init__.py", "librmq/py.typed", "pytest_librmq.py", "librmq-0.1.0.dist-info/licenses/LICENSE"]


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    return importlib.import_module("release")


def test_the_changelog_is_cut_at_a_version(release: ModuleType) -> None:
    text = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- This.\n\n## [0.1.0] - 2026-11-21\n"
    assert release.cut_changelog(text, "0.2.0", "2026-12-24") == (
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-24\n\n### Added\n\n- This.\n\n## [0.1.0] - 2026-11-21\n"
    )
    prepared = "## [Unreleased]\n\n## [0.1.0] - 2026-11-21\n\n- This.\n"
    assert release.cut_changelog(prepared, "0.1.0", "2026-12-24") == prepared.replace("11-21", "12-24")
    assert release.cut_changelog(text, "0.1.0", "2026-12-24") == (
        "# Changelog\n\n## [Unreleased]\n\n## [0.1.0] - 2026-12-24\n\n### Added\n\n- This.\n"
    )
    two = text + "\n- That.\n\n## [0.0.9] - 2026-11-20\n\n- Old.\n"
    assert release.cut_changelog(two, "0.1.0", "2026-12-24").endswith(
        "- That.\n\n### Added\n\n- This.\n\n## [0.0.9] - 2026-11-20\n\n- Old.\n"
    )
    with pytest.raises(release.ReleaseError, match=r"a heading for 0\.0\.9 already"):
        release.cut_changelog(two, "0.0.9", "2026-12-24")
    with pytest.raises(release.ReleaseError, match="nothing to release"):
        release.cut_changelog("## [Unreleased]\n\n## [0.1.0]\n", "0.2.0", "2026-12-24")


@pytest.mark.parametrize(
    ("names", "faults"),
    [
        (WHEEL, []),
        ([*WHEEL, "tests/conftest.py"], ["the wheel has tests/conftest.py, which is not part of the library"]),
        ([*WHEEL, "benchmarks/store.py"], ["the wheel has benchmarks/store.py, which is not part of the library"]),
        (WHEEL[:1] + WHEEL[2:], ["the wheel lacks librmq/py.typed"]),
        (WHEEL[:-1], ["the wheel lacks the licence"]),
    ],
)
def test_a_wheel_has_the_library_alone(release: ModuleType, names: list[str], faults: list[str]) -> None:
    assert release.faults_of_wheel(names, ["librmq/__init__.py", "librmq/py.typed"]) == faults


def test_a_source_distribution_has_what_the_check_needs(release: ModuleType) -> None:
    names = [f"librmq-0.1.0/{name}" for name in release.IN_SDIST]
    assert release.faults_of_sdist(names, [".github/workflows/check.yml", ".gitignore"]) == []
    assert release.faults_of_sdist(names, ["tests/new.py"]) == ["the source distribution lacks tests/new.py"]
    assert release.faults_of_sdist(names[1:], []) == ["the source distribution lacks check"]


def test_every_extra_is_installed_and_used(release: ModuleType) -> None:
    assert set(release.USES) - {""} == release.extras()


def test_each_installation_has_a_line(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def watch(command: list[object], step: object, **_: object) -> tuple[int, str]:
        return int("import isal" in command), "no isal"

    monkeypatch.setattr(release, "watch", watch)
    with pytest.raises(release.ReleaseError, match="-c import isal\nno isal"):
        release.install_each(tmp_path / "librmq.whl", {"": "import librmq", "fast": "import isal", "cli": ""})
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"install +ok +\d+ s  1 of 3: without extras", first)
    assert re.fullmatch(r"install +FAILED +\d+ s  2 of 3: with the extra fast", second)


def test_a_release_ignores_settings_of_the_caller(release: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of checks switches the compiled core off, which a release tries."""
    monkeypatch.setenv("LIBRMQ_CORE", "off")
    assert release.run([sys.executable, "-c", "import os; print(os.environ.get('LIBRMQ_CORE'))"]) == "None\n"


def test_the_core_has_the_licence_of_librmq(release: ModuleType) -> None:
    core = release.CORE_FILE.with_name("LICENSE")
    assert core.read_bytes() == (release.CHECKOUT / "LICENSE").read_bytes()


def test_the_core_has_the_version_of_librmq(release: ModuleType) -> None:
    (core,) = release.CORE_VERSION.findall(release.CORE_FILE.read_text("utf-8"))
    (librmq,) = release.VERSION.findall(release.VERSION_FILE.read_text("utf-8"))
    assert core == librmq


def test_a_release_changes_every_version(release: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CHANGELOG", "VERSION_FILE", "CORE_FILE", "PROJECT_FILE"):
        monkeypatch.setattr(release, name, shutil.copy(getattr(release, name), tmp_path / name))
    for name in ("check_files", "install"):
        monkeypatch.setattr(release, name, lambda *_: None)
    origin = "origin\tgit@example.org:shop/librmq.git (fetch)\norigin\tgit@example.org:shop/librmq.git (push)\n"
    monkeypatch.setattr(release, "run", lambda command: origin if "remote" in command else "")
    dist = tmp_path / "dist"
    dist.mkdir()
    (dist / "librmq-9.8.7.whl").touch()
    release.CHANGELOG.write_text("## [Unreleased]\n\n- This.\n", "utf-8")
    release.release("9.8.7", dist)
    assert release.VERSION.findall(release.VERSION_FILE.read_text("utf-8")) == ["9.8.7"]
    assert release.CORE_VERSION.findall(release.CORE_FILE.read_text("utf-8")) == ["9.8.7"]
    assert "## [9.8.7]" in release.CHANGELOG.read_text("utf-8")
    project = tomllib.loads(release.PROJECT_FILE.read_text("utf-8"))["project"]
    assert "librmq-core==9.8.7" in project["optional-dependencies"]["fast"]
    assert project["urls"]["Changelog"] == "https://example.org/shop/librmq/blob/HEAD/CHANGELOG.md"


@pytest.mark.parametrize(
    ("origin", "address"),
    [
        ("https://example.org/shop/librmq.git", "https://example.org/shop/librmq"),
        ("https://example.org/shop/librmq", "https://example.org/shop/librmq"),
        ("ssh://git@example.org/shop/librmq.git", "https://example.org/shop/librmq"),
        ("/home/ann/librmq", None),
        ("https://ann:secret@example.org/shop/librmq", None),
    ],
)
def test_a_package_names_a_public_repository(release: ModuleType, origin: str, address: str | None) -> None:
    text = release.with_urls("[project]\nname = 'librmq'\n\n[project.scripts]\n", f"origin\t{origin} (push)\n")
    assert tomllib.loads(text)["project"].get("urls", {}).get("Repository") == address
    assert release.with_urls(text, f"origin\t{origin} (push)\n") == text


def test_a_version_is_released_once(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "run", lambda command: "v9.8.7\n" if "tag" in command else "")
    assert release.main(["9.8.7", "--dist", str(tmp_path)]) == 1
    assert "tag v9.8.7 is there already" in capsys.readouterr().err


def test_a_clone_with_changes_is_not_released(
    release: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "run", lambda command: " M README.md")
    assert release.main(["0.2.0", "--dist", str(tmp_path)]) == 1
    assert "commit them first" in capsys.readouterr().err


def test_the_release_command_explains_itself() -> None:
    command = [sys.executable, str(CHECKOUT / "tools" / "release.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "publishes nothing" in done.stdout


@POSIX
@pytest.mark.parametrize(
    ("name", "said"), [("SIGINT", "interrupted"), ("SIGTERM", "terminated"), ("SIGHUP", "terminated")]
)
def test_a_release_that_is_ended_ends_its_programs(tmp_path: Path, name: str, said: str) -> None:
    number = signal.Signals[name]
    os.mkfifo(lives := tmp_path / "lives")
    (tmp_path / "librmq-9.8.7.whl").touch()
    pip = f"import signal; held = open({str(lives)!r}, 'wb', buffering=0); held.write(b'x'); signal.pause()"
    outer = (
        f"import os, signal, sys\nsys.path.insert(0, {str(CHECKOUT / 'tools')!r})\nimport release\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        f"command = [sys.executable, '-c', {pip!r}]\n"
        "release.install = lambda *_: release.watch(command, None, folder='.', variables=os.environ)\n"
        f"sys.exit(release.main(['--install', '--dist', {str(tmp_path)!r}]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", outer], stderr=subprocess.PIPE, text=True, process_group=0)
    with lives.open("rb", buffering=0) as held:
        assert held.read(1) == b"x"
        os.killpg(process.pid, number)
        assert (process.communicate(timeout=60)[1], process.returncode) == (f"release: {said}\n", 128 + number)
        assert select.select([held], [], [], 20)[0], "the installer still holds its end"
        assert held.read() == b""


def test_the_lowest_versions_are_those_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CHECKOUT / "tools")
    pins = importlib.import_module("lowest").lowest()
    wanted = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    assert {line.replace(">=", "==") for line in wanted} <= set(pins)
    assert {pin.partition("==")[0] for pin in pins} >= {"SQLAlchemy", "pyarrow", "fsspec", "redis", "isal"}
