"""The demo sets with videos: published layouts, right answers, half of the clips with sound, the same files again."""

import csv

import numpy as np
import pytest

from omnitrain.data.converters import convert
from omnitrain.data.demo_nextqa import OPTIONS, write_nextqa
from omnitrain.data.demo_preference import CHOICES, write_preference
from omnitrain.data.media import load_audio, load_image, load_track, load_video
from omnitrain.data.schema import RowFile
from omnitrain.data.video import FrameSampling
from omnitrain.errors import DataError


def colour(pixels):
    """Of (n, 3) pixels, those that are not grey: "red" or "blue"."""
    coloured = pixels[np.ptp(pixels.astype(int), axis=1) > 60]
    return "red" if coloured[:, 0].mean() > coloured[:, 2].mean() else "blue"


def motion(frames):
    """From where the square is in the first and the last of the frames that a model looks at."""
    centres = [np.argwhere(np.ptp(frame.astype(int), axis=2) > 60).mean(axis=0) for frame in (frames[0], frames[-1])]
    down, right = np.abs(centres[1] - centres[0])
    return "no motion" if max(down, right) < 4 else "sideways" if right > down else "up and down"


def seen(row):
    frames = load_video(row.messages[-1].content[0], row.root, FrameSampling()).frames
    moves = motion(frames)
    return moves if moves == "no motion" else f"{colour(frames.reshape(-1, 3))} {moves}"


def letter(row):
    return "<answer>{}</answer>".format("ABCDE"[OPTIONS.index(seen(row))])


def test_nextqa_answers_are_right_and_half_of_the_clips_have_sound(tmp_path):
    write_nextqa(tmp_path, rows=80)
    report = convert("nextqa", [tmp_path / "NExT-QA"], tmp_path / "out")
    assert {s.name: s.kept for s in report.splits} == {"train": 80, "validation": 10, "warmup": 80}
    assert report.bad == 0 and not report.notes, "splits must share no clip"
    train, warmup = (list(RowFile(tmp_path / "out" / f"{split}.parquet")) for split in ("train", "warmup"))
    assert all(row.answer == letter(row) for row in train) and len({row.answer for row in train}) == 5
    assert 0.2 < np.mean([row.answer == letter(row) for row in warmup]) < 0.55, "0.36 is meant"
    tracks = [load_track(row.messages[-1].content[0], row.root) for row in train]
    assert [track is not None for track in tracks] == [row.meta["sound_track"] for row in train]
    assert 0.3 < np.mean([track is not None for track in tracks]) < 0.7
    assert max(np.abs(track).max() for track in tracks if track is not None) > 0.1, "a tone, not silence"
    text = train[0].messages[-1].content[1].text
    assert len(text) < 110, "the tiny model's prompts must be short"


def test_preference_pairs_are_right_whichever_candidate_they_come_as(tmp_path):
    write_preference(tmp_path, rows=120)
    report = convert("omni-preference", [tmp_path], tmp_path / "out", validation=0.2)
    assert report.kept == 120 and report.bad == 0
    rows = [row for split in ("train", "validation") for row in RowFile(tmp_path / "out" / f"{split}.parquet")]
    for kind, choices in CHOICES.items():
        mine = [row for row in rows if row.modality == kind]
        chosen = [row.chosen.removeprefix("It is ").removesuffix(".") for row in mine]
        assert len(mine) == 40 and set(chosen) == set(choices)
        assert chosen == [what(row.messages[0].content[0], row, kind) for row in mine]
        assert all({row.chosen, row.rejected} == {f"It is {choice}." for choice in choices} for row in mine)


def what(part, row, kind):
    if kind == "image":
        return colour(np.asarray(load_image(part, row.root)).reshape(-1, 3))
    if kind == "audio":
        samples = load_audio(part, row.root)
        return "high" if np.argmax(np.abs(np.fft.rfft(samples))) * 16000 / len(samples) > 1000 else "low"
    return motion(load_video(part, row.root, FrameSampling()).frames)


@pytest.mark.parametrize("write", [write_nextqa, write_preference])
def test_the_same_arguments_give_the_same_files(tmp_path, write):
    def files(folder):
        return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    first, second = files(write(tmp_path / "a", rows=6)), files(write(tmp_path / "b", rows=6))
    assert first == second and len(first) > 6
    assert files(write(tmp_path / "a", rows=6, seed=1)) != first


def test_nextqa_tables_have_the_published_columns(tmp_path):
    target = write_nextqa(tmp_path, rows=8)
    with (target / "val.csv").open(newline="") as file:
        [record] = csv.DictReader(file)
    published = "video,frame_count,width,height,question,answer,qid,type,a0,a1,a2,a3,a4"
    assert ",".join(record) == published and (record["frame_count"], record["width"]) == ("8", "64")


@pytest.mark.parametrize(("write", "name"), [(write_nextqa, "NExT-QA"), (write_preference, "Omni-Preference")])
def test_a_real_data_set_in_the_way_is_left_alone(tmp_path, write, name):
    (tmp_path / name).mkdir()
    with pytest.raises(DataError, match="is there already and is not a demo set"):
        write(tmp_path, rows=2)
    assert list((tmp_path / name).iterdir()) == []
