"""Resources, media and the hub."""

import socket
import threading
from types import SimpleNamespace

import av
import numpy as np
import psutil
import pytest
from PIL import Image

from omnitrain.doctor import hub, media, resources

GIB = 2**30


@pytest.mark.parametrize(("free", "status"), [(1, "problem"), (4, "warning"), (16, "ok")])
def test_little_memory_is_seen(monkeypatch, free, status):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free * GIB, total=32 * GIB))
    assert resources.memory().status == status


@pytest.mark.parametrize(("free", "status"), [(0.5, "problem"), (5, "warning"), (50, "ok")])
def test_a_full_disk_is_seen_where_runs_will_be_written(monkeypatch, tmp_path, free, status):
    asked = []
    usage = lambda path: asked.append(path) or SimpleNamespace(free=free * GIB, total=100 * GIB)  # noqa: E731
    monkeypatch.setattr(resources.shutil, "disk_usage", usage)
    assert resources.disk(tmp_path / "runs" / "not-yet").status == status
    assert asked == [tmp_path]


def test_this_machines_files_and_shared_memory_can_be_asked(tmp_path):
    assert resources.open_files().status in ("ok", "warning")
    assert resources.shared_memory(tmp_path / "none").status == "ok"


def test_the_codecs_here_work():
    for check in media.checks():
        assert check.run().status == "ok", check.run()


def test_a_picture_codec_that_damages_pictures_is_a_problem(monkeypatch):
    monkeypatch.setattr("omnitrain.data.media.load_image", lambda part, root: Image.new("RGB", (64, 64)))
    found = media.images()
    assert found.status == "problem" and found.detail.startswith("PNG")


def test_a_resampler_that_is_off_is_a_problem(monkeypatch):
    monkeypatch.setattr("omnitrain.data.media._resample", lambda samples, rate, to: samples)
    found = media.audio()
    assert found.status == "problem" and "44100" in found.detail


def test_a_missing_video_codec_is_a_problem(monkeypatch):
    def refuse(*args, **kwargs):
        raise av.codec.codec.UnknownCodecError("mpeg4")

    monkeypatch.setattr(media, "_write_mp4", refuse)
    assert media.video().status == "problem"


def test_a_video_is_written_with_the_frames_it_was_given():
    frames, samples = media._read_mp4(av, media._write_mp4(av, frames=4, grey=80))
    assert len(frames) == 4 and samples >= 15000
    assert abs(float(np.mean(frames)) - 80) < 8


def test_u4_offline_asks_nobody(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("the network was asked"))
    assert hub.hub().status == "ok"


def test_u4_an_unreachable_hub_is_a_warning_with_the_variable_to_set(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    found = hub.hub(timeout=2)
    assert (found.status, found.fix) == ("warning", "export HF_HUB_OFFLINE=1")
    assert str(port) in found.detail


@pytest.mark.parametrize("status", ["200 OK", "503 Service Unavailable"])
def test_a_hub_that_answers_is_reachable_whatever_it_says(monkeypatch, status):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")

        def answer():
            with server.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

        thread = threading.Thread(target=answer)
        thread.start()
        assert hub.hub(timeout=5).status == "ok"
        thread.join()


def test_a_cache_that_cannot_be_written_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert hub.cache().status == "ok"
    monkeypatch.setattr(hub.os, "access", lambda path, mode: False)
    assert hub.cache().status == "problem"
