"""What a reward is told of a row and of the sample it scores: plain data, so that it can go to another process."""

from __future__ import annotations

from typing import Any

from omnitrain.data.sample import Row, Sample


def facts(row: Row, sample: Sample, max_new_tokens: int) -> dict[str, Any]:
    """The `row` of `score(response, row)`; docs/rewards.md lists its keys.

    max_new_tokens: the most tokens that the response could have had.
    """
    messages = [{"role": turn.role, "content": [_part(part, row) for part in turn.content]} for turn in row.messages]
    texts = [part["text"] for turn in messages if turn["role"] == "user" for part in turn["content"] if "text" in part]
    return {
        "id": row.id,
        "answer": row.answer,
        "source": row.source,
        "meta": row.meta,
        "prompt": "\n".join(texts),
        "messages": messages,
        "response_tokens": len(sample.tokens),
        "finish_reason": sample.finish_reason,
        "max_new_tokens": max_new_tokens,
    }


def _part(part: Any, row: Row) -> dict[str, Any]:
    if part.type == "text":
        return {"type": "text", "text": part.text}
    if part.data is not None:
        return {"type": part.type, "data": part.data}
    return {"type": part.type, "path": str(row.root.absolute() / part.path)}
