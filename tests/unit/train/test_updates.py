"""From a step's samples to updates and micro-batches; what ranks agree on."""

import math
from types import SimpleNamespace

import pytest
import torch

from omnitrain.data.sample import Sample
from omnitrain.errors import GateRefused, Interrupted, RunError
from omnitrain.rundir import RunDir, request_stop
from omnitrain.train.context import Context
from omnitrain.train.online import OnlineLoop
from omnitrain.train.updates import UpdateStats, plan_updates


def samples(groups: int, n: int = 2, failed=()) -> list[Sample]:
    return [
        Sample(100 + group, group, child, [1] * 5, [2] * (1 + child), [0.0], "stop", failed=(group, child) in failed)
        for group in range(groups)
        for child in range(n)
    ]


def plan(chosen, *, updates=2, rank=0, world=1, max_tokens=20):
    ranks = SimpleNamespace(rank=rank, world=world)
    return plan_updates(chosen, updates=updates, units=len, max_tokens=max_tokens, ranks=ranks, key=(0, 1))


def members(update) -> set[tuple[int, int]]:
    return {(s.group, s.child) for s in update.samples}


def test_groups_stay_whole_and_every_sample_is_in_one_update():
    first, second = plan(samples(4))
    assert members(first) | members(second) == {(g, c) for g in range(4) for c in range(2)}
    assert not {g for g, _ in members(first)} & {g for g, _ in members(second)}
    assert first.units == second.units == 4


def test_failed_samples_are_in_no_update_and_no_unit():
    updates = plan(samples(4, failed={(0, 0), (1, 0), (1, 1)}))
    assert sum(update.units for update in updates) == 5
    assert not {(0, 0), (1, 0), (1, 1)} & set().union(*map(members, updates))


def test_updates_without_a_sample_are_left_out():
    failed = {(group, child) for group in range(3) for child in range(2)}
    assert len(plan(samples(4, failed=failed), updates=4)) == 1
    assert plan(samples(2, failed={(g, c) for g in range(2) for c in range(2)})) == []


def test_l4_ranks_make_equally_many_passes_and_one_without_samples_fills_in_at_no_weight():
    shares = [plan(samples(1, n=1), updates=1, rank=rank, world=3)[0].batches for rank in range(3)]
    assert [len(share) for share in shares] == [1, 1, 1]
    assert sorted(batch.filler for share in shares for batch in share) == [False, True, True]


def test_a_sequence_longer_than_a_micro_batch_names_its_row():
    with pytest.raises(RunError, match="a response to row 101 of the data has 7 tokens"):
        plan(samples(2)[3:], max_tokens=6)


@pytest.mark.parametrize(
    "seen, agreed", [([None, None], None), ([None, "update"], "update"), (["step", "update"], "update")]
)
def test_a_stop_that_any_rank_has_seen_is_agreed_by_all(tmp_path, seen, agreed):
    run = RunDir(tmp_path)
    if seen[0]:
        request_stop(run, seen[0])

    def gather(own):
        assert own == seen[0]
        return seen

    assert Context.stop(SimpleNamespace(run=run, ranks=SimpleNamespace(gather=gather))) == agreed


def _asked(run, when):
    """A context of one rank whose user has asked to stop (`when`), or has not."""
    if when:
        request_stop(run, when)
    context = SimpleNamespace(run=run, ranks=SimpleNamespace(gather=lambda own: [own]))
    context.stop = lambda: Context.stop(context)
    return context


@pytest.mark.parametrize("when", ["step", "update"])
def test_a_stop_during_the_start_ends_it_with_130_and_says_that_nothing_is_new(tmp_path, when):
    with pytest.raises(Interrupted, match="^stopped before step 4; nothing new to save$") as stopped:
        Context.check_start(_asked(RunDir(tmp_path), when), 4)
    assert stopped.value.exit_code == 130
    assert list(tmp_path.glob("checkpoints/*")) == []


def test_a_start_that_nobody_stops_goes_on(tmp_path):
    Context.check_start(_asked(RunDir(tmp_path), None), 4)


@pytest.mark.parametrize("values", [[math.nan, 0.0], [0.0, math.nan], [0.0, math.nan, 1.0]])
def test_a_nan_among_the_micro_batches_stays_in_the_largest(values):
    stats = UpdateStats()
    for value in values:
        stats.add({"abs_log_ratio_max": torch.tensor(value)})
    assert math.isnan(stats.maxima["abs_log_ratio_max"])


def _check_ratio(own, others):
    recipe = SimpleNamespace(algorithm=SimpleNamespace(old_logprobs="trainer"), gates=SimpleNamespace(skip=[]))
    ranks = SimpleNamespace(gather=lambda value: [value, *others])
    loop = SimpleNamespace(recipe=recipe, ranks=ranks, log_ratio_tolerance=1e-6)
    OnlineLoop._check_first_ratio(loop, 3, UpdateStats(maxima={"abs_log_ratio_max": own}))


@pytest.mark.parametrize("own, others", [(math.nan, [0.0]), (0.0, [math.nan]), (0.0, [1e-3])])
def test_g5_a_first_ratio_that_is_nan_or_too_large_on_any_rank_is_refused(own, others):
    with pytest.raises(GateRefused, match="g5: step 3"):
        _check_ratio(own, others)


def test_g5_a_first_ratio_within_rounding_passes():
    _check_ratio(0.0, [1e-7])
