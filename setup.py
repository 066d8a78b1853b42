"""Builds the kernel libraries. Metadata is in pyproject.toml.

Kernels include only torch's stable headers (torch/csrc/stable, torch/headeronly), so one build
serves every Python >= 3.10 and every torch >= 2.10. Nothing here asks whether a GPU is present.

Environment variables:
    MEMOPT_NO_CUDA=1       do not build the CUDA library
    MEMOPT_FORCE_CUDA=1    a missing CUDA toolkit is an error
    MEMOPT_CPU_LEVELS      CPU libraries to build, e.g. "baseline,avx2" (default: all)
    MEMOPT_SANITIZE=1      build with AddressSanitizer and UndefinedBehaviorSanitizer
    CUDA_HOME              the CUDA toolkit, where it is not found by itself
    TORCH_CUDA_ARCH_LIST   GPU architectures (default: all that nvcc and torch know from 7.5 on)
    MAX_JOBS               compiler processes at once (default: by cores and memory)
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch
from setuptools import setup
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # torch 2.10
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
LEVELS = {"baseline": []}
if IS_X86:
    LEVELS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    LEVELS["avx512"] = [
        *LEVELS["avx2"],
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"),
    ]
# No contraction to FMA: quantised codes must be the same bits at every level and on every device.
CXX_FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
CXX_FLAGS += ["-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-Wno-psabi"]
DEFAULT_ARCHITECTURES = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0")


def sources(folder: str, *suffixes: str) -> list[str]:
    """Every source in csrc/<folder>: adding an op adds a file and edits nothing here."""
    files = sorted(p for p in (ROOT / "csrc" / folder).iterdir() if p.suffix in suffixes)
    return [p.relative_to(ROOT).as_posix() for p in files]


def headers() -> list[str]:
    return sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*.*h"))


# -- CPU


def cpu_extensions() -> list:
    wanted = os.environ.get("MEMOPT_CPU_LEVELS", ",".join(LEVELS)).split(",")
    if unknown := set(wanted) - set(LEVELS):
        raise SystemExit(
            f"MEMOPT_CPU_LEVELS: unknown {sorted(unknown)}, needs some of {list(LEVELS)}"
        )
    sanitize, link = [], []
    if os.environ.get("MEMOPT_SANITIZE") == "1":
        sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"]
        sanitize += ["-fno-omit-frame-pointer"]
        link = ["-fsanitize=address,undefined"]
    return [
        cpp_extension.CppExtension(
            f"memopt._cpu_{level}",
            sources("cpu", ".cpp"),
            depends=headers(),
            py_limited_api=True,
            extra_compile_args={"cxx": [STABLE_ABI, *CXX_FLAGS, *LEVELS[level], *sanitize]},
            extra_link_args=link,
        )
        for level in wanted
    ]


# -- CUDA


def cuda_home() -> str | None:
    """The CUDA toolkit's root. `nvcc` on PATH may be a wrapper script, so nvcc itself is asked."""
    asked = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [asked]
    if not asked and (nvcc := shutil.which("nvcc")):
        dry_run = subprocess.run(
            [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True
        )
        if match := re.search(r"^#\$ TOP=(.+)$", dry_run.stderr, re.MULTILINE):
            candidates.append(os.path.realpath(match.group(1).strip()))
        candidates.append(str(Path(os.path.realpath(nvcc)).parent.parent))
    if not asked:
        candidates.append("/usr/local/cuda")
    for home in filter(None, candidates):
        if (Path(home) / "bin/nvcc").exists() and (Path(home) / "include/cuda_runtime.h").exists():
            return home
    return None


def architectures(home: str) -> str:
    listed = subprocess.run([f"{home}/bin/nvcc", "--list-gpu-code"], capture_output=True, text=True)
    known = [a for a in DEFAULT_ARCHITECTURES if f"sm_{a.replace('.', '')}\n" in listed.stdout]
    return ";".join(known) + "+PTX"


def stub_library(folder: Path) -> str:
    """An empty libtorch_cuda.so to link against where torch itself has none (a CPU-only wheel)."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "libtorch_cuda.so"
    command = [os.environ.get("CXX", "c++"), "-shared", "-x", "c++", os.devnull, "-o", str(target)]
    subprocess.run([*command, "-Wl,-soname,libtorch_cuda.so"], check=True)
    return str(folder)


def cuda_extensions() -> tuple[list, str]:
    """The CUDA library, or none; and the decision in words."""
    if os.environ.get("MEMOPT_NO_CUDA") == "1":
        return [], "not built: MEMOPT_NO_CUDA=1 was set"
    home = cuda_home()
    if home is None:
        asked = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
        where = f" in CUDA_HOME={asked}" if asked else ""
        why = f"no CUDA toolkit was found{where}; set CUDA_HOME to one that holds bin/nvcc"
        if os.environ.get("MEMOPT_FORCE_CUDA") == "1":
            raise SystemExit(f"memopt: MEMOPT_FORCE_CUDA=1, but {why}")
        return [], f"not built: {why}"
    # torch sets this to None in its CPU-only wheel and then refuses .cu sources.
    cpp_extension.CUDA_HOME = home
    # torch refuses a toolkit whose major version is not its own. This library links cudart
    # statically and shares no C++ types with torch, so that does not matter here.
    cpp_extension._check_cuda_version = lambda *_: None
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", architectures(home))
    library_dirs = [p for p in (f"{home}/lib64", f"{home}/lib") if Path(p).is_dir()]
    if torch.version.cuda is None:
        library_dirs.append(stub_library(ROOT / "build" / "stub"))
    extension = cpp_extension.CppExtension(
        "memopt._cuda",
        sources("cuda", ".cu"),
        depends=headers(),
        py_limited_api=True,
        include_dirs=[f"{home}/include"],
        library_dirs=library_dirs,
        libraries=["cudart_static", "rt", "dl", "pthread"],
        define_macros=[("USE_CUDA", None)],
        extra_compile_args={
            "cxx": [STABLE_ABI],
            "nvcc": [STABLE_ABI, "-O3", "-fmad=false", "-Xcompiler=-fvisibility=hidden"],
        },
        extra_link_args=["-Wl,--no-as-needed", "-ltorch_cuda"],
    )
    return [extension], f"built with {home} for {os.environ['TORCH_CUDA_ARCH_LIST']}"


# -- Build


def jobs() -> int:
    """One compiler a core, and 1.5 GB of memory for each."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        cores = min(cores, int(memory // 1.5e9))
    return max(1, cores)


def source_digest() -> str:
    """Names the sources a library is built from, in the loader's own words."""
    spec = importlib.util.spec_from_file_location("libraries", ROOT / "memopt/_libraries.py")
    libraries = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(libraries)
    return libraries.source_digest(ROOT)


class BuildExtension(cpp_extension.BuildExtension):
    """torch's build, with a folder of objects for each library and a record of what was built."""

    def build_extension(self, extension) -> None:
        shared = self.build_temp
        self.build_temp = str(Path(shared) / extension.name)  # the same sources at several levels
        super().build_extension(extension)
        self.build_temp = shared

    def run(self) -> None:
        print(f"memopt: CUDA library {CUDA_DECISION}", flush=True)
        os.environ.setdefault("MAX_JOBS", str(jobs()))
        super().run()
        folder = Path(self.get_ext_fullpath("memopt._cpu_baseline")).parent
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "_build_info.json").write_text(json.dumps(BUILD_INFO, indent=2) + "\n")


CPU = cpu_extensions()
CUDA, CUDA_DECISION = cuda_extensions()
BUILD_INFO = {
    "torch": torch.__version__,
    "cpu": "built for " + ", ".join(e.name.removeprefix("memopt._cpu_") for e in CPU),
    "cuda": CUDA_DECISION,
    "sources": source_digest(),
}

setup(
    ext_modules=CPU + CUDA,
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
