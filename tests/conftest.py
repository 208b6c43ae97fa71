"""Fixtures shared by all tests. Imports nothing that loads Triton before the interpreter is chosen."""

from __future__ import annotations

import os
from collections import Counter
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch

torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
if not torch.cuda.is_available():
    # Without a GPU the CUDA kernels run in Triton's interpreter, which must be chosen before Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from sampled import quick, skipped_items  # noqa: E402
from targets import TARGETS, Target, absent  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    import fast_interpreter

    fast_interpreter.install()

_ran: Counter[str] = Counter()
_on_npu: list[int] = []  # kernels that each test ran on npu tensors, of those that ran any (see npu_interpreter.py)


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container whose user is a bare number: no HOME, no entry in the list of users, no cache folder named."""
    for variable in ("HOME", "XDG_CACHE_HOME", "DIYFA_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)

    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr("pwd.getpwuid", unknown)


@pytest.fixture(params=list(TARGETS), scope="session")
def target(request: pytest.FixtureRequest) -> Target:
    """Each backend that is tested here."""
    return TARGETS[request.param]


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of many cases alike some run by default, and some folders are quick (`sampled.py`). On CPU tensors the NPU
    kernels take part in the matrix only: `make test-npu` has all of their tests."""
    for item in skipped_items(items):
        item.add_marker(pytest.mark.slow)
    for item in quick([item for item in items if not any(item.iter_markers("slow"))]):
        item.add_marker(pytest.mark.quick)
    if "npu" not in TARGETS or TARGETS["npu"].device == "npu" or os.environ.get("DIYFA_TEST_BACKENDS"):
        return
    elsewhere = [item for item in items if "[npu-" in item.nodeid and "test_attention_matrix.py" not in item.nodeid]
    elsewhere += [item for item in items if item.nodeid.endswith("[npu]")]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if item not in set(elsewhere)]


class ShowFailures:
    """Prints each failure when it happens: the summary of thousands of tests is minutes away."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.terminal.write_line("")
            self.terminal.section(f"{report.when} of {report.nodeid}", "_", red=True)
            self.terminal.write_line(report.longreprtext)


@pytest.hookimpl(trylast=True)  # once there is a reporter
def pytest_configure(config: pytest.Config) -> None:
    if terminal := config.pluginmanager.get_plugin("terminalreporter"):  # the workers of pytest-xdist have none
        config.pluginmanager.register(ShowFailures(terminal))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        names = [name for name in ("cpu", "cuda", "npu") if f"[{name}" in report.nodeid]
        _ran[names[0] if names else "no backend"] += 1
        if launches := sum(count for name, count in report.user_properties if name == "npu_launches"):
            _on_npu.append(launches)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("diyfa backends")
    for target in TARGETS.values():
        how = "in the Triton interpreter" if target.interpreted else "natively"
        terminalreporter.line(f"{target.backend}: {_ran[target.backend]} tests on {target.device} tensors, {how}")
    terminalreporter.line(f"backend-independent: {_ran['no backend']} tests")
    if _on_npu:
        where = f"on the real torch_npu {version('torch_npu')} over host memory"
        terminalreporter.line(f"npu tensors: {len(_on_npu)} tests ran {sum(_on_npu)} kernels {where}")
    for line in absent():
        terminalreporter.line(f"absent: {line}")
