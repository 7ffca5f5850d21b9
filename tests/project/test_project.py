"""The checkout itself: its commands, its part of the reference data, and the code that tests share."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import budget
from tests.conftest import SlowBudget, SlowTime, StoreCopy
from tests.data.cut import cut, spread, spread_each
from tests.programs import POSIX
from tests.reference import CHECKOUT, COMPACT, jsonl, reference, rows, store_folders, unpack_compact


def run_check(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, CHECKOUT / "tools" / "project.py", "check", *words],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )


def fake_python(folder: Path, name: str, version: str, *, is_new: bool, has_venv: bool) -> None:
    """Write a program that answers ``tools/python`` as such a Python would, and then prints its own name."""
    script = folder / name
    script.write_text(
        "#!/bin/sh\n"
        'case "$2" in\n'
        f"*version_info[*) echo {version} ;;\n"
        f"*exit*) exit {int(not is_new)} ;;\n"
        f"*ensurepip*) exit {int(not has_venv)} ;;\n"
        f'*) echo "{name}: $*" ;;\n'
        "esac\n"
    )
    script.chmod(0o755)


def run_finder(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", CHECKOUT / "tools" / "python", "x.py", "two words"],
        env={"PATH": str(path)},
        capture_output=True,
        text=True,
    )


def run_pytest(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder in a separate process, without the pytest variables of this run."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, "."],
        cwd=folder,
        env={**inherited, **variables},
        capture_output=True,
        text=True,
    )


@POSIX
@pytest.mark.platform
def test_commands_can_be_started() -> None:
    for name in ("demo", "check", "tools/python", ".ci/run"):
        if (CHECKOUT / name).exists():  # a source distribution lacks some of them
            assert os.access(CHECKOUT / name, os.X_OK), name


@POSIX
@pytest.mark.parametrize("has_apt", [True, False])
def test_ci_ends_if_database_servers_cannot_be_installed(tmp_path: Path, has_apt: bool) -> None:
    """It continues where nothing can be installed at all, here up to the first other program that is missing."""
    for name in ("bash", "chmod", "dirname", "mktemp", "rm", "tail"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    for name, line in {"id": "echo 0", **({"apt-get": "echo no network; exit 100"} if has_apt else {})}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run([tmp_path / "bash", CHECKOUT / ".ci" / "run"], env=variables, capture_output=True, text=True)
    ended = done.stdout.partition("== database servers")[2].partition(" s)\n")[2]
    if has_apt:
        assert (done.returncode, ended) == (1, "no network\n")
    else:
        assert ended.startswith("no way to install mariadb-server")
        assert "== Node" in ended


@POSIX
@pytest.mark.platform
def test_the_first_python_that_will_do_is_taken(tmp_path: Path) -> None:
    fake_python(tmp_path, "python3", "3.9.2", is_new=False, has_venv=True)
    fake_python(tmp_path, "python3.13", "3.13.0", is_new=True, has_venv=False)
    fake_python(tmp_path, "python3.12", "3.12.1", is_new=True, has_venv=True)
    assert run_finder(tmp_path).stdout == "python3.12: x.py two words\n"


@POSIX
@pytest.mark.platform
@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, "Python 3.11 or later is needed, and this machine has none at all"),
        ("3.9.2", "Python 3.11 or later is needed, and this machine has python3 (3.9.2)"),
        ("3.12.1", "python3 (3.12.1) has no venv module"),
    ],
)
def test_a_missing_python_is_reported_in_a_sentence(tmp_path: Path, version: str | None, said: str) -> None:
    if version:
        fake_python(tmp_path, "python3", version, is_new=version != "3.9.2", has_venv=False)
    found = run_finder(tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert said in found.stderr
    assert len(found.stderr.splitlines()) == 1


def test_a_foreign_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("")
    done = run_check(LIBRMQ_VENV=str(tmp_path))
    assert done.returncode == 2
    assert "was not made by this command" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["pyvenv.cfg"]


def test_a_wheel_that_is_not_there_is_reported(tmp_path: Path) -> None:
    done = run_check("--wheel", str(tmp_path / "no.whl"))
    assert done.returncode == 2
    assert "there is no wheel" in done.stderr


def test_a_small_demo_needs_no_spark(tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    project = tools("project")
    done: list[object] = []
    monkeypatch.setattr(project.Environment, "prepare", lambda place, extras, screen: done.append(extras))
    monkeypatch.setattr(project.Environment, "run", lambda place, command, folder: done.append(command[1:]))
    project.demo(["--small", "there"])
    assert done == [project.SMALL_DEMO_EXTRAS, [project.DEMO, "there"], [project.DEMO_REPORT, "there"]]
    assert "spark" not in project.SMALL_DEMO_EXTRAS


@pytest.mark.parametrize(("small", "installed", "report"), [(0, 0, 0), (2, 0, 0), (0, 3, 0), (0, 3, 1)])
def test_spark_is_installed_beside_the_small_demo(
    tools: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small: int,
    installed: int,
    report: int,
) -> None:
    """If its installation fails, the report is shown still."""
    project = tools("project")
    done: list[object] = []

    class Beside:
        def __init__(self, command: list[object], *_: object) -> None:
            done.append({*command[3:]})

        def __enter__(self) -> Beside:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def wait(self) -> int:
            done.append("wait")
            return installed

    def run(place: object, command: list[object], folder: object) -> int:
        done.append(command[1])
        return report if command[1] == project.DEMO_REPORT else small

    monkeypatch.setattr(project, "Beside", Beside)
    monkeypatch.setattr(project.Environment, "prepare", lambda place, extras, screen: done.append(extras))
    monkeypatch.setattr(project.Environment, "extras", lambda place: project.SMALL_DEMO_EXTRAS)
    monkeypatch.setattr(project.Environment, "run", run)
    assert project.demo([]) == (small or installed)
    beside = [project.SMALL_DEMO_EXTRAS, project.DEMO_EXTRAS, project.DEMO, "wait"]
    later = [project.DEMO_REPORT, project.DEMO_ON_SPARK]  # the report imports PyArrow if it finds a part of it
    assert done == (beside[:3] if small else [*beside, later[0]] if installed else [*beside, *later])
    shown = capsys.readouterr().out
    assert ("its installation failed" in shown) is bool(installed)
    assert ("delete" in shown) is bool(report)


def test_packages_of_an_unknown_extra_are_refused(
    tools: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tools("project").main(["packages", "cli", "sprak"]) == 2
    assert "no extra sprak" in capsys.readouterr().err


def test_check_prints_its_arguments() -> None:
    done = run_check("--help")
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("--quick", "--lint", "--fix", "--keep-going", "--wheel"))


def test_only_the_quick_check_ends_at_a_failing_test(tools: Callable[[str], ModuleType]) -> None:
    project = tools("project")
    words = project.pytest_words
    assert words([], quick=True, keep_going=False)[-3:] == ["-m", project.LEFT_OUT_QUICK, "-x"]
    assert "-x" not in words([], quick=True, keep_going=True)
    assert words([], quick=False, keep_going=False)[-2:] == ["-m", "not bench"]


def test_a_check_keeps_bytecode(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without bytecode each process would compile every module again, and pytest would rewrite its tests again."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in tools("environment").Environment(tmp_path).variables()


def test_the_quick_check_tries_a_part_from_first_to_last(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = range(10)
    monkeypatch.setattr(budget, "run", budget.Run(quick=False))
    assert (budget.examples(100), list(budget.some(cases))) == (100, list(cases))
    monkeypatch.setattr(budget, "run", budget.Run(quick=True))
    assert (budget.examples(100), list(budget.some(cases))) == (12, [0, 8, 9])
    assert (budget.examples(1), list(budget.some([]))) == (1, [])


def test_ci_draws_a_third_and_numbers_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "run", budget.Run(quick=False, in_ci=True))
    assert (budget.examples(100), list(budget.some(range(10))), budget.step()) == (33, [*range(10)], 1)


@pytest.mark.slow
def test_long_tests_begin_first_and_modules_stay_together(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(CHECKOUT)!r})\n"
        "from tests.conftest import pytest_collect_directory, pytest_collection_modifyitems\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    servers\n")
    for name, mark in (
        ("a", ""),
        ("b", "@pytest.mark.servers\n@pytest.mark.xdist_group('db')\n"),
        ("c", "@pytest.mark.slow\n"),
    ):
        (tmp_path / f"test_{name}.py").write_text(
            f"import pytest\n{mark}@pytest.mark.parametrize('number', range(3))\ndef test_it(number): pass\n"
        )
    child = run_pytest(tmp_path, "-n", "1", "--dist", "loadgroup", "--no-loadscope-reorder", "-v")
    passed = re.findall(r"PASSED test_(\w)\.py\S+?\[\d\](\S*)", child.stdout)
    assert passed == [*3 * [("b", "@db")], *3 * [("c", "")], *3 * [("a", "@test_a.py")]]


@pytest.mark.thorough
def test_of_many_cases_the_quick_check_runs_every_eighth(tools: Callable[[str], ModuleType], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(CHECKOUT)!r})\nfrom tests.conftest import pytest_collection_modifyitems\n"
    )
    marks = "".join(f"    {mark}\n" for mark in ("bench", "slow", "spark", "thorough", "many"))
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{marks}")
    cases = "@pytest.mark.parametrize('number', range(17))\n"
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n@pytest.mark.many\n{cases}def test_many(number): pass\n"
        "@pytest.mark.many\ndef test_one(): pass\n@pytest.mark.thorough\ndef test_left_out(): pass\n"
    )
    child = run_pytest(tmp_path, "-v", "-m", tools("project").LEFT_OUT_QUICK)
    assert re.findall(r"test_it.py::(\S+) PASSED", child.stdout) == [
        "test_many[0]",
        "test_many[8]",
        "test_many[16]",
        "test_one",
    ]
    assert "4 passed, 15 deselected" in child.stdout


def test_a_file_that_is_named_runs_in_one_process(tools: Callable[[str], ModuleType]) -> None:
    words = tools("project").pytest_words
    assert words(["tests/fuzz/test_formats.py::x"], quick=False, keep_going=False)[-3:] == [
        "-n",
        "0",
        "tests/fuzz/test_formats.py::x",
    ]
    assert "0" not in words(["-k", "tests", "tests/fuzz"], quick=False, keep_going=False)


@pytest.mark.parametrize("words", [["tests", "--ignore=tests/store"], ["--ignore=tests/store"]])
def test_a_folder_that_is_named_is_tested_alone(
    tools: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """CI leaves out style, layers and types in this way where an earlier check has looked at the same code."""
    project = tools("project")
    begun: list[str] = []

    def pytest_alone(place: object, command: list[str]) -> int:
        begun.append(command[3])
        return 0

    def program_alone(place: object, step: object, program: Any) -> tuple[int, str]:
        begun.append(program.step)
        return 0, ""

    monkeypatch.setattr(project.Environment, "prepare", lambda place, extras, screen: None)
    monkeypatch.setattr(project.Environment, "run", pytest_alone)
    monkeypatch.setattr(project, "run", program_alone)
    assert project.check(["--quick", *words]) == 0
    others = set() if "tests" in words else {"style", "layers", "types"}
    assert set(begun) == {"pytest", *others}


@pytest.mark.spark
def test_java_knows_the_options_of_a_short_session(tools: Callable[[str], ModuleType]) -> None:
    """And prints no warning, which each program on Spark would show."""
    pytest.importorskip("pyspark")
    from librmq.spark.session import java_home

    java = [java_home() / "bin" / "java", *tools("environment").SHORT_JAVA.split(), "-version"]
    done = subprocess.run(java, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()


@pytest.mark.thorough
def test_in_ci_a_skip_is_a_failure_unless_marked(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(CHECKOUT)!r})\n"
        "from tests.conftest import pytest_make_collect_report, pytest_runtest_makereport\n"
    )
    (tmp_path / "test_module.py").write_text("import pytest\npytest.skip('all of it', allow_module_level=True)\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_skips(): pytest.skip('no reason at all')\n"
        "@pytest.mark.platform\n"
        "def test_may_skip(): pytest.skip('another system')\n"
        "@pytest.mark.xfail\n"
        "def test_may_fail(): assert False\n"
        "def test_passes(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    platform\n")
    tallies = []
    for ci in ("true", ""):
        child = run_pytest(tmp_path, "--continue-on-collection-errors", CI=ci)
        tallies.append(child.stdout.splitlines()[-1].strip("= ").rpartition(" in ")[0])
    assert tallies == ["1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error", "1 passed, 3 skipped, 1 xfailed"]


def test_the_budget_of_a_slow_test_has_a_floor_and_a_ceiling() -> None:
    nothing, plenty = SlowBudget(0), SlowBudget(1000)
    assert list(nothing.rounds(10, at_least=3)) == [0, 1, 2]
    assert list(plenty.rounds(10, "points")) == list(range(10))
    assert nothing.reached[0].startswith("3 of 10 rounds in ")
    assert plenty.reached[0].startswith("10 of 10 points in ")


def test_slow_tests_share_the_remaining_time(tmp_path: Path) -> None:
    here, there = (SlowTime(tmp_path, 100, 4) for _ in range(2))  # two processes
    assert here.share("a") == 25
    assert there.share("b") == 25
    here.note("a", 5)  # it was quicker, so the others get more
    assert here.share("c") == 35
    there.note("b", 90)  # it took longer than its share
    assert there.share("d") == 0


@pytest.mark.slow
def test_notes_of_tests_come_from_all_processes(tmp_path: Path) -> None:
    """The summary has figures, the progress of slow tests, and each reason for skips once."""
    (tmp_path / "conftest.py").write_text(
        f"import sys\nsys.path.append({str(CHECKOUT)!r})\n"
        "from tests.conftest import (\n"
        "    figure, pytest_collection_finish, pytest_collection_modifyitems, pytest_collectreport,\n"
        "    pytest_runtest_logreport, pytest_terminal_summary, slow_budget, slow_time,\n"
        ")\n"
    )
    (tmp_path / "test_module.py").write_text("import pytest\npytest.skip('no Spark', allow_module_level=True)\n")
    (tmp_path / "test_some.py").write_text(
        "import os\n"
        "import pytest\n"
        "def test_measures(figure): figure('42 of 42')\n"
        "@pytest.mark.parametrize('number', range(4))\n"
        "def test_takes_time(number, slow_budget):\n"
        "    assert slow_budget.seconds > 20\n"
        "    assert list(slow_budget.rounds(3, 'turns')) == [0, 1, 2]\n"
        "@pytest.mark.spark\n"
        "@pytest.mark.parametrize('number', range(9))\n"
        "def test_spark(number, figure): figure(f\"by {os.environ.get('PYTEST_XDIST_WORKER')}\")\n"
        "@pytest.mark.parametrize('number', range(9))\n"
        "def test_data(number): pytest.skip(f'reference data: no part {number}')\n"
        "def test_other(): pytest.skip('no Spark')\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    spark\n")
    child = run_pytest(tmp_path, "-n", "2", "--dist", "loadgroup", RMQ_SLOW_SECONDS="100", CI="")
    assert child.returncode == 0, child.stdout
    lines = child.stdout.splitlines()
    assert lines.count("42 of 42") == 1
    assert len({line for line in lines if line.startswith("by ")}) == 1
    assert sum(line.startswith("by ") for line in lines) == 9
    assert [line.partition(" in ")[0] for line in lines if "turns" in line] == [
        f"test_some.py::test_takes_time[{number}]: 3 of 3 turns" for number in range(4)
    ]
    told = [line for line in lines if line.startswith("skipped ")]
    assert told[0].startswith("skipped 9: this run has only a part of the reference data")
    assert told[1:] == ["skipped 2: no Spark"]


def test_rows_are_spread_from_first_to_last() -> None:
    assert spread(list(range(100)), 4) == [0, 33, 66, 99]
    assert spread([1, 2], 4) == [1, 2]
    assert spread_each(list(range(10)), lambda number: number % 2, 2) == [0, 1, 8, 9]


@pytest.mark.parametrize("folder", store_folders())
def test_store_folders_hold_a_store_and_its_expected_results(folder: Path) -> None:
    assert (folder / "store" / "commitlog").is_dir()
    assert len(rows(folder, "config")) == 1
    assert sum(len(rows(folder, kind)) for kind in {row["type"] for row in jsonl(folder / "expected.jsonl")}) == len(
        jsonl(folder / "expected.jsonl")
    )


@pytest.mark.parametrize("folder", store_folders())
def test_a_copy_of_a_store_can_be_spoilt(folder: Path, store_copy: StoreCopy) -> None:
    copy = store_copy(folder)
    assert copy != store_copy(folder)
    log = sorted((copy / "commitlog").iterdir())[0]
    original = (folder / "store" / "commitlog" / log.name).read_bytes()
    with log.open("r+b") as file:
        file.write(b"spoilt")
    (copy / "commitlog" / "new").touch()
    assert (folder / "store" / "commitlog" / log.name).read_bytes() == original
    assert not (folder / "store" / "commitlog" / "new").exists()


class TestCompactPart:
    """``tests/data`` matches its README, whichever reference data this run uses."""

    @pytest.fixture
    def unpacked(self, tmp_path: Path) -> Path:
        unpack_compact(COMPACT, tmp_path / "compact")
        return tmp_path / "compact"

    def test_it_is_small(self) -> None:
        assert sum(path.stat().st_size for path in COMPACT.rglob("*") if path.is_file()) < 300 * 1024

    def test_it_has_the_layout_of_the_whole(self, unpacked: Path) -> None:
        names = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
        assert names >= {
            "allocate.jsonl",
            "bloom.json",
            "encoding.json",
            "filter/cases-5.3.3.jsonl",
            "filter/cases.jsonl",
            "store-basic/expected.jsonl",
            "store-basic/ops.jsonl",
            "store-basic/put_results.jsonl",
            "store-basic/store/checkpoint",
            "store-basic/store/commitlog/00000000000000000000",
            "store-basic/store/consumequeue/订单主题/0/00000000000000000000",
        }

    def test_its_store_is_complete(self, unpacked: Path) -> None:
        store = unpacked / "store-basic"
        (after_load, _) = rows(store, "store")
        assert len(rows(store, "cq")) == sum(
            queue["max_offset"] - queue["min_offset"] for queue in after_load["queues"]
        )
        assert len(jsonl(store / "ops.jsonl")) == len(jsonl(store / "put_results.jsonl"))
        assert sum(log.stat().st_size for log in (store / "store/commitlog").iterdir()) >= after_load["max_phy_offset"]

    @pytest.mark.thorough
    def test_cutting_it_again_changes_nothing(self, unpacked: Path, tmp_path: Path) -> None:
        again = tmp_path / "again"
        cut(unpacked, again)
        for path in again.rglob("*"):
            if path.is_file() and path.suffix != ".xz":  # the compressed size depends on the version of xz
                assert path.read_bytes() == (COMPACT / path.relative_to(again)).read_bytes(), path.name
        with (
            tarfile.open(again / "store-basic.tar.xz") as new,
            tarfile.open(COMPACT / "store-basic.tar.xz") as old,
        ):
            assert new.getnames() == old.getnames()
            for name in old.getnames():
                contents = [archive.extractfile(name) for archive in (new, old)]
                assert len({content.read() for content in contents if content}) == 1, name


def test_reference_data_are_named_in_the_header() -> None:
    assert reference().folder.is_dir()
    assert reference().origin
