"""Fixtures that several folders share: a tiny checkpoint and small files of rows, made once per test session."""

import os
from pathlib import Path

import pytest

# Two cores: a library that starts a thread per core in every rank makes everything slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real public data files; a test that needs them is skipped where they are not laid beside the project."""
    if not SHARED.is_dir():
        pytest.skip("../shared/data is not there")
    return SHARED


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A tiny random Qwen3-Omni in the published layout."""
    from omnitrain.models.qwen3_omni.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Path:
    """The demo set, converted: train, validation and warmup parquet files."""
    from omnitrain.data.converters import convert
    from omnitrain.data.demo import write_demo

    folder = tmp_path_factory.mktemp("demo")
    write_demo(folder / "raw", rows=64, seed=3)
    convert("avqa", [folder / "raw"], folder / "data")
    return folder / "data"


@pytest.fixture(scope="session")
def mixed_rows(demo) -> Path:
    """Eight rows: text, image, audio and image+audio, two of each."""
    from omnitrain.data.schema import RowFile, system_hash, write_rows

    source = RowFile(demo / "train.parquet")
    rows = []
    for index in range(8):
        kinds = [(), ("image",), ("audio",), ("image", "audio")][index % 4]
        media = [p for m in source[index].messages for p in m.content if p.type in kinds]
        content = [{"type": p.type, "path": p.path} for p in media]
        content.append({"type": "text", "text": f"Which one? Question {index}."})
        message = {"role": "user", "content": content}
        rows.append({"id": f"mixed-{index}", "messages": [message], "answer": source[index].answer, "source": "mixed"})
    path = demo / "mixed.parquet"
    write_rows(path, rows, system_hash=system_hash(None))
    return path
