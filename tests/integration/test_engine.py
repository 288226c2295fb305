"""The vLLM-Omni engine in this process, against the trainer's own forward. One engine for the whole file."""

import dataclasses
import gc
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from omnitrain.data.schema import RowFile
from omnitrain.errors import EngineStateError, RunError, UsageError
from omnitrain.models.qwen3_omni.policy import ThinkerPolicy
from omnitrain.models.qwen3_omni.processing import Processing
from omnitrain.models.qwen3_omni.spec import Lora, Qwen3OmniModel
from omnitrain.rollout import vllm_compat, vllm_weights
from omnitrain.rollout.engine import Request, Sampling, State
from omnitrain.rollout.queue import EngineGroup, PromptQueue
from omnitrain.rollout.trainer import TrainerEngine
from omnitrain.rollout.vllm_omni import VllmOmniEngine

pytestmark = pytest.mark.timeout(300)
Q_PROJ = "thinker.model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def processing(tiny_model):
    return Processing(str(tiny_model), system=None, max_prompt_tokens=512)


@pytest.fixture(scope="module")
def prompts(mixed_rows, processing):
    """Text, image, audio, image+audio, and the same again."""
    rows = RowFile(mixed_rows)
    return [processing.encode(rows[i]) for i in range(8)]


@pytest.fixture(scope="module")
def started(tiny_model, processing):
    """The engine, and what its construction did to this process."""
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    before = random.random(), numpy.random.rand(), torch.rand(1).item()
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    set_threads = torch.set_num_threads
    engine = VllmOmniEngine(
        str(tiny_model),
        dtype="float32",
        max_model_len=640,
        max_concurrent=12,
        max_batched_tokens=1024,
        sleep="weights",
        eos_ids=processing.eos_ids,
        decode=processing.decode,
    )
    after = random.random(), numpy.random.rand(), torch.rand(1).item()
    yield engine, before == after, torch.set_num_threads is set_threads
    engine.close()


@pytest.fixture
def engine(started):
    """Awake, with whatever weights the last test left."""
    engine = started[0]
    if engine.state is not State.AWAKE:
        engine.wake(State.AWAKE)
    return engine


@pytest.fixture(scope="module")
def policy(tiny_model):
    return make_policy(tiny_model)


def make_policy(tiny_model, targets="attention"):
    lora = Lora(rank=4, alpha=8, targets=targets)
    model = Qwen3OmniModel(family="qwen3_omni", path=str(tiny_model), dtype="float32", lora=lora)
    return ThinkerPolicy(model, mesh=None, device=torch.device("cpu"), seed=0, gradient_checkpointing=False)


def ask(engine, prompts, n=2, tokens=12, temperature=0.9, seed=100, **sampling):
    queue = PromptQueue(EngineGroup(), len(prompts), lambda i: Request(i, prompts[i], seed + 1000 * i))
    found = engine.generate(queue.pull, Sampling(n, temperature, tokens, **sampling))
    return sorted(found, key=lambda s: (s.group, s.child))


def gap(samples, prompts, policy, temperature=0.9) -> dict[str, float]:
    """Largest difference between the engine's log-probs and the trainer's, by modality."""
    found: dict[str, float] = {}
    for sample in samples:
        prompt = prompts[sample.group]
        with torch.no_grad():
            logp, _ = policy.logprobs([(prompt, sample.tokens)], temperature)
        largest = (logp - torch.tensor(sample.logprobs)).abs().max().item()
        found[prompt.row.modality] = max(found.get(prompt.row.modality, 0.0), largest)
    return found


def perturb(policy, *, everything: bool, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in policy.module.named_parameters():
            if everything or "lora_" in name:
                p.add_(torch.randn(p.shape, generator=generator) * 0.3 * p.std().nan_to_num(0.0).clamp(min=0.02))


# -- what is running --------------------------------------------------------------------------------------


def test_the_model_is_vllm_omnis_thinker(engine):
    assert engine.name == "vllm_omni"
    assert engine.model_class.startswith("vllm_omni.model_executor.models.qwen3_omni.")
    assert "vllm-omni" in engine.describe()["versions"] and engine.describe()["kv_tokens"] > 12 * 640 / 4


def test_starting_an_engine_leaves_rng_and_threads_of_the_process_alone(started):
    assert started[1], "a global random generator was reseeded"
    assert started[2], "torch.set_num_threads was replaced"


def test_l3_multiprocessing_is_switched_off_by_us(engine):
    import os

    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert type(engine._llm.llm_engine.engine_core).__name__ == "InprocClient"


# -- weights and agreement --------------------------------------------------------------------------------


def test_w3_engine_equals_the_trainer_for_every_modality_after_a_full_push(engine, policy, prompts):
    before = ask(engine, prompts)
    assert max(gap(before, prompts, policy).values()) < 1e-4
    norm = engine.delta_norm()
    perturb(policy, everything=True)
    report = engine.load_weights(policy.stream_weights(full=True), full=True)
    assert report.pushed == policy.expected_names(full=True) and not report.ignored
    assert report.bytes > 0 and engine.weights_valid
    assert engine.delta_norm() > norm
    after = ask(engine, prompts)
    assert [s.tokens for s in after] != [s.tokens for s in before]
    found = gap(after, prompts, policy)
    assert set(found) == {"text", "image", "audio", "image+audio"}
    assert max(found.values()) < 1e-4, found


def test_w4_merged_lora_alone_reaches_the_engine(engine, policy, prompts):
    engine.load_weights(policy.stream_weights(full=True), full=True)
    perturb(policy, everything=False, seed=2)
    stale = gap(ask(engine, prompts), prompts, policy)
    report = engine.load_weights(policy.stream_weights())
    assert report.pushed == policy.expected_names() and not report.ignored
    assert min(stale.values()) > 1e-3
    assert max(gap(ask(engine, prompts), prompts, policy).values()) < 1e-4


@pytest.mark.parametrize("targets", ["attention+experts", ["gate_up_proj"], ["down_proj"]], ids=str)
def test_w4_merged_lora_on_experts_alone_reaches_the_engine(engine, tiny_model, prompts, targets):
    policy = make_policy(tiny_model, targets)
    engine.load_weights(policy.stream_weights(full=True), full=True)
    norm = engine.delta_norm()
    perturb(policy, everything=False, seed=3)
    stale = gap(ask(engine, prompts), prompts, policy)
    report = engine.load_weights(policy.stream_weights())
    assert report.pushed == policy.expected_names() and not report.ignored
    assert sum(".experts." in name for name in report.pushed) == 2 * 4 * 3
    assert min(stale.values()) > 1e-3 and engine.delta_norm() > norm
    assert max(gap(ask(engine, prompts), prompts, policy).values()) < 1e-4


def test_w3_delta_norm_is_zero_without_a_change(engine, policy):
    engine.load_weights(policy.stream_weights(full=True), full=True)  # also what other tests left in the experts
    norm, weight = engine.delta_norm(), engine.watch(Q_PROJ)
    engine.load_weights(policy.stream_weights())
    assert engine.delta_norm() == norm and torch.equal(engine.watch(Q_PROJ), weight)


@pytest.mark.parametrize("wrong", ["model.layers.0.self_attn.q_proj.weight", "thinker.model.layers.0.nothing.weight",
                                   "thinker.model.layers.0.mlp.experts.99.up_proj.weight", "thinker.nothing"])  # fmt: skip
def test_w1_names_the_engine_does_not_take_are_reported(engine, policy, prompts, wrong):
    report = engine.load_weights([(wrong, torch.zeros(8, 8)), *policy.stream_weights()])
    assert report.ignored == {wrong}
    assert report.pushed == policy.expected_names()
    assert max(gap(ask(engine, prompts[:1]), prompts, policy).values()) < 1e-4


def test_w2_part_of_a_fused_projection_is_refused_and_changes_nothing(engine, policy, prompts):
    engine.load_weights(policy.stream_weights(full=True), full=True)
    before = engine.watch(Q_PROJ)
    report = engine.load_weights([(name, t * 2) for name, t in policy.stream_weights() if name == Q_PROJ])
    assert report.ignored == {Q_PROJ} and not report.pushed
    assert torch.equal(engine.watch(Q_PROJ), before)
    report = engine.load_weights(policy.stream_weights())
    assert report.pushed == policy.expected_names() and not report.ignored


def test_a_full_push_with_a_missing_parameter_is_an_error(engine, policy):
    stream = [(n, t) for n, t in policy.stream_weights(full=True) if n != "thinker.lm_head.weight"]
    with pytest.raises(RunError, match="lm_head"):
        engine.load_weights(stream, full=True)
    with pytest.raises(EngineStateError, match="full"):
        ask(engine, [])
    engine.load_weights(policy.stream_weights(full=True), full=True)


def test_an_error_in_the_stream_is_raised_and_leaves_a_usable_engine(engine, policy, prompts):
    def broken():
        for i, item in enumerate(policy.stream_weights()):
            if i == 5:
                raise ValueError("the stream broke")
            yield item

    with pytest.raises(ValueError, match="the stream broke"):
        engine.load_weights(broken())
    engine.load_weights(policy.stream_weights(full=True), full=True)
    assert max(gap(ask(engine, prompts), prompts, policy).values()) < 1e-4


def test_a_sync_asks_for_the_whole_stream(engine, policy):
    stream = policy.stream_weights()
    engine.load_weights(stream)
    assert next(stream, None) is None


# -- generating -------------------------------------------------------------------------------------------


def test_t1_tokens_logprobs_and_prompt_ids_are_the_engines_own(engine, prompts, processing):
    for sample in ask(engine, prompts, tokens=30):
        assert len(sample.tokens) == len(sample.logprobs) <= 30
        assert sample.prompt_ids == prompts[sample.group].ids  # t3: expanded alike
        assert sample.text == processing.decode(sample.tokens)
        assert sample.finish_reason == ("stop" if sample.tokens[-1] in processing.eos_ids else "length")
        assert max(sample.logprobs) <= 0


def test_t1_a_log_prob_too_few_is_an_error(engine, prompts):
    class Completion:
        token_ids, logprobs = [1, 2], [{1: None}]

    with pytest.raises(RunError, match="2 tokens but 1 log-probs"):
        engine._sample(Request(0, prompts[0], 0), None, Completion())


def test_end_of_sequence_is_kept_and_counted_as_stop(engine, policy, prompts):
    logits = policy.next_logits([(prompts[0], [])])[0]
    first = int(logits.argmax())
    usual, engine._stop_ids = engine._stop_ids, [first]
    try:
        (sample,) = ask(engine, prompts[:1], n=1, temperature=0.0)
    finally:
        engine._stop_ids = usual
    assert sample.tokens == [first] and sample.finish_reason == "stop" and len(sample.logprobs) == 1


def test_k8_one_request_per_prompt_and_samples_come_as_they_finish(engine, prompts, monkeypatch):
    """Also the test of add_request's quirk: held back, all children of a prompt would come at once."""
    calls, steps = [], []
    core = engine._llm.llm_engine
    add, step = core.add_request, core.step
    monkeypatch.setattr(core, "add_request", lambda *a, **k: (calls.append(a[0]), add(*a, **k))[1])
    monkeypatch.setattr(core, "step", lambda: (steps.append(1), step())[1])
    vocabulary = range(0, 1024, 9)  # about one token in nine ends a response
    usual, engine._stop_ids = engine._stop_ids, list(vocabulary)
    queue = PromptQueue(EngineGroup(), 2, lambda i: Request(i, prompts[i], 7 * i))
    try:
        arrivals = [(len(steps), s) for s in engine.generate(queue.pull, Sampling(6, 1.0, 40))]
    finally:
        engine._stop_ids = usual
    assert len(calls) == 2 and len(arrivals) == 12
    for group in (0, 1):
        mine = [(at, s) for at, s in arrivals if s.group == group]
        assert sorted(s.child for _, s in mine) == list(range(6))
        assert len({at for at, _ in mine}) > 1, "all children of a prompt came in the same step"
        # Prompts of equal length admitted together: a response of L tokens is there after about L steps.
        assert all(at <= len(s.tokens) + 6 for at, s in mine)


def test_no_more_sequences_in_flight_than_allowed(engine, prompts, monkeypatch):
    core, running = engine._llm.llm_engine, []
    step, scheduler = core.step, core.engine_core.engine_core.scheduler
    monkeypatch.setattr(core, "step", lambda: (running.append(len(scheduler.requests)), step())[1])
    queue = PromptQueue(EngineGroup(), 8, lambda i: Request(i, prompts[i], i))
    samples = list(engine.generate(queue.pull, Sampling(4, 1.0, 6)))
    assert max(running) == 12 and len(samples) == 32


def test_l2_the_seed_alone_decides_and_children_differ(engine, prompts):
    first = ask(engine, prompts[:3], n=3)
    again = ask(engine, prompts[:3], n=3)
    alone = [s for p in range(3) for s in ask(engine, prompts[p : p + 1], n=3, seed=100 + 1000 * p)]
    other = ask(engine, prompts[:3], n=3, seed=7)
    assert [s.tokens for s in first] == [s.tokens for s in again] == [s.tokens for s in alone]
    assert [s.tokens for s in first] != [s.tokens for s in other]
    assert len({tuple(s.tokens) for s in first}) == 9


def test_w8_every_sampling_field_reaches_the_request(engine):
    base = Sampling(2, 0.5, 9, top_p=0.8, top_k=7)
    plain = engine.sampling_params(base, 3)
    assert (plain.n, plain.temperature, plain.max_tokens, plain.top_p, plain.top_k, plain.seed) == (2, 0.5, 9, 0.8, 7, 3)
    assert set(plain.stop_token_ids) == set(engine._stop_ids) and plain.logprobs == 0
    for field in dataclasses.fields(Sampling):
        changed = dataclasses.replace(base, **{field.name: getattr(base, field.name) / 2 if field.name == "top_p" else 1})
        assert repr(engine.sampling_params(changed, 3)) != repr(plain), field.name

    @dataclasses.dataclass(frozen=True)
    class More(Sampling):
        penalty: float = 1.0

    with pytest.raises(RunError, match="penalty"):
        engine.sampling_params(More(1, 1.0, 1), 0)


def test_the_trainer_engine_gives_the_same_greedy_responses(engine, policy, prompts, processing):
    engine.load_weights(policy.stream_weights(full=True), full=True)
    oracle = TrainerEngine(policy, eos_ids=processing.eos_ids, decode=processing.decode)
    ours, theirs = (ask(e, prompts, n=1, temperature=0.0, tokens=8) for e in (engine, oracle))
    assert [(s.tokens, s.text, s.finish_reason, s.prompt_ids) for s in ours] == [
        (s.tokens, s.text, s.finish_reason, s.prompt_ids) for s in theirs
    ]
    for a, b in zip(ours, theirs):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)


# -- failures inside generate -----------------------------------------------------------------------------


def _usable(engine, prompts, policy):
    assert not engine._llm.llm_engine.has_unfinished_requests()
    assert max(gap(ask(engine, prompts), prompts, policy).values()) < 1e-4


def test_an_exception_in_a_step_leaves_a_usable_engine(engine, policy, prompts, monkeypatch):
    engine.load_weights(policy.stream_weights(full=True), full=True)
    runner = vllm_compat.worker(engine._llm).model_runner
    original, calls = runner.execute_model, []

    def fail_third(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("device fell over")
        return original(*args, **kwargs)

    monkeypatch.setattr(runner, "execute_model", fail_third)
    with pytest.raises(RuntimeError, match="device fell over"):
        ask(engine, prompts)
    monkeypatch.undo()
    _usable(engine, prompts, policy)


def test_a_consumer_that_raises_or_leaves_keeps_the_engine_usable(engine, policy, prompts):
    def pulled():
        return PromptQueue(EngineGroup(), 8, lambda i: Request(i, prompts[i], i)).pull

    with pytest.raises(KeyError):
        for _ in engine.generate(pulled(), Sampling(2, 1.0, 6)):
            raise KeyError("a consumer's bug")
    _usable(engine, prompts, policy)
    abandoned = engine.generate(pulled(), Sampling(2, 1.0, 6))
    next(abandoned)
    assert len(ask(engine, prompts)) == 16  # while the old iterator is still open
    abandoned.close()
    _usable(engine, prompts, policy)


def test_an_exception_in_pull_leaves_a_usable_engine(engine, policy, prompts):
    def build(i):
        if i == 2:
            raise OSError("picture vanished")
        return Request(i, prompts[i], i)

    with pytest.raises(OSError, match="picture vanished"):
        list(engine.generate(PromptQueue(EngineGroup(), 8, build).pull, Sampling(2, 1.0, 6)))
    _usable(engine, prompts, policy)


# -- states -----------------------------------------------------------------------------------------------


def test_s2_sleeping_with_weights_demands_a_full_refill(engine, policy, prompts):
    engine.load_weights(policy.stream_weights(full=True), full=True)
    before = [s.tokens for s in ask(engine, prompts, n=1, temperature=0.0)]
    engine.sleep()
    with pytest.raises(EngineStateError, match="generate while ASLEEP"):
        ask(engine, prompts)
    with pytest.raises(EngineStateError, match="load_weights while ASLEEP"):
        engine.load_weights([])
    engine.wake(State.WEIGHTS)
    with pytest.raises(EngineStateError, match="generate while WEIGHTS"):
        ask(engine, prompts)
    engine.load_weights(policy.stream_weights())
    engine.wake(State.AWAKE)
    with pytest.raises(EngineStateError, match="before a full"):
        ask(engine, prompts)
    engine.load_weights(policy.stream_weights(full=True), full=True)
    assert [s.tokens for s in ask(engine, prompts, n=1, temperature=0.0)] == before


def test_s9_twenty_cycles_of_sleep_and_refill_leave_no_memory_behind(engine, policy, prompts):
    def cycle():
        engine.sleep()
        engine.wake(State.WEIGHTS)
        engine.load_weights(policy.stream_weights(full=True), full=True)
        engine.wake(State.AWAKE)
        ask(engine, prompts, n=1, tokens=2)
        gc.collect()

    for _ in range(5):  # allocators reach their size
        cycle()
    before = resident_bytes()
    for _ in range(20):
        cycle()
    weights = sum(p.numel() * p.element_size() for p in vllm_compat.model(engine._llm).parameters())
    assert resident_bytes() - before < max(0.01 * before, weights)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_sequences_beyond_the_models_positions_are_refused_in_the_recipes_words(started, tiny_model):
    with pytest.raises(UsageError, match=r"data.max_prompt_tokens \+ rollout.max_new_tokens.*70000") as caught:
        VllmOmniEngine(str(tiny_model), dtype="float32", max_model_len=70000)
    assert "Traceback" not in str(caught.value) and len(str(caught.value)) < 1500


# -- quirks that are worked around: each of these fails when vLLM no longer has it ------------------------


def test_quirk_reloaded_experts_need_packing_on_cpu(engine, policy, prompts, monkeypatch):
    monkeypatch.setattr(vllm_weights, "_repack_cpu_experts", lambda net: 0)
    perturb(policy, everything=True, seed=3)
    engine.load_weights(policy.stream_weights(full=True), full=True)
    stale = gap(ask(engine, prompts), prompts, policy)
    monkeypatch.undo()
    engine.load_weights(policy.stream_weights(full=True), full=True)
    assert min(stale.values()) > 1e-3
    assert max(gap(ask(engine, prompts), prompts, policy).values()) < 1e-4


def test_quirk_children_of_a_request_are_held_back(engine, prompts, monkeypatch):
    monkeypatch.setattr(
        vllm_compat, "add_request", lambda llm, request_id, prompt, params: llm.llm_engine.add_request(request_id, prompt, params)
    )
    steps = []
    core = engine._llm.llm_engine
    step = core.step
    monkeypatch.setattr(core, "step", lambda: (steps.append(1), step())[1])
    usual, engine._stop_ids = engine._stop_ids, list(range(0, 1024, 9))
    queue = PromptQueue(EngineGroup(), 1, lambda i: Request(i, prompts[i], 1))
    try:
        arrivals = {len(steps) for _ in engine.generate(queue.pull, Sampling(6, 1.0, 40))}
    finally:
        engine._stop_ids = usual
    assert len(arrivals) == 1


def test_two_tensor_parallel_runs_on_one_host_share_no_memory(engine, monkeypatch):
    """Quirk: vLLM on a CPU names a group's shared memory "//-..." under external_launcher, the same for every run."""
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as SharedMemory

    monkeypatch.setenv("VLLM_DIST_IDENT", "//")
    upstream = staticmethod(SharedMemory.make_group_name.upstream)
    monkeypatch.setattr(SharedMemory, "make_group_name", upstream)
    communicator = SimpleNamespace(unique_name="tp:0", ranks=[0, 1])
    assert SharedMemory.make_group_name(communicator) == "//-tp:0-[0-1]-cpushm"
    names = set()
    for port in ("1", "2"):
        monkeypatch.setenv("MASTER_PORT", port)
        monkeypatch.setattr(SharedMemory, "make_group_name", upstream)
        vllm_compat._name_shared_memory()
        names.add(SharedMemory.make_group_name(communicator))
    assert len(names) == 2 and not any("/" in name for name in names)
