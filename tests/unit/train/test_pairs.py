"""Preference pairs on their way into updates, and the table of reference log-probs."""

import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnitrain.data.sample import Sample
from omnitrain.errors import DataError, RunError
from omnitrain.evaluation.preference import summarise_pairs
from omnitrain.train.prompts import first_of_each
from omnitrain.train.reference import ReferenceSums, _read, fingerprint
from omnitrain.train.updates import MicroBatch, plan_updates


def pairs(lengths) -> list[Sample]:
    return [
        Sample(group, group, child, [1] * 3, [2] * length, [0.0], "stop")
        for group, both in enumerate(lengths)
        for child, length in enumerate(both)
    ]


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_l4_a_pair_is_never_split_and_ranks_make_equally_many_passes(lengths, world, updates):
    plans = [
        plan_updates(
            pairs(lengths),
            updates=updates,
            units=lambda samples: len(samples) // 2,
            max_tokens=60,
            ranks=SimpleNamespace(rank=rank, world=world),
            key=(0, 1),
            together=True,
        )
        for rank in range(world)
    ]
    seen = Counter()
    for update in zip(*plans, strict=True):
        assert len({len(part.batches) for part in update}) == 1
        for batch in (batch for part in update for batch in part.batches):
            turns = [(sample.group, sample.child) for sample in batch.samples]
            assert turns and all(
                one == (two[0], 0) and two[1] == 1 for one, two in zip(turns[::2], turns[1::2], strict=True)
            )
            assert sum(len(s.prompt_ids) + len(s.tokens) for s in batch.samples) <= 60
            seen.update([] if batch.filler else turns)
    assert seen == Counter((group, child) for group in range(len(lengths)) for child in (0, 1))
    assert sum(update.units for update in plans[0]) == len(lengths)


def test_a_micro_batch_has_reference_sums_where_all_its_samples_have():
    batch = MicroBatch(pairs([(2, 3)]))
    assert batch.reference_sums(torch.device("cpu")) is None
    for sample, value in zip(batch.samples, (-1.5, -2.5)):
        sample.reference_sum = value
    assert batch.reference_sums(torch.device("cpu")).tolist() == [-1.5, -2.5]


def test_reference_sums_go_by_row_id_and_a_row_without_them_is_an_error(tmp_path):
    train, validation = (SimpleNamespace(rows=SimpleNamespace(ids=ids)) for ids in (["a", "b"], ["b", "c"]))
    sums = ReferenceSums(
        [(train, {"a": [1.0, 2.0], "b": [3.0, 4.0]}), (validation, {"b": [5.0, 6.0]})], tmp_path / "r.json"
    )
    samples = pairs([(1, 1), (1, 1)])
    sums.fill(samples, train)
    assert [sample.reference_sum for sample in samples] == [1.0, 2.0, 3.0, 4.0]
    sums.fill(samples[:2], validation)
    assert [sample.reference_sum for sample in samples[:2]] == [5.0, 6.0]
    with pytest.raises(RunError, match="r.json has no log-probs of row 'c'; .* start a new run"):
        sums.fill(samples, validation)


DIGEST = {"train": "1", "validation": None, "model": "2 float32", "start": None, "prompts": "3"}


@pytest.mark.parametrize(
    "text, resumed, found",
    [
        (None, False, None),
        (None, True, "is gone, and this run has trained against it; put it back or start a new run"),
        ('{"digest"', True, r"is damaged .*start a new run"),
        ("[]", False, r"is damaged .*delete it, and it is computed again"),
        ('{"digest": %s}', False, "is damaged"),
        (
            '{"digest": {}, "train": {}}',
            False,
            "something else: the training rows changed since; undo that, or delete it",
        ),
        ('{"digest": %s, "train": {"a": [0.1, -0.2]}}', True, {"train": {"a": [0.1, -0.2]}}),
        (
            '{"digest": {**%s, "start": "4"}, "train": {}}',
            False,
            "the starting weights changed since; undo that, or delete",
        ),
        ('{"digest": {**%s, "start": "4"}, "train": {}}', True, {"train": {}}),  # the run they came from has moved on
    ],
)
def test_a_file_of_reference_log_probs_is_read_or_refused_with_the_fix(tmp_path, text, resumed, found):
    path = tmp_path / "reference.json"
    if text:
        digest = json.dumps(DIGEST)
        path.write_text(text.replace("{**%s,", digest[:-1] + ",").replace("%s", digest))
    read = _read(path, DIGEST, resumed)
    assert re.search(found, read) if isinstance(found, str) else read == found


def test_a_fingerprint_sees_a_weight_that_changed_at_either_end_and_a_file_more(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    prints = {fingerprint(tmp_path)}
    for change in (b"\1" + bytes((3 << 20) - 1), bytes((3 << 20) - 1) + b"\1", bytes(3 << 20) + b"\0"):
        weights.write_bytes(change)
        prints.add(fingerprint(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    prints.add(fingerprint(tmp_path))
    assert len(prints) == 5


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=30), st.integers(3, 20))
def test_balanced_rows_are_the_first_of_each_kind_in_equal_shares(labels, limit):
    chosen = first_of_each(labels, limit)
    assert chosen == sorted(chosen) and len(chosen) <= limit
    for kind in set(labels):
        mine = [index for index, label in enumerate(labels) if label == kind]
        share = limit // len(set(labels))
        assert [index for index in chosen if labels[index] == kind] == mine[:share]


def test_fewer_rows_than_kinds_is_an_error():
    with pytest.raises(DataError, match=r"validate.max_rows = 1 is less than .* \(audio, text\); set it to 2 or more"):
        first_of_each(["audio", "text"], 1)


def test_pairs_are_summed_over_ranks_by_modality_and_over_all():
    one = {"text": Counter(loss=1.0, accuracy=1, margin=0.5, chosen_reward=0.25, rejected_reward=-0.25, rows=2)}
    other = {"text": Counter(loss=2.0, rows=1), "image": Counter(loss=3.0, accuracy=1, rows=1)}
    values = summarise_pairs([one, other])
    assert values["val/text/loss"] == 1.0 and values["val/text/rows"] == 3
    assert values["val/all/loss"] == 1.5 and values["val/all/accuracy"] == 0.5 and values["val/all/rows"] == 4
    assert values["val/image/margin"] == 0 and values["val/all/rejected_reward"] == -0.0625
    assert summarise_pairs([{}, {}]) == {}
