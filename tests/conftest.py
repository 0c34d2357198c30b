"""What all tests share: repeatable property tests, and the program itself, run in this process.

Property tests draw the same examples in every run, so that a run's result says something of the code alone;
`pytest --hypothesis-profile=default` draws new ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import settings

from fdbd import cli

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

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
