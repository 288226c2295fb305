"""The stream of rows: whole epochs, whole steps, resumable at any point."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnitrain.data.sampler import PromptSampler, steps_in
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
