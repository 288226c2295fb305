"""Rollout correction in the real loop: a trainer in float32 beside vLLM-Omni in bfloat16. One engine for the file.

The learning rate is 0 and every test replays step 1, so that all of them train on the same samples.
"""

import json
import math

import pytest
import torch

from omnitrain.errors import GateRefused
from omnitrain.models.qwen3_omni.policy import ThinkerPolicy
from omnitrain.recipe.algorithms import Correction, Dapo, Gspo
from omnitrain.rollout.engine import Request, Sampling, State
from omnitrain.rollout.queue import EngineGroup, PromptQueue
from omnitrain.train import loop as loops
from omnitrain.train import setup
from omnitrain.train.objectives import Batch, build_objective
from omnitrain.train.online import OnlineLoop
from omnitrain.train.online_gates import OnlineGates
from omnitrain.train.state import TrainState
from tests.integration.conftest import one_rank_run

pytestmark = pytest.mark.timeout(300)
TEMPERATURE = 0.25  # widens the gap: both sides divide their logits by it
RECIPE = """
name = "correction"
seed = 5
model = {{ family = "qwen3_omni", path = "{model}", dtype = "float32", lora = {{ rank = 4, alpha = 8 }} }}
data = {{ train = "{train}", max_prompt_tokens = 512 }}
algorithm = {{ kind = "dapo", dynamic_sampling = false }}
rollout = {{ group_size = 4, max_new_tokens = 8, temperature = {temperature}, max_concurrent = 64 }}
rewards = [{{ kind = "python", function = "coins:score" }}]
train = {{ prompts_per_step = 4, max_tokens_per_device = 640, learning_rate = 0.0, max_steps = 100 }}
gates = {{ skip = ["g1", "g2", "g3", "g5", "g6", "g7", "g9", "g10"] }}
"""
REWARD = "import zlib\ndef score(response, row):\n    return zlib.crc32(response.encode()) % 7\n"


@pytest.fixture(scope="module")
def loop(tmp_path_factory, tiny_model, mixed_rows):
    folder = tmp_path_factory.mktemp("correction")
    (folder / "coins.py").write_text(REWARD)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.format(model=tiny_model, train=mixed_rows, temperature=TEMPERATURE))
    build = setup.build_engine

    def in_bfloat16(recipe, **parts):
        model = recipe.model.model_copy(update={"dtype": "bfloat16"})
        return build(recipe.model_copy(update={"model": model}), **parts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "build_engine", in_bfloat16)
        with one_rank_run(patch, recipe) as run:
            yield run._online(TrainState(run.context))


class Step:
    """Step 1 under an algorithm: its line of metrics.jsonl, its samples, and the gradient of its one update."""

    def __init__(self, loop: OnlineLoop, patch: pytest.MonkeyPatch, algorithm):
        loop.recipe = loop.recipe.model_copy(update={"algorithm": algorithm})
        loop.objective = build_objective(loop.recipe)
        loop.state.step, loop.state.updates = 0, 0
        loop.state.sampler = TrainState(loop.context).sampler
        draw, clipped = loop.draw, loops.clipped_step

        def drawn(*args):
            found = draw(*args)
            self.samples = found.everything
            return found

        def stepped(*args):
            self.gradient = gradient(loop)
            return clipped(*args)

        with patch.context() as during:
            during.setattr(loop, "draw", drawn)
            during.setattr(loops, "clipped_step", stepped)
            loop.step()
        self.line = json.loads(loop.context.run.metrics.read_text().splitlines()[-1])
        self.trained = [loop._trained[s.group, s.child] for s in self.samples]
        """The trainer's log-probs, by sample and token."""
        self.gaps = [
            [a - b for a, b in zip(mine, s.logprobs, strict=True)] for mine, s in zip(self.trained, self.samples)
        ]
        """Trainer minus engine."""


def gradient(loop) -> torch.Tensor:
    return torch.cat([p.grad.full_tensor().flatten() for _, p in loop.policy.trainable()])


def by_hand(loop, samples, terms) -> torch.Tensor:
    """Gradient of the sum of terms(number of the sample, its log-probs with gradient) over the samples."""
    inputs = [(loop.source.encode(s.row), s.tokens) for s in samples]
    logp = loop.policy.logprobs(inputs, TEMPERATURE)[0].split([len(s.tokens) for s in samples])
    torch.stack([terms(number, part) for number, part in enumerate(logp)]).sum().backward()
    found = gradient(loop)
    loop.state.optimizer.zero_grad(set_to_none=True)
    return found


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert wanted.norm() > 0 and (found - wanted).norm() <= 1e-4 * wanted.norm()


def dapo(**fields) -> Dapo:
    return Dapo(kind="dapo", dynamic_sampling=False, **fields)


def k3(gaps) -> float:
    return sum(math.exp(d) - 1 - d for d in gaps) / len(gaps)


@pytest.fixture
def step(loop, monkeypatch):
    return lambda algorithm: Step(loop, monkeypatch, algorithm)


# -- the gap, and what the loop makes of it


def test_the_gap_of_dtypes_is_in_the_metrics_and_without_correction_nothing_else_is(step):
    plain = step(dapo())
    flat = [d for gaps in plain.gaps for d in gaps]
    assert plain.line["rollout/k3"] == pytest.approx(k3(flat), rel=1e-4) and plain.line["rollout/k3"] > 1e-4
    assert plain.line["rollout/logp_diff_mean"] == pytest.approx(sum(map(abs, flat)) / len(flat), rel=1e-4)
    assert plain.line["rollout/logp_diff_mean"] > 0.005 and plain.line["rollout/pearson"] < 0.9999
    # The ratio is the trainer against itself: the gap is in no ratio, so that only a correction can see it.
    assert plain.line["train/log_ratio_first"] == 0 and not [n for n in plain.line if n.startswith("correction/")]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("limit", ["truncate", "mask"])
def test_importance_weights_scale_the_gradient_of_every_token(loop, step, level, limit):
    cap, floor = 1.02, 0.99
    band = {"floor": floor} if limit == "mask" else {}
    found = step(dapo(correction=Correction(weights=level, limit=limit, cap=cap, **band)))

    def limited(d):
        w = math.exp(d)
        return min(w, cap) if limit == "truncate" else w * (floor <= w <= cap)

    whole = [[limited(sum(gaps))] * len(gaps) for gaps in found.gaps]
    weights = whole if level == "sequence" else [[limited(d) for d in gaps] for gaps in found.gaps]
    items = [w[0] for w in weights] if level == "sequence" else [w for part in weights for w in part]
    cut = sum(w == (cap if limit == "truncate" else 0) for w in items) / len(items)
    name = "truncated" if limit == "truncate" else "masked"
    assert found.line[f"correction/{name}"] == pytest.approx(cut) and 0 < cut < 1
    assert found.line["correction/weight_mean"] == pytest.approx(sum(items) / len(items), rel=1e-4)
    assert found.line["correction/weight_max"] == pytest.approx(max(items), rel=1e-4)
    assert found.line["correction/effective_samples"] < 1
    tokens = sum(len(s.tokens) for s in found.samples)
    terms = lambda i, logp: -(torch.tensor(weights[i]) * found.samples[i].advantage * logp).sum() / tokens  # noqa: E731
    close(found.gradient, by_hand(loop, found.samples, terms))
    assert (found.gradient - step(dapo()).gradient).norm() > 1e-3 * found.gradient.norm()


@pytest.mark.parametrize("kind", ["dapo", "gspo"])
def test_a_rejected_response_is_in_neither_the_gradient_nor_its_units(loop, step, kind):
    make = dapo if kind == "dapo" else lambda **fields: Gspo(kind="gspo", **fields)
    plain = step(make())
    estimates = [k3(gaps) for gaps in plain.gaps]
    high = sorted(estimates)[11] + 1e-7  # of 16
    found = step(make(correction=Correction(reject="sequence", reject_kl="k3", reject_high=high)))
    assert [s.tokens for s in found.samples] == [s.tokens for s in plain.samples]
    kept = [s for s, estimate in zip(found.samples, estimates) if estimate <= high]
    assert found.line["correction/rejected"] == pytest.approx(1 - len(kept) / 16) and len(kept) == 12
    units = sum(len(s.tokens) for s in kept) if kind == "dapo" else len(kept)
    mean = torch.sum if kind == "dapo" else torch.mean
    wanted = by_hand(loop, kept, lambda i, logp: -kept[i].advantage * mean(logp) / units)
    close(found.gradient, wanted)
    assert (plain.gradient - wanted).norm() > 0.01 * wanted.norm()


def test_with_the_bypass_the_ratio_is_against_the_engine_and_rejection_still_works(loop, step):
    high = 0.02
    found = step(dapo(old_logprobs="rollout", correction=Correction(reject="token", reject_kl="k1", reject_high=high)))
    keep = [[-d <= high for d in gaps] for gaps in found.gaps]
    units = sum(map(sum, keep))
    total = sum(map(len, keep))
    assert found.line["correction/rejected"] == pytest.approx(1 - units / total) and 0 < units < total
    kept = [d for gaps, mask in zip(found.gaps, keep) for d, stays in zip(gaps, mask) if stays]
    assert found.line["train/log_ratio_first"] == pytest.approx(max(map(abs, kept)), rel=1e-3)
    assert found.line["train/ratio_mean"] == pytest.approx(sum(map(math.exp, kept)) / units, rel=1e-4)

    def terms(i, logp):
        advantage, mask = found.samples[i].advantage, torch.tensor(keep[i])
        ratio = (logp - torch.tensor(found.samples[i].logprobs)).exp()
        losses = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        return losses[mask].sum() / units

    close(found.gradient, by_hand(loop, found.samples, terms))


def test_when_everything_is_rejected_nothing_is_learned_and_the_step_goes_on(loop, step):
    found = step(dapo(correction=Correction(weights="token", reject="sequence", reject_kl="k1", reject_high=-99.0)))
    assert found.line["correction/rejected"] == 1 and found.line["train/loss"] == 0
    assert found.line["train/grad_norm"] == 0 and found.gradient.norm() == 0


def test_g6_refuses_an_engine_of_another_dtype_and_g5_allows_it_no_more_rounding(loop):
    """The limits are the recipe's dtype's: a gap that nobody asked for stops the run, whatever would correct it."""
    if loop.rollouts.engine.state is not State.AWAKE:
        loop.rollouts.engine.wake()
    gates = OnlineGates(loop.context, loop.rollouts, loop)
    with pytest.raises(GateRefused, match=r"disagrees?: .*Pearson of at least 0.9999 and \|dlogp\| of at most 0.001"):
        gates.g6_agreement()
    assert gates.g5_ratio() == "max |log ratio| 0, allowed 1e-06" and loop.log_ratio_tolerance == 1e-6
    loop.rollouts.engine.sleep()


# -- what the correction is for


def test_weighted_samples_of_the_engine_have_the_gradient_of_the_trainers_own_policy(loop, monkeypatch):
    """Responses of two tokens to one prompt. The trainer's expected gradient is computed exactly, over all responses;
    the engine's samples estimate it with and without sequence weights.

    Each estimate's own noise is measured on 8 parts of the samples. An unbiased estimate is off by about that; the
    uncorrected one is off by many times as much, which no chance explains.
    """
    prompt, engine = loop.source.encode(0), loop.rollouts.engine
    # The same weights without shards: one forward for all the gradients.
    policy = ThinkerPolicy(
        loop.recipe.model, mesh=None, device=torch.device("cpu"), seed=5, gradient_checkpointing=False
    )
    parameters = [parameter for _, parameter in policy.trainable()]
    if engine.state is not State.AWAKE:
        engine.wake()
    monkeypatch.setattr(engine, "_stop_ids", [])
    queue = PromptQueue(EngineGroup(), 512, lambda i: Request(i, prompt, 1000 * i))
    samples = list(engine.generate(queue.pull, Sampling(64, TEMPERATURE, 2)))
    engine.sleep()
    count = len(samples)
    assert count == 32768 and all(len(s.tokens) == 2 for s in samples)
    tokens = torch.tensor([s.tokens for s in samples])
    sampled = torch.tensor([s.logprobs for s in samples])

    first = torch.log_softmax(policy.next_logits([(prompt, [])])[0] / TEMPERATURE, -1).exp()
    # What is left out has no weight in the sum.
    likely = torch.cat([(first > 1e-6).nonzero().flatten(), tokens[:, 0]]).unique()
    assert first[likely].sum() > 1 - 1e-4
    place = {token: index for index, token in enumerate(likely.tolist())}
    index = torch.tensor([place[token] for token in tokens[:, 0].tolist()])
    batch = [(prompt, []), *((prompt, [token]) for token in likely.tolist())]

    logits = ThinkerPolicy.next_logits.__wrapped__(policy, batch)  # with gradient
    logp = torch.log_softmax(logits / TEMPERATURE, -1)

    def gradient_of(loss) -> torch.Tensor:
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])

    def estimated(part: slice, correction):
        loop.recipe = loop.recipe.model_copy(update={"algorithm": dapo(correction=correction)})
        objective = build_objective(loop.recipe)
        advantages = tokens[part, 1] % 2 - baseline
        mine = torch.stack([logp[0, tokens[part, 0]], logp[1 + index[part], tokens[part, 1]]], 1).flatten()
        lengths = torch.full((len(advantages),), 2)
        total, stats = objective.loss(mine, Batch(lengths, advantages, rollout=sampled[part].flatten()))
        return gradient_of(total / stats["units"])

    # Minus the expected reward, by the tokens of a response, as the loss is.
    chances = logp[0, likely].exp()[:, None] * logp[1:].exp()
    reward = torch.arange(logp.shape[1]) % 2  # of the second token alone: the first one's gap is in the prefix
    baseline = (chances.detach() * reward).sum()  # less noise, and the same gradient
    truth = gradient_of(-(chances * reward).sum() / 2)
    found = {}
    for name in ("none", "token", "sequence"):
        correction = None if name == "none" else Correction(weights=name, cap=1e6)
        size = count // 8
        parts = torch.stack([estimated(slice(i * size, (i + 1) * size), correction) for i in range(8)])
        noise = (parts.var(0).sum() / 8).sqrt()
        found[name] = ((parts.mean(0) - truth).norm() / truth.norm(), noise / truth.norm())
    # Weights of tokens leave what the first token's gap does to the second one's reward: they are between the two.
    assert found["sequence"][0] <= 1.5 * found["sequence"][1], found
    assert found["none"][0] >= 3 * found["none"][1], found
    assert found["sequence"][0] < found["none"][0] / 2 and found["token"][0] < found["none"][0], found
