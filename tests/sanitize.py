"""Runs the op tests on CPU kernels that are built with AddressSanitizer and UBSan.

    python tests/sanitize.py [pytest arguments]

The sanitizers must first report two deliberate faults, so that a silent run means something.
Needs GCC or Clang with its sanitizer runtimes, on Linux.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch

from memopt._libraries import CPU_LEVELS

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "sanitize"
CXX = os.environ.get("CXX", "c++")

FAULTS = r"""
extern "C" float read(const float* data, long i) { return data[i]; }
extern "C" int add(int a, int b) { return a + b; }
"""

# Reads one element past a tensor's end, in memory of torch's own allocator; overflows an int.
USE_FAULTS = """
import ctypes, sys, torch
faults = ctypes.CDLL(sys.argv[1])
faults.read.restype = ctypes.c_float
data = torch.ones(4096)
if sys.argv[2] == "address":
    faults.read(ctypes.c_void_p(data.data_ptr()), ctypes.c_long(int(sys.argv[3])))
else:
    faults.add(2**31 - 1, int(sys.argv[3]))
print("survived")
"""


def runtime(name: str) -> str:
    """The path of a compiler runtime library."""
    found = subprocess.run(
        [CXX, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"sanitize: {CXX} has no {name}")
    return os.path.realpath(found)


def environment(level: str) -> dict[str, str]:
    return {
        **os.environ,
        "MEMOPT_SANITIZE": "1",
        "MEMOPT_NO_CUDA": "1",
        "MEMOPT_CPU_LEVELS": level,
    }


def preloaded() -> dict[str, str]:
    """Python is not built with the sanitizer, whose runtime then has to come first."""
    return {
        **os.environ,
        # With libstdc++, whose throw it intercepts.
        "LD_PRELOAD": f"{runtime('libasan.so')}:{runtime('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "MEMOPT_LIBRARY_DIR": str(BUILD / "lib" / "memopt"),
        "PYTHONUNBUFFERED": "1",
    }


def build(level: str) -> None:
    folders = ["--build-lib", str(BUILD / "lib"), "--build-temp", str(BUILD / "temp")]
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *folders],
        cwd=ROOT,
        env=environment(level),
        check=True,
    )


def prove_awake(level: str) -> None:
    """Compile two faults with the flags of the kernels, and see both reported."""
    os.environ.update(environment(level))
    import setuptools

    setuptools.setup = lambda **_: None
    (extension,) = runpy.run_path(str(ROOT / "setup.py"))["CPU"]
    flags = [*extension.extra_compile_args["cxx"], *extension.extra_link_args]
    source, library = BUILD / "faults.cpp", BUILD / "faults.so"
    source.write_text(FAULTS)
    subprocess.run(
        [CXX, "-shared", "-fPIC", *flags, "-fvisibility=default", str(source), "-o", str(library)],
        check=True,
    )
    for kind, harmless, fault, report in (
        ("address", 4095, 4096, "AddressSanitizer: heap-buffer-overflow"),
        ("undefined", 0, 1, "signed integer overflow"),
    ):
        for value in (harmless, fault):
            result = subprocess.run(
                [sys.executable, "-c", USE_FAULTS, str(library), kind, str(value)],
                env=preloaded(),
                capture_output=True,
                text=True,
            )
            survived = result.stdout.strip() == "survived" and result.returncode == 0
            reported = report in result.stderr and result.returncode != 0
            if survived == (value == fault) or reported != (value == fault):
                raise SystemExit(
                    f"sanitize: the {kind} sanitizer sleeps: {value} gave exit status "
                    f"{result.returncode}, {result.stdout}{result.stderr[-2000:]}"
                )
    print("sanitize: both sanitizers report a deliberate fault", flush=True)


def main(arguments: list[str]) -> int:
    level = CPU_LEVELS.get(torch.backends.cpu.get_cpu_capability(), "baseline")
    BUILD.mkdir(parents=True, exist_ok=True)
    print(f"sanitize: building the {level} kernels in {BUILD}", flush=True)
    build(level)
    prove_awake(level)
    ops = sorted(p.stem for p in (ROOT / "memopt/ops").glob("*.py") if not p.stem.startswith("_"))
    files = [str(ROOT / f"tests/test_{op}.py") for op in ops]
    # The reference is not compiled, and torch's own compiler and opcheck run no more of our code.
    selected = ["-k", "not reference and not compile and not opcheck"]
    # The sanitizers write to file descriptor 2 and end the process: pytest must not hold that back.
    command = [sys.executable, "-m", "pytest", "-q", "--capture=sys", *selected]
    status = subprocess.run([*command, *files, *arguments], cwd=ROOT, env=preloaded()).returncode
    if status:
        print("sanitize: run `python tests/sanitize.py -v` to see in which test", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
