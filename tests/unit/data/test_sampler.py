"""The stream of rows: whole epochs, whole steps, resumable at any point."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnitrain.data.sampler import PromptSampler, build_sampler, steps_in
from omnitrain.errors import DataError

sizes = st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 5), st.booleans())


@given(sizes, st.integers(1, 12))
def test_l4_every_step_is_whole_whatever_the_file_length(size, steps):
    rows, per_step, seed, shuffle = size
    sampler = PromptSampler(rows, per_step, seed, shuffle)
    assert all(len(sampler.next()) == per_step for _ in range(steps))
    assert sampler.consumed == steps * per_step
    assert sampler.epoch == steps * per_step // rows


@given(sizes)
def test_each_epoch_holds_every_row_once(size):
    rows, per_step, seed, shuffle = size
    sampler = PromptSampler(rows, per_step, seed, shuffle)
    stream = [row for _ in range(3 * rows) for row in sampler.next()]
    for epoch in range(3):
        assert sorted(stream[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


@given(st.integers(1, 40), st.data(), st.booleans())
def test_no_step_holds_a_row_twice(rows, data, shuffle):
    sampler = PromptSampler(rows, data.draw(st.integers(1, rows)), 3, shuffle)
    for _ in range(8):
        step = sampler.next()
        assert len(set(step)) == len(step)


@given(sizes, st.integers(0, 9))
def test_p2_resumed_stream_continues_without_repeats_or_gaps(size, steps):
    rows, per_step, seed, shuffle = size
    whole, first = (PromptSampler(rows, per_step, seed, shuffle) for _ in range(2))
    expected = [whole.next() for _ in range(steps + 6)]
    before = [first.next() for _ in range(steps)]
    resumed = PromptSampler(rows, per_step, seed, shuffle)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + [resumed.next() for _ in range(6)] == expected
    assert (resumed.epoch, resumed.consumed) == (whole.epoch, whole.consumed)


def test_p2_state_taken_mid_step_by_take_is_exact():
    whole = PromptSampler(10, 4, 0)
    stream = whole.take(25)
    first = PromptSampler(10, 4, 0)
    head = first.take(25)
    second = PromptSampler(10, 4, 0)
    second.load_state_dict(first.state_dict())
    assert head == stream and second.take(13) == whole.take(13)


def test_order_follows_seed_and_epoch():
    a, b, other = PromptSampler(50, 50, 1), PromptSampler(50, 50, 1), PromptSampler(50, 50, 2)
    epochs = [a.next(), a.next()]
    assert epochs == [b.next(), b.next()]
    assert epochs[0] != epochs[1] and other.next() != epochs[0]
    assert PromptSampler(5, 3, 1, shuffle=False).take(7) == [0, 1, 2, 3, 4, 0, 1]


@pytest.mark.parametrize(
    "other", [PromptSampler(9, 2, 0), PromptSampler(8, 2, 1), PromptSampler(8, 2, 0, shuffle=False)]
)
def test_state_of_other_data_or_seed_is_refused(other):
    with pytest.raises(DataError, match="the checkpoint's sampler has"):
        PromptSampler(8, 2, 0).load_state_dict(other.state_dict())


def test_no_rows_is_an_error():
    with pytest.raises(DataError, match="no rows"):
        PromptSampler(0, 1, 0)


def test_steps_in_counts_whole_steps():
    assert [steps_in(10, 4, 1), steps_in(10, 4, 2), steps_in(3, 4, 1)] == [2, 5, 1]


def test_p2_a_single_file_is_drawn_as_ever_so_that_older_checkpoints_resume():
    sampler = PromptSampler(10, 4, 7)
    drawn = [[3, 9, 2, 5], [7, 0, 6, 4], [1, 8, 4, 2], [3, 7, 0, 6], [9, 5, 8, 1], [0, 9, 3, 5]]
    assert [sampler.next() for _ in range(6)] == drawn
    state = {"n_rows": 10, "seed": 7, "shuffle": True, "epoch": 1, "offset": 2, "deferred": [1, 8]}  # after 3 steps
    for resumed in (PromptSampler(10, 4, 7), build_sampler([range(10)], per_step=4, seed=7, weights=[3.0])):
        resumed.load_state_dict(state)
        assert [resumed.next() for _ in range(3)] == drawn[3:]


def test_files_without_weights_are_one_stream_of_all_their_rows():
    both = build_sampler([range(4), range(4, 10)], per_step=4, seed=7)
    assert [both.next() for _ in range(3)] == [[3, 9, 2, 5], [7, 0, 6, 4], [1, 8, 4, 2]]


# -- several streams

files = st.lists(st.integers(1, 12), min_size=2, max_size=4)
shares = st.lists(st.floats(0.05, 8), min_size=4, max_size=4)
KINDS = ("image", "image+audio", "text")


def ranges(lengths):
    starts = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:])]


@given(files, shares, st.lists(st.integers(1, 5), min_size=1, max_size=40))
def test_a_mixture_never_strays_from_its_shares(lengths, weights, takes):
    weights = weights[: len(lengths)]
    sampler = build_sampler(ranges(lengths), per_step=2, seed=1, weights=weights)
    drawn = []
    for count in takes:
        taken = sampler.take(count)
        assert len(taken) == count
        drawn += taken
        for rows, weight in zip(ranges(lengths), weights):
            share = weight / sum(weights) * len(drawn)
            assert abs(sum(row in rows for row in drawn) - share) <= len(lengths)
    assert sampler.consumed == len(drawn)


@given(files, shares, st.integers(1, 60))
def test_within_an_epoch_of_a_file_no_row_of_a_mixture_comes_twice(lengths, weights, count):
    drawn = build_sampler(ranges(lengths), per_step=2, seed=1, weights=weights[: len(lengths)]).take(count)
    for rows in ranges(lengths):
        mine = [row for row in drawn if row in rows]
        for start in range(0, len(mine), len(rows)):
            epoch = mine[start : start + len(rows)]
            assert len(set(epoch)) == len(epoch)


def modality_sampler(lengths, per_step, seed, weights=None, kinds=None):
    modalities = [KINDS[row % 3] for row in range(sum(lengths))]
    return modalities, build_sampler(
        ranges(lengths), per_step=per_step, seed=seed, weights=weights, modalities=modalities, modality_weights=kinds
    )


many = st.lists(st.integers(6, 12), min_size=1, max_size=3)


@given(many, st.integers(1, 2), st.integers(0, 9), shares, st.integers(1, 30))
def test_every_step_is_of_one_modality_and_its_epochs_hold_each_row_once(lengths, per_step, seed, weights, steps):
    weights = weights[: len(lengths)] if seed % 2 else None
    modalities, sampler = modality_sampler(lengths, per_step, seed, weights)
    drawn = [sampler.next() for _ in range(steps)]
    for step in drawn:
        assert len(step) == len(set(step)) == per_step
        assert len({modalities[row] for row in step}) == 1
    for kind in KINDS if weights is None else ():
        mine = [row for step in drawn for row in step if modalities[row] == kind]
        size = modalities.count(kind)
        for start in range(0, len(mine), size):
            epoch = mine[start : start + size]
            assert len(set(epoch)) == len(epoch)


def test_modalities_come_as_often_as_their_weights_say():
    weights = {"image": 1, "image+audio": 2, "text": 5}
    modalities, sampler = modality_sampler([30], 3, 11, kinds=weights)
    counts = Counter(modalities[sampler.next()[0]] for _ in range(4000))
    for kind, weight in weights.items():
        assert counts[kind] / 4000 == pytest.approx(weight / 8, abs=0.025)  # three standard deviations


def test_a_modality_without_a_weight_is_not_drawn_when_others_have_one():
    modalities, sampler = modality_sampler([30], 3, 0, kinds={"text": 1.0})
    assert {modalities[row] for _ in range(20) for row in sampler.next()} == {"text"}


def test_replacements_of_skipped_rows_are_of_the_steps_modality():
    modalities, sampler = modality_sampler([30], 4, 2)
    for _ in range(20):
        sampler.begin()
        step = [*sampler.take(4), *sampler.take(1), *sampler.take(2)]
        assert len({modalities[row] for row in step}) == 1
        assert set(step) <= set(sampler.pool)


@given(many, st.booleans(), st.booleans(), st.lists(st.integers(1, 5), max_size=12))
def test_p2_streams_put_together_resume_at_any_point(lengths, weighted, by_modality, takes):
    def make():
        weights = [1.0 + number for number in range(len(lengths))] if weighted else None
        if by_modality:
            return modality_sampler(lengths, 2, 4, weights)[1]
        return build_sampler(ranges(lengths), per_step=2, seed=4, weights=weights)

    whole, resumed = make(), make()
    for number, count in enumerate(takes):
        if number % 2 == 0:
            whole.begin()
        whole.take(count)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert [resumed.take(3), *(resumed.next() for _ in range(8))] == [whole.take(3), *(whole.next() for _ in range(8))]
    assert (resumed.consumed, resumed.epoch) == (whole.consumed, whole.epoch)


def test_p2_the_state_of_another_kind_of_stream_is_refused():
    one, mixed = PromptSampler(12, 2, 4), build_sampler(ranges([6, 6]), per_step=2, seed=4, weights=[1, 2])
    other = build_sampler(ranges([6, 6]), per_step=2, seed=4, weights=[2, 1])
    _, by_modality = modality_sampler([12], 2, 4)
    for stream in (one, mixed, by_modality):
        for state in [s.state_dict() for s in (one, mixed, other, by_modality) if s is not stream]:
            with pytest.raises(DataError, match="the checkpoint's sampler has"):
                stream.load_state_dict(state)


def test_a_modality_with_fewer_rows_than_a_step_is_an_error_by_name():
    with pytest.raises(DataError, match="image has 3 training rows, fewer than train.prompts_per_step = 4"):
        modality_sampler([9], 4, 0)


def test_a_weight_for_an_absent_modality_names_those_present():
    with pytest.raises(DataError, match=r"names video, .* there are image, image\+audio, text"):
        modality_sampler([9], 2, 0, kinds={"video": 1.0, "text": 1.0})
