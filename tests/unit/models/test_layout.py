"""Ids and positions of media tokens."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnitrain.models.qwen3_omni.layout import Layout, Span, merged

IMAGE, AUDIO, VIDEO, START, END = 1, 2, 3, 4, 5


def layout(per_second=13):
    return Layout(
        SimpleNamespace(
            image_token_id=IMAGE,
            audio_token_id=AUDIO,
            video_token_id=VIDEO,
            audio_start_token_id=START,
            audio_end_token_id=END,
            position_id_per_seconds=per_second,
        )
    )


LAYOUT = layout()


def test_text_goes_on_after_the_largest_position_of_what_stands_before_it():
    ids, positions = LAYOUT.expand([9, IMAGE, 9, AUDIO, 9], [Span("image", (1, 1, 3)), Span("audio", sound=2)])
    assert ids == [9, IMAGE, IMAGE, IMAGE, 9, AUDIO, AUDIO, 9]
    assert positions.tolist() == [[0, 1, 1, 1, 4, 5, 6, 7], [0, 1, 1, 1, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]]


def test_frame_pairs_stand_at_their_time_rounded_down():
    ids, positions = LAYOUT.expand([VIDEO, 9], [Span("video", (3, 1, 1), 0.5)])
    assert ids == [VIDEO] * 3 + [9] and positions[0].tolist() == [0, 6, 13, 14]


def test_a_track_is_merged_into_its_video_by_time_the_video_first():
    ids, positions = layout(2).expand([9, VIDEO, 9], [Span("video", (2, 1, 1), 1.0, sound=4)])
    assert ids == [9, START, VIDEO, AUDIO, AUDIO, VIDEO, AUDIO, AUDIO, END, 9]
    assert positions[0].tolist() == [0, 1, 2, 2, 3, 4, 4, 5, 6, 7]
    assert positions[1].tolist() == [0, 1, 2, 2, 3, 2, 4, 5, 6, 7]


@given(
    times=st.lists(st.floats(0, 60), max_size=12).map(sorted),
    sounds=st.integers(0, 40),
)
def test_merging_keeps_both_orders_and_rises_in_time(times, sounds):
    order = merged(np.array(times), sounds)
    assert sorted(order) == list(range(len(times) + sounds))
    assert [i for i in order if i < len(times)] == list(range(len(times)))
    assert [i for i in order if i >= len(times)] == list(range(len(times), len(times) + sounds))
    when = [times[i] if i < len(times) else i - len(times) for i in order]
    assert when == sorted(when)


@pytest.mark.parametrize("seconds", [0.5, 1.0, 1.121, 2.5, 1 / 13])
def test_ids_and_positions_of_a_heard_video_are_in_one_order(seconds):
    ids, positions = LAYOUT.expand([VIDEO], [Span("video", (4, 1, 2), seconds, sound=50)])
    sounds = [place for token, place in zip(ids, positions[0].tolist()) if token == AUDIO]
    videos = [place for token, place in zip(ids, positions[0].tolist()) if token == VIDEO]
    assert sounds == list(range(1, 51))
    assert videos == [1 + int(k * float(np.float32(seconds)) * 13) for k in range(4) for _ in range(2)]
