"""DAPO's online loop in this process, on one rank with the trainer's own sampler: what is drawn, kept, counted and resumed."""

import json
import zlib

import pytest
import torch

from omnitrain.errors import Interrupted
from omnitrain.rundir import request_stop
from omnitrain.train import loop as loops
from omnitrain.train.metrics import comparable
from omnitrain.train.online import OnlineLoop
from omnitrain.train.prompts import PromptSource
from omnitrain.train.rollouts import Rollouts
from omnitrain.train.state import TrainState

pytestmark = pytest.mark.timeout(120)
# Half of all groups of two answers have equal rewards; of the rows named in `flat` all have.
REWARD = """
import zlib
from pathlib import Path

FLAT = Path(__file__).with_name("flat")

def score(response, row):
    flat = FLAT.read_text().split()
    return 0.5 if row["id"] in flat or "all" in flat else zlib.crc32(response.encode()) % 2
"""
RECIPE = """
name = "dapo"
seed = 5
model = {{ family = "qwen3_omni", path = "{model}", dtype = "float32", lora = {{ rank = 4, alpha = 8 }} }}
data = {{ train = "{train}", max_prompt_tokens = 512 }}
algorithm = {{ kind = "dapo" }}
rollout = {{ engine = "trainer", group_size = 2, max_new_tokens = 6 }}
rewards = [{{ kind = "python", function = "coins:score" }}]
train = {{ prompts_per_step = 4, prompts_per_update = 2, max_tokens_per_device = 1024, learning_rate = 1e-3, max_steps = 3 }}
checkpoint = {{ every = 1 }}
gates = {{ skip = ["g1", "g2", "g3", "g5", "g6", "g7", "g9", "g10"] }}
"""


@pytest.fixture
def recipe(tmp_path, brief_model, mixed_rows):
    (tmp_path / "coins.py").write_text(REWARD)
    (tmp_path / "flat").write_text("")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(model=brief_model, train=mixed_rows))
    return path


@pytest.fixture
def draws(monkeypatch):
    """What every step of the test has drawn."""
    found, draw = [], OnlineLoop.draw

    def watched(self, step, clock):
        found.append(draw(self, step, clock))
        return found[-1]

    monkeypatch.setattr(OnlineLoop, "draw", watched)
    return found


@pytest.fixture
def asked(monkeypatch):
    """How many rows every draw of the test asked for."""
    found, draw = [], PromptSource.draw

    def watched(self, sampler, count):
        found.append(count)
        return draw(self, sampler, count)

    monkeypatch.setattr(PromptSource, "draw", watched)
    return found


def lines(run) -> list[dict]:
    return [json.loads(line) for line in run.run.metrics.read_text().splitlines()]


def numbers(run) -> list[dict]:
    """What two equal runs have in common. The trainer's engine measures its weights' change from its own start."""
    found = [comparable(line) for line in lines(run)]
    return [{name: value for name, value in line.items() if name != "sync/delta_norm"} for line in found]


def weights(run) -> dict[str, torch.Tensor]:
    return {name: p.detach().full_tensor().clone() for name, p in run.context.policy.trainable()}


def finished(one_rank, recipe, *sets, **options):
    with one_rank(recipe, *sets, **options) as run:
        run.train()
        return run, weights(run)


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def varied(samples) -> list[int]:
    """Groups whose rewards differ, in the order they were drawn."""
    rewards: dict[int, set] = {}
    for sample in samples:
        rewards.setdefault(sample.group, set()).add(sample.reward)
    return [group for group in sorted(rewards) if len(rewards[group]) > 1]


# -- what is drawn and kept


def test_a_step_draws_until_it_has_its_groups_and_keeps_the_first_in_the_order_drawn(one_rank, recipe, draws, asked):
    with one_rank(recipe, "train.max_steps=4") as run:
        sampler = TrainState(run.context).sampler
        run.train()
    logged = lines(run)
    assert len(draws) == 4
    counts = iter(asked)
    surplus = again = late = 0
    for line, drawn in zip(logged, draws, strict=True):
        # Rows in the sampler's order, one group each, every group with its answers. Each further draw is for all that
        # is still missing, and no larger than a step.
        had = 0
        for number in range(drawn.draws):
            count, missing = next(counts), 4 - len(varied(s for s in drawn.everything if s.group < had))
            assert 0 < missing <= count <= 4 and (number or count == 4)
            assert drawn.rows[had : had + count] == sampler.take(count)
            had += count
        assert had == len(drawn.rows)
        assert [(s.group, s.child) for s in drawn.everything] == [
            (g, c) for g in range(len(drawn.rows)) for c in (0, 1)
        ]
        assert all(s.row == drawn.rows[s.group] for s in drawn.everything)
        found = varied(drawn.everything)
        assert drawn.groups == found[:4] and len(found) >= 4
        assert {s.group for s in drawn.chosen} == set(found[:4]) and len(drawn.chosen) == 8
        surplus += len(found) > 4
        again += drawn.draws > 1
        # A group in front of one that was kept took longer: kept by the order of finishing, it would not be the first.
        longest = [max(len(s.tokens) for s in drawn.everything if s.group == group) for group in found]
        late += len(found) > 4 and max(longest[:4]) > longest[4]
        # The step's numbers: those of everything drawn, so that the mean reward is the policy's.
        rewards = [s.reward for s in drawn.everything]
        assert all(s.reward == zlib.crc32(s.text.encode()) % 2 for s in drawn.everything)
        assert line["train/reward_mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert line["reward/score/mean"] == pytest.approx(sum(rewards) / len(rewards))
        assert line["train/zero_std_ratio"] == pytest.approx(1 - len(found) / len(drawn.rows))
        assert line["rollout/draws"] == drawn.draws and line["rollout/prompts_drawn"] == len(drawn.rows)
        assert line["rollout/kept_ratio"] == pytest.approx(4 / len(drawn.rows))
        assert line["rollout/response_tokens_mean"] == pytest.approx(
            sum(len(s.tokens) for s in drawn.everything) / len(rewards)
        )
        assert line["train/samples"] == 8
    assert surplus and again and late, "the seed shows no group too many, no second draw, or none that took longer"
    # Of two answers that differ one has each reward, so the mean over those trained on is one half whatever the policy.
    assert any(line["train/reward_mean"] != 0.5 for line in logged)


def test_a_row_that_a_step_draws_twice_is_answered_with_other_noise(one_rank, recipe, draws):
    (recipe.parent / "flat").write_text("all")
    finished(one_rank, recipe, "train.max_steps=1", "algorithm.max_generation_batches=5")
    (drawn,) = draws
    answers: dict[int, list] = {}
    for group, row in enumerate(drawn.rows):
        answers.setdefault(row, []).append([tuple(s.tokens) for s in drawn.everything if s.group == group])
    assert len(drawn.rows) == 20 and set(answers) == set(range(8)) and all(len(x) >= 2 for x in answers.values())
    for groups in answers.values():
        assert len(set(map(tuple, groups))) == len(groups)


def test_after_the_last_draw_a_step_trains_on_the_groups_it_has(one_rank, recipe, draws):
    (recipe.parent / "flat").write_text(" ".join(f"mixed-{i}" for i in range(8) if i != 3))
    bounded = ("algorithm.max_generation_batches=3", "train.max_steps=2", "rollout.group_size=6")
    run, _ = finished(one_rank, recipe, *bounded)
    for line, drawn in zip(lines(run), draws, strict=True):
        assert line["rollout/draws"] == 3 and line["rollout/prompts_drawn"] == 12
        assert 0 < len(drawn.groups) < 4 and drawn.groups == varied(drawn.everything)
        assert {drawn.rows[group] for group in drawn.groups} == {3}
        assert line["train/samples"] == 6 * len(drawn.groups) and line["train/grad_norm"] > 0
        assert line["rollout/kept_ratio"] == pytest.approx(len(drawn.groups) / 12)


def test_a_step_without_a_group_to_learn_from_warns_keeps_the_weights_and_the_run_goes_on(
    one_rank, recipe, draws, monkeypatch, capfd
):
    """The middle step of three. Several modalities are drawn, whose agreement is logged where there was a forward."""
    states = []

    def watched(self, values, clock, show=None):
        states.append((weights(run), [p.grad for _, p in run.context.policy.trainable()]))
        (recipe.parent / "flat").write_text("all" if len(states) == 1 else "")
        return finish(self, values, clock, show)

    finish = OnlineLoop._finish
    monkeypatch.setattr(OnlineLoop, "_finish", watched)
    with one_rank(recipe, "algorithm.max_generation_batches=2", "train.schedule=linear") as run:
        run.train()
    output = capfd.readouterr().out
    assert output.count("warning: step 2: all groups of 2 draws have equal rewards") == 1
    first, second, third = lines(run)
    assert equal(states[0][0], states[1][0]) and not equal(states[1][0], states[2][0])
    assert states[1][1] == [None] * len(states[1][1])
    assert second["rollout/draws"] == 2 and second["rollout/kept_ratio"] == 0 and second["train/zero_std_ratio"] == 1
    assert second["train/reward_mean"] == 0.5 and second["train/updates"] == first["train/updates"]
    assert (
        third["train/updates"] > second["train/updates"] and third["sync/delta_norm"] == second["sync/delta_norm"] > 0
    )
    # Nothing was compared in this step: no number of agreement, and above all none of the step before.
    assert not [name for name in second if "pearson" in name or "logp_diff" in name or name.startswith("train/grad")]
    assert [name for name in third if name.startswith("modality/") and name.endswith("/pearson")]
    assert (run.run.checkpoints / "step_2" / "manifest.json").exists()


# -- each part, switched off by itself


def test_without_dynamic_sampling_a_step_draws_once_and_trains_on_every_group(one_rank, recipe, draws):
    run, _ = finished(one_rank, recipe, "algorithm.dynamic_sampling=false")
    for line, drawn in zip(lines(run), draws, strict=True):
        assert drawn.groups == [0, 1, 2, 3] and drawn.chosen == drawn.everything
        assert line["rollout/draws"] == 1 and line["rollout/kept_ratio"] == 1 and line["train/samples"] == 8
    assert any(len(varied(drawn.everything)) < 4 for drawn in draws)


def test_where_every_group_differs_dynamic_sampling_changes_no_number(one_rank, recipe):
    (recipe.parent / "coins.py").write_text(
        "import zlib\ndef score(response, row):\n    return zlib.crc32(response.encode()) % 1000003\n"
    )
    on, ours = finished(one_rank, recipe, name="on")
    off, theirs = finished(one_rank, recipe, "algorithm.dynamic_sampling=false", name="off")
    assert numbers(on) == numbers(off) and equal(ours, theirs)


def test_an_overlong_buffer_that_no_response_enters_changes_no_number_but_its_own(one_rank, recipe):
    # With one token in six at the end of an answer none of them has 199.
    off, theirs = finished(one_rank, recipe, "rollout.max_new_tokens=200", name="off")
    on, ours = finished(one_rank, recipe, "rollout.max_new_tokens=200", "algorithm.overlong_buffer=2", name="on")
    logged = numbers(on)
    assert [line.pop("train/overlong_penalty") for line in logged] == [0.0] * 3
    assert logged == numbers(off) and equal(ours, theirs)


def test_the_overlong_penalty_comes_after_the_choice_of_groups(one_rank, recipe, draws, capfd):
    """With equal rewards and other lengths there is nothing to keep; without dynamic sampling the penalty teaches."""
    (recipe.parent / "flat").write_text("all")
    penalty = ("algorithm.overlong_buffer=5", "rollout.group_size=4")
    bounded = "algorithm.max_generation_batches=2"
    kept, _ = finished(one_rank, recipe, *penalty[1:], bounded, *penalty[:1], "train.max_steps=1", name="kept")
    assert lines(kept)[0]["rollout/kept_ratio"] == 0 and lines(kept)[0]["train/updates"] == 0
    lengths = {group: {len(s.tokens) for s in draws[0].everything if s.group == group} for group in range(4)}
    assert any(len(found) > 1 for found in lengths.values()), "the seed has no group of several lengths"
    plain, _ = finished(one_rank, recipe, *penalty, "algorithm.dynamic_sampling=false", name="plain")
    assert "nothing is learned" not in capfd.readouterr().out
    line = lines(plain)[0]
    assert line["train/grad_norm"] > 0 and line["train/reward_mean"] == 0.5 and line["train/zero_std_ratio"] == 1
    wanted = [-min(max(len(s.tokens) - 1, 0) / 5, 1.0) for s in draws[1].chosen]
    assert line["train/overlong_penalty"] == pytest.approx(sum(wanted) / len(wanted))


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean"])
def test_with_every_part_off_the_gradient_is_grpos(one_rank, recipe, draws, monkeypatch, aggregation):
    """GRPO by hand: mean over responses of the mean over tokens of -A (or DAPO's mean over all tokens)."""
    plain = ("algorithm.dynamic_sampling=false", "algorithm.clip_high=0.2", f"algorithm.aggregation={aggregation}")
    stepped = []

    def recorded(optimizer, scheduler, *args):
        stepped.append({name: p.grad.full_tensor().clone() for name, p in run.context.policy.trainable()})
        return clipped(optimizer, scheduler, *args)

    clipped = loops.clipped_step
    monkeypatch.setattr(loops, "clipped_step", recorded)
    with one_rank(recipe, *plain, "train.prompts_per_update=4", "train.max_steps=1") as run:
        before = weights(run)
        run.train()
        (found,) = stepped
        policy, source = run.context.policy, run.context
        with torch.no_grad():
            for name, parameter in policy.trainable():
                parameter.copy_(torch.distributed.tensor.distribute_tensor(before[name], parameter.device_mesh))
        samples = draws[0].everything
        rewards = torch.tensor([[s.reward for s in samples if s.group == group] for group in range(4)])
        scale = rewards.std(dim=1, correction=1, keepdim=True)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (scale + 1e-6)).flatten().tolist()
        inputs = [(source.processing.encode(source.train_rows[s.row]), s.tokens) for s in samples]
        logp = policy.logprobs(inputs)[0].split([len(s.tokens) for s in samples])
        terms = [-a * (part - part.detach()).exp() for a, part in zip(advantages, logp, strict=True)]
        loss = (
            torch.stack([term.mean() for term in terms]).mean()
            if aggregation == "sequence_mean"
            else torch.cat(terms).mean()
        )
        loss.backward()
        wanted = {name: p.grad.full_tensor() for name, p in policy.trainable()}
    assert any(gradient.norm() > 0 for gradient in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-4, atol=1e-7)


# -- stopped in the middle of a refill


@pytest.mark.parametrize("how", ["asked to stop", "killed"])
def test_p2_a_stop_during_a_second_draw_resumes_bit_exact(one_rank, recipe, draws, monkeypatch, how):
    whole, trained = finished(one_rank, recipe, name="whole")
    refills = [number for number, drawn in enumerate(draws, start=1) if drawn.draws > 1]
    assert refills[-1] > 1, "the seed has no refill after the first step"
    victim, sample = refills[-1], Rollouts.sample

    def watched(self, source, rows, key, *args, **options):
        if key == ("train", victim) and options["earlier"]:
            if how == "killed":
                raise KeyboardInterrupt  # as a kill: nothing is saved after the step before
            request_stop(run.run, "update")
        return sample(self, source, rows, key, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Rollouts, "sample", watched)
        with pytest.raises(KeyboardInterrupt if how == "killed" else Interrupted), one_rank(recipe) as run:
            run.train()
    assert len(lines(run)) == victim - 1
    assert max(int(path.name[5:]) for path in run.run.checkpoints.iterdir()) == victim - 1
    again, resumed = finished(one_rank, recipe)
    assert numbers(again) == numbers(whole) and equal(resumed, trained)
