"""Shell completion of commands, options and choices."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from librmq.cli.syntax import COMMANDS
from tests.cli.stand import Shell

CASES = [
    (["sho"], {"show"}),
    (["dia"], {"diagnose"}),
    (["show", "store", "--gr"], {"--grep"}),
    (["show", "store", "--body", ""], {"text", "json", "hex", "base64", "none"}),
    (["count", "store", "--by", "t"], {"topic", "tag"}),
    (["topic", ""], {"create", "grow", "permit", "delete"}),
    (["show", "sto"], {"store"}),
]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.platform
def test_bash_completes_commands_options_and_files(shell: Shell) -> None:
    script = shell("completion", "bash").out
    for words, _ in CASES:
        quoted = " ".join(f"'{word}'" for word in ["librmq", *words])
        script += f'COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _librmq; echo "${{COMPREPLY[*]}}"\n'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == ""
    assert [set(line.split()) for line in done.stdout.split("\n")[: len(CASES)]] == [found for _, found in CASES]


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_scripts_know_every_command(shell: Shell, name: str) -> None:
    script = shell("completion", name).out
    assert [command for command in COMMANDS if command not in script] == []
    assert "--body" in script or "-l body" in script
