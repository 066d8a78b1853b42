"""Fixtures, the hypothesis profiles and what the run says at its start and end."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest
import torch

import memopt
from memopt import _libraries

ROOT = Path(__file__).resolve().parent.parent
CI_EXAMPLES = 25


# -- Backends --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Backend:
    """Where a test runs: the name is what `memopt.backend` takes."""

    name: str
    device: torch.device


def _backends(test_file: Path) -> dict[str, Backend]:
    """The backends that `test_file` can run on here, by test id."""
    cpu = torch.device("cpu")
    found = {"reference": Backend("reference", cpu), "cpu": Backend("cpu", cpu)}
    if torch.cuda.is_available():
        cuda = torch.device("cuda")
        kernel = ROOT / "csrc" / "cuda" / f"{test_file.stem.removeprefix('test_')}.cu"
        if kernel.exists():
            found["cuda"] = Backend("cuda", cuda)
        else:
            found["reference-cuda"] = Backend("reference", cuda)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        backends = _backends(Path(metafunc.definition.path))
        metafunc.parametrize("backend", backends.values(), ids=list(backends), indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Runs the test once on every backend; a library that is not loaded is an error, not a skip."""
    with memopt.backend(request.param.name):
        yield request.param


# -- Every test starts alike -----------------------------------------------------------------------


@pytest.fixture(autouse=True)
def same_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seeds the generators; fresh memory holds NaN and 255, so that no test passes on luck."""
    seed = request.config.stash[_SEED]
    random.seed(seed)
    torch.manual_seed(seed)
    threads, default_dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.set_default_dtype(default_dtype)


# -- Property tests: the same examples in every run, or many random ones ---------------------------

_SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--random-examples",
        type=int,
        metavar="N",
        help="run every property test on N random examples rather than on the fixed few",
    )


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    everywhere = hypothesis.settings(
        deadline=None,
        database=None,
        print_blob=True,
        # Fixtures do not change between examples; tensors are slow to draw on a busy machine.
        suppress_health_check=[
            hypothesis.HealthCheck.function_scoped_fixture,
            hypothesis.HealthCheck.too_slow,
        ],
    )
    examples = config.getoption("--random-examples")
    hypothesis.settings.register_profile(
        "ci", everywhere, derandomize=True, max_examples=CI_EXAMPLES
    )
    hypothesis.settings.register_profile(
        "random", everywhere, derandomize=False, max_examples=examples or CI_EXAMPLES
    )
    config.stash[_SEED] = 0
    if examples is None:
        hypothesis.settings.load_profile("ci")
        return
    hypothesis.settings.load_profile("random")
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.SystemRandom().randrange(2**32))
    config.stash[_SEED] = int(config.option.hypothesis_seed)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The table of ops comes last: it looks at what the other files have checked."""
    items.sort(key=lambda item: item.path.name == "test_ops_table.py")


# -- What the run says -----------------------------------------------------------------------------


def pytest_report_header(config: pytest.Config) -> list[str]:
    libraries = ", ".join(f"{name}: {path}" for name, path in _libraries.loaded.items())
    lines = [
        f"memopt {memopt.__version__} from {Path(memopt.__file__).parent}",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads",
        f"libraries: {libraries or 'none loaded'}",
    ]
    if (examples := config.getoption("--random-examples")) is not None:
        seed = config.option.hypothesis_seed
        lines.append(
            f"random examples; to repeat: --random-examples {examples} --hypothesis-seed {seed}"
        )
    return lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = len(terminalreporter.stats.get("skipped", []))
    hardware = "" if torch.cuda.is_available() else "; no GPU here: the cuda backend was not tested"
    terminalreporter.write_line(f"{skipped} skipped{hardware}")
