"""Launches by the launcher of a compiled kernel: a fake one, because Triton's interpreter compiles nothing."""

from typing import Any

import pytest
import torch
from rich.console import Console
from triton import knobs

from ropewalk.kernels import triton_launch
from ropewalk.kernels.triton_launch import Launch, launcher_note
from ropewalk.tools.bench.cpu import show_backends

CPU = torch.device("cpu")


class Launcher:
    """A launcher with the parameters of Triton's."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    # Triton's names, by which the launcher is recognized.
    def __call__(self, gridX, gridY, gridZ, stream, function, *args):  # noqa: N803
        self.calls.append(("launcher", (gridX, gridY, gridZ), stream, function, args))


class OtherLauncher(Launcher):
    def __call__(self, grid, stream, function, *args):
        self.calls.append(("unknown", grid))


class Compiled:
    function, packed_metadata = "binary", "metadata"

    def __init__(self, run: Any) -> None:
        self.run = run


class Kernel:
    """What @triton.jit returns: kernel[grid](...) compiles, launches and returns the compiled kernel."""

    def __init__(self, launcher: type[Launcher] = Launcher) -> None:
        self.calls: list[Any] = []
        self.compiled = Compiled(launcher(self.calls))

    def __getitem__(self, grid: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            self.calls.append(("kernel[grid]", grid, args, options))
            return self.compiled

        return run


def launched(launcher: type[Launcher] = Launcher) -> tuple[Launch, Kernel]:
    kernel = Kernel(launcher)
    return Launch(kernel, 3, (7, 8), {"WIDTH": 4}, 2), kernel


def test_the_first_launch_compiles_and_the_others_use_the_launcher():
    launch, kernel = launched()
    x, y = torch.ones(2), torch.ones(3)
    assert not launch.by_address(0, (x.data_ptr(), y.data_ptr(), 5))
    for _ in range(2):
        launch(CPU, x, y, 5)
    assert launch.by_address(9, (x.data_ptr(), y.data_ptr(), 6))
    first, second, third = kernel.calls
    assert first == ("kernel[grid]", (3, 1, 1), (x, y, 5, 7, 8), {"WIDTH": 4, "num_warps": 2})
    binary = "metadata", None, None, None
    assert second == ("launcher", (3, 1, 1), 0, "binary", (*binary, x.data_ptr(), y.data_ptr(), 5, 7, 8, 4))
    assert third == ("launcher", (3, 1, 1), 9, "binary", (*binary, x.data_ptr(), y.data_ptr(), 6, 7, 8, 4))


def test_an_unknown_launcher_is_never_called():
    launch, kernel = launched(OtherLauncher)
    for _ in range(3):
        launch(CPU, torch.ones(2), 5)
        assert not launch.by_address(0, (1, 5))
    assert [call[0] for call in kernel.calls] == ["kernel[grid]"] * 3


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_see_launches(name):
    launch, kernel = launched()
    launch(CPU, torch.ones(2))
    hooks, hook = getattr(knobs.runtime, name), lambda *_: None
    hooks.add(hook)
    try:
        assert not launch.by_address(0, (1,))
        launch(CPU, torch.ones(2))
    finally:
        hooks.remove(hook)
    launch(CPU, torch.ones(2))
    assert [call[0] for call in kernel.calls] == ["kernel[grid]", "kernel[grid]", "launcher"]


def test_the_installed_launcher_is_known(monkeypatch):
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    assert launcher_note() is None


def test_an_unknown_launcher_is_shown(monkeypatch):
    monkeypatch.setattr(triton_launch, "INTERPRETED", False)
    monkeypatch.setattr("triton.backends.nvidia.driver.CudaLauncher", OtherLauncher)
    note = launcher_note()
    assert note == "launches by kernel[grid], which takes longer: Triton has a launcher with other parameters"
    monkeypatch.setattr("ropewalk.tools.bench.cpu.INTERPRETED", False)
    monkeypatch.setattr("ropewalk.tools.bench.cpu.backend_reasons", lambda: {"triton": None})
    console = Console(width=200, record=True)
    show_backends(console)
    assert console.export_text() == f"triton: ready ({note})\n"
