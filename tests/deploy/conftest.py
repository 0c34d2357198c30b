"""What tests of the commands share: the program itself, run in this process."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from fdbd import cli

Run = Callable[..., tuple[int, str, str]]
Result = Callable[..., dict]


@pytest.fixture
def run(capsys) -> Run:
    """`run("score", …)`: exit code, output and errors of the program."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def result(run) -> Result:
    """`result("score", …)`: what the program prints as JSON."""

    def result(*arguments: object) -> dict:
        code, out, err = run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out.splitlines()[-1])

    return result
