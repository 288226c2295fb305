"""The profiler: nothing without its table, everything written with it, and never the end of a run."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch

from omnitrain import device as devices
from omnitrain.recipe.schema import Profile
from omnitrain.train.context import Clock
from omnitrain.train.profile import Profiler, phase_range

RANKS = SimpleNamespace(rank=1, device=torch.device("cpu"))


def profiled(spec, folder, steps=3, work=lambda: torch.ones(8, 8) @ torch.ones(8, 8)):
    said = []
    with Profiler(spec, folder, RANKS, said.append) as profiler:
        for number in range(1, steps + 1):
            with profiler.step(number), Clock().phase("update"):
                work()
    return said


def test_without_a_table_a_phase_is_one_shared_object_that_does_nothing(tmp_path):
    assert phase_range("update") is phase_range("rollout")
    assert profiled(None, tmp_path / "profile") == []
    assert not (tmp_path / "profile").exists()


def test_only_the_named_steps_are_written_with_phases_and_operators(tmp_path):
    said = profiled(Profile(steps=[2]), tmp_path / "profile")
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["step_2_rank_1.json.gz", "step_2_rank_1.txt"]
    events = json.loads(gzip.decompress((tmp_path / "profile" / "step_2_rank_1.json.gz").read_bytes()))["traceEvents"]
    assert {"update", "aten::mm"} <= {event.get("name") for event in events}
    assert "aten::mm" in (tmp_path / "profile" / "step_2_rank_1.txt").read_text()
    assert len(said) == 1 and "step_2_rank_1.json.gz" in said[0]
    assert phase_range("update") is phase_range("rollout")  # switched off again


def test_a_step_that_fails_is_written_too_and_fails_as_it_would(tmp_path):
    def fails():
        torch.ones(2, 2) @ torch.ones(2, 2)
        raise MemoryError("out of it")

    with pytest.raises(MemoryError, match="out of it"):
        profiled(Profile(steps=[1]), tmp_path / "profile", work=fails)
    assert (tmp_path / "profile" / "step_1_rank_1.json.gz").exists()
    assert phase_range("update") is phase_range("rollout")


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "profile").write_text("in the way")
    (line,) = profiled(Profile(steps=[1]), tmp_path / "profile")
    assert line.startswith("warning: the profile step_1_rank_1 could not be written")


def test_what_needs_a_gpu_is_said_and_left_out_on_a_cpu(tmp_path):
    said = profiled(Profile(steps=[1], memory=True, nvtx=True), tmp_path / "profile")
    assert said[0].startswith("profile.memory: a cpu") and said[1].startswith("profile.nvtx:")
    assert not list((tmp_path / "profile").glob("*.pickle"))


@pytest.fixture
def deterministic():
    devices.set_deterministic()
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.backends.cudnn.deterministic = False


def test_deterministic_kernels_are_asked_for_strictly_but_inside_the_engine(deterministic):
    strict = lambda: not torch.is_deterministic_algorithms_warn_only_enabled()  # noqa: E731
    assert torch.are_deterministic_algorithms_enabled() and strict()
    with devices.engine_kernels():
        assert torch.are_deterministic_algorithms_enabled() and not strict()
    assert strict()
    with pytest.raises(ValueError), devices.engine_kernels():
        raise ValueError
    assert strict()


def test_the_engine_s_kernels_are_left_alone_without_determinism():
    with devices.engine_kernels():
        assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_ranks_of_a_deterministic_run_get_what_libraries_read_at_their_start():
    from omnitrain.launch import environment

    added = set(environment("cuda", deterministic=True).items()) - set(environment("cuda").items())
    assert added == {("CUBLAS_WORKSPACE_CONFIG", ":4096:8"), ("HCCL_DETERMINISTIC", "true"), ("PYTHONHASHSEED", "0")}
