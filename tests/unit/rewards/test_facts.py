import pickle
from pathlib import Path

from omnitrain.data.sample import Message, Part, Row, Sample
from omnitrain.rewards.facts import facts


def sample(**more):
    fields = {
        "row": 0,
        "group": 0,
        "child": 0,
        "prompt_ids": [],
        "tokens": [1, 2, 3],
        "logprobs": [],
        "finish_reason": "length",
    }
    return Sample(**fields | more)


def test_a_reward_is_told_the_row_the_prompt_and_the_length():
    content = (Part("image", path="media/a.png"), Part("text", text="Which?"), Part("audio", data=b"x"))
    turns = (Message("system", (Part("text", text="Answer."),)), Message("user", content))
    row = Row("r", turns, "B", "avqa", {"k": 1}, Path("/data"), 0)
    told = facts(row, sample(), 64)
    assert told == {
        "id": "r",
        "answer": "B",
        "source": "avqa",
        "meta": {"k": 1},
        "prompt": "Which?",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Answer."}]},
            {
                "role": "user",
                "content": [
                    {"type": "image", "path": "/data/media/a.png"},
                    {"type": "text", "text": "Which?"},
                    {"type": "audio", "data": b"x"},
                ],
            },
        ],
        "response_tokens": 3,
        "finish_reason": "length",
        "max_new_tokens": 64,
    }
    assert pickle.loads(pickle.dumps(told)) == told
