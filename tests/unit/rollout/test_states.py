"""The engines' states and the trainer engine's sampling, without vLLM."""

import pytest
import torch

from omnitrain.data.sample import Prompt, Row
from omnitrain.errors import EngineStateError
from omnitrain.rollout.engine import Request, Sampling, State
from omnitrain.rollout.queue import EngineGroup, PromptQueue
from omnitrain.rollout.trainer import TrainerEngine, log_distribution

VOCABULARY, END = 7, 6


class Counting:
    """A policy whose logits depend on the prompt and the response so far."""

    def __init__(self):
        self.batches = []

    def next_logits(self, batch):
        self.batches.append(len(batch))
        rows = [torch.sin(torch.arange(VOCABULARY) * (1.3 + sum(p.ids) + 2.1 * sum(tokens) + len(tokens))) for p, tokens in batch]
        return torch.stack(rows) if rows else torch.zeros(0, VOCABULARY)


def prompt(index: int) -> Prompt:
    row = Row(id=str(index), messages=(), answer=None, source="", meta={}, root=None, index=index)
    return Prompt(row, [index + 1], [index + 1], {}, {}, torch.zeros(3, 1, dtype=torch.int64))


def queue(count: int, seed: int = 0) -> PromptQueue:
    return PromptQueue(EngineGroup(), count, lambda i: Request(i, prompt(i), seed + 100 * i))


def run(engine, count=3, n=2, tokens=5, temperature=1.0, seed=0, **sampling):
    samples = engine.generate(queue(count, seed).pull, Sampling(n, temperature, tokens, **sampling))
    return sorted(samples, key=lambda s: (s.group, s.child))


def test_s4_every_illegal_call_is_a_named_error():
    engine = TrainerEngine(Counting())
    for wrong in (State.AWAKE, State.WEIGHTS, State.ASLEEP):
        with pytest.raises(EngineStateError, match="wake"):
            engine.wake(wrong)
    engine.sleep()
    with pytest.raises(EngineStateError, match="sleep while ASLEEP"):
        engine.sleep()
    with pytest.raises(EngineStateError, match="generate while ASLEEP; it needs AWAKE"):
        engine.generate(queue(1).pull, Sampling(1, 1.0, 1))
    with pytest.raises(EngineStateError, match="load_weights while ASLEEP"):
        engine.load_weights([])
    engine.wake(State.WEIGHTS)
    with pytest.raises(EngineStateError, match="WEIGHTS"):
        engine.wake(State.WEIGHTS)
    with pytest.raises(EngineStateError, match="generate while WEIGHTS"):
        engine.generate(queue(1).pull, Sampling(1, 1.0, 1))
    engine.load_weights([])
    engine.wake(State.AWAKE)
    engine.weights_valid = False
    with pytest.raises(EngineStateError, match="full=True"):
        engine.generate(queue(1).pull, Sampling(1, 1.0, 1))


def test_a_sync_drains_the_stream_and_measures_the_change():
    engine = TrainerEngine(Counting())
    stream = iter([("bias", torch.ones(3)), ("a", torch.ones(2, 2)), ("b", torch.ones(1))])
    assert engine.load_weights(stream).pushed == {"bias", "a", "b"}
    assert next(stream, None) is None and engine.delta_norm() == 0
    engine.load_weights([("a", torch.full((2, 2), 2.0))])
    assert engine.delta_norm() == 2


def test_samples_follow_from_the_seed_alone():
    together = run(TrainerEngine(Counting()), count=3, n=2)
    alone = [s for i in range(3) for s in TrainerEngine(Counting()).generate(_one(i), Sampling(2, 1.0, 5))]
    assert [s.tokens for s in together] == [s.tokens for s in sorted(alone, key=lambda s: (s.group, s.child))]
    assert len({tuple(s.tokens) for s in together}) > 3
    assert [s.tokens for s in run(TrainerEngine(Counting()), seed=9)] != [s.tokens for s in together]


def _one(index):
    return PromptQueue(EngineGroup(), 1, lambda _: Request(index, prompt(index), 100 * index)).pull


def test_log_probs_are_those_of_the_tempered_distribution():
    policy = Counting()
    for sample in run(TrainerEngine(policy, eos_ids=[END]), temperature=0.7, tokens=4):
        assert len(sample.tokens) == len(sample.logprobs)
        for i, (token, logprob) in enumerate(zip(sample.tokens, sample.logprobs)):
            logits = policy.next_logits([(prompt(sample.group), sample.tokens[:i])])[0]
            assert logprob == pytest.approx(float(torch.log_softmax(logits / 0.7, -1)[token]), abs=1e-6)
        assert sample.finish_reason == ("stop" if sample.tokens[-1] == END else "length")
        assert END not in sample.tokens[:-1]


def test_no_more_sequences_at_once_than_allowed():
    policy = Counting()
    samples = run(TrainerEngine(policy, max_concurrent=5), count=6, n=2, tokens=3)
    assert len(samples) == 12 and max(policy.batches) == 4


def test_greedy_takes_the_likeliest_and_reports_its_plain_log_prob():
    (sample,) = run(TrainerEngine(Counting()), count=1, n=1, tokens=1, temperature=0.0)
    logits = Counting().next_logits([(prompt(0), [])])[0]
    assert sample.tokens == [int(logits.argmax())]
    assert sample.logprobs == [pytest.approx(float(torch.log_softmax(logits, -1).max()))]


def test_top_k_and_top_p_leave_the_likeliest():
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    kept = log_distribution(logits, Sampling(1, 1.0, 1, top_k=2)).exp()
    assert kept[2:].sum() == 0 and kept.sum() == pytest.approx(1)
    share = logits.softmax(-1)
    kept = log_distribution(logits, Sampling(1, 1.0, 1, top_p=float(share[0] + share[1]) - 1e-3)).exp()
    assert (kept > 0).tolist() == [True, True, False, False]
    kept = log_distribution(logits, Sampling(1, 1.0, 1, top_p=1e-6)).exp()
    assert kept.tolist() == [1, 0, 0, 0]
