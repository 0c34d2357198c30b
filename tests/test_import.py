"""`import fdbd` costs little: what a program does not use is not imported."""

import subprocess
import sys

import fdbd


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import sys, fdbd, fdbd.cli; assert not {'torch', 'sklearn', 'ray', 'torchvision'} &"
        " set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_first_detector_imports_neither_torchvision_nor_scikit_learn() -> None:
    code = (
        "import sys, fdbd; fdbd.Guard; assert not {'torchvision', 'sklearn', 'ray', 'pandas'} &"
        " set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_guard_imports_the_compiler_of_torch_only_if_a_program_compiles() -> None:
    code = """
import sys, fdbd, torch
guard = fdbd.Guard(torch.nn.Linear(3, 2), "fdbd").fit([torch.randn(8, 3)])
guard.classifier(torch.randn(2, 3))
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there_and_listed() -> None:
    for name in fdbd.__all__:
        assert getattr(fdbd, name) is not None
        assert name in dir(fdbd)


def test_deprecated_paths_are_not_public_names() -> None:
    """Else `from fdbd import *` would warn of names that nobody asked for."""
    assert not {"deploy", "models", "shaping", "statistics"} & set(dir(fdbd))
    code = "import fdbd; assert fdbd.shaping.ReAct is fdbd.ReAct"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(fdbd, "no_such_name")
