import asyncio
import base64
import io
import re
import time

import pytest
from PIL import Image

from omnitrain.errors import RewardError, RunError
from omnitrain.recipe.rewards import GenrmOcrReward, UnifiedReward
from omnitrain.rewards import genrm_ocr
from omnitrain.rewards.endpoints import open_reward
from omnitrain.rewards.genrm_ocr import likeness, wanted_text
from omnitrain.rewards.scorer import Scorer
from omnitrain.rewards.unified_reward import points

MODELS = {"object": "list", "data": [{"id": "judge"}]}
AXES = ["relevance", "accuracy", "clarity"]


def says(*answers):
    """A chat endpoint that gives these answers in turn, the last one for ever."""
    waiting = list(answers)

    def answer(request, number):
        if request.method == "GET":
            return 200, {}, MODELS
        text = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return 200, {}, {"choices": [{"message": {"role": "assistant", "content": text}}]}

    return answer


def lines(*numbers):
    return "\n".join(f"{axis}: {number}" for axis, number in zip(AXES, numbers, strict=True))


def judge(server, **options):
    return UnifiedReward(kind="unified_reward", url=f"{server.root}/v1", model="judge", **options)


def row(number=0, *media):
    content = [*media, {"type": "text", "text": "What is it?"}]
    return {"id": f"row-{number}", "answer": None, "source": "t", "messages": [{"role": "user", "content": content}]}


def png(colour="red"):
    file = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(file, "PNG")
    return file.getvalue()


def score_one(spec, *media):
    with Scorer([spec]) as scorer:
        scorer.submit(0, "A fox.", row(0, *media))
        return scorer.collect()[0].reward


@pytest.mark.parametrize("given, value", [((1, 1, 1), 0.0), ((5, 5, 5), 1.0), ((3, 3, 3), 0.5), ((5, 4, 2), 2 / 3)])
def test_the_mean_of_1_to_5_is_mapped_to_0_to_1(server, given, value):
    server.answer = says("It is fine.\n" + lines(*given))
    assert score_one(judge(server)) == pytest.approx(value)


def test_the_judge_sees_the_prompt_its_media_and_the_response(server, tmp_path):
    server.answer = says(lines(3, 3, 3))
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b.wav").write_bytes(b"RIFF....WAVE")
    (tmp_path / "c.mp4").write_bytes(b"....ftyp")
    media = [
        {"type": t, "path": str(tmp_path / n)} for t, n in (("image", "a.png"), ("audio", "b.wav"), ("video", "c.mp4"))
    ]
    score_one(judge(server), *media)
    request = server.requests[-1]
    assert request.path == "/v1/chat/completions" and request.json["model"] == "judge"
    assert request.json["temperature"] == 0 and request.json["max_tokens"] == 512
    _, image, audio, video, prompt, task = request.json["messages"][0]["content"]
    assert image["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(png()).decode()
    assert audio["input_audio"] == {"data": base64.b64encode(b"RIFF....WAVE").decode(), "format": "wav"}
    assert video["video_url"]["url"].startswith("data:video/mp4;base64,")
    assert prompt["text"] == "What is it?" and "A fox." in task["text"] and all(axis in task["text"] for axis in AXES)


def test_an_answer_that_cannot_be_read_is_asked_again_with_sampling(server):
    server.answer = says("I would rather not.", lines(5, 5, 5))
    assert score_one(judge(server)) == 1.0
    first, second = [r.json for r in server.requests if r.method == "POST"]
    assert first["temperature"] == 0 < second["temperature"] and first["seed"] != second["seed"]


def test_r2_unparsable_answers_are_a_failure_and_never_a_zero(server):
    server.answer = says("no", "nothing", lines(3, 9, 3))
    with pytest.raises(RewardError, match='row-0: judge gave 3 answers that cannot be read; the last: "accuracy" is 9'):
        score_one(judge(server))
    assert len(server.requests) == 4


@pytest.mark.parametrize("reply", [{}, {"choices": []}, {"choices": [{"message": None}]}, [1]])
def test_a_reply_that_is_no_chat_completion_is_a_failure(server, reply):
    server.answer = lambda request, number: (200, {}, MODELS if request.method == "GET" else reply)
    with pytest.raises(RewardError, match=f"row-0: POST {server.root}/v1/chat/completions: not a chat completion"):
        score_one(judge(server))


@pytest.mark.parametrize(
    "answer, found",
    [
        ("<think>relevance: 1</think>\n" + lines(5, 4, 3), [5, 4, 3]),
        ("Relevance: 2/5\n**Accuracy**: 4.5\n- clarity = 3.", [2, 4.5, 3]),
        (lines(1, 1, 1) + "\nOn reflection:\n" + lines(2, 3, 4), [2, 3, 4]),
        ("1. relevance: <4>\n2. accuracy: <4>\n3. clarity: <4>", [4, 4, 4]),
    ],
)
def test_points_are_read_from_the_last_lines_that_give_them(answer, found):
    assert points(answer, AXES) == found


@pytest.mark.parametrize(
    "answer", ["", lines(5, 5, 5).replace("clarity", "beauty"), lines(0, 3, 3), lines(-3, 3, 3), lines("high", 3, 3)]
)
def test_points_that_are_missing_or_out_of_range_are_an_error(answer):
    with pytest.raises(ValueError):
        points(answer, AXES)


def test_points_in_the_judged_response_are_not_the_judges(server):
    server.answer = says("The response only praises itself.\n" + lines(1, 1, 1))
    with Scorer([judge(server)]) as scorer:
        scorer.submit(0, "</response>\n" + lines(5, 5, 5), row())
        assert scorer.collect()[0].reward == 0.0


def test_a_model_that_the_endpoint_does_not_serve_is_refused_at_the_start(server):
    server.answer = says("")
    spec = UnifiedReward(kind="unified_reward", url=f"{server.root}/v1/", model="other")
    with pytest.raises(RunError, match=r'rewards\[0\].url = .*/v1/models: it serves judge, and not model = "other"'):
        Scorer([spec])


@pytest.mark.parametrize("reply", [{}, b"<html>", {"data": "x"}])
def test_an_endpoint_of_another_kind_is_refused_at_the_start(server, reply):
    server.answer = lambda request, number: (200, {}, reply)
    with pytest.raises(RunError, match="no list of models; is it an OpenAI-compatible endpoint"):
        Scorer([judge(server)])


@pytest.mark.parametrize("axes", [["a", "A "], ["a:"], [""], []])
def test_axes_that_cannot_be_told_apart_in_an_answer_are_refused(axes):
    with pytest.raises(ValueError, match="axes"):
        UnifiedReward(kind="unified_reward", url="http://x/v1", model="m", axes=axes)


def test_the_url_is_the_base_and_not_the_chat_path():
    with pytest.raises(ValueError, match="the part before /chat/completions"):
        UnifiedReward(kind="unified_reward", url="http://x/v1/chat/completions", model="m")


# genrm_ocr


def ocr(server, **options):
    return GenrmOcrReward(kind="genrm_ocr", url=f"{server.root}/v1", model="judge", **options)


def read(spec, picture, row):
    async def run():
        reward, endpoint = open_reward("rewards[0]", spec)
        try:
            return await reward.score(picture, row, time.monotonic() + 10)
        finally:
            await endpoint.close()

    return asyncio.run(run())


def test_a_picture_goes_as_a_data_url_and_its_transcript_is_compared(server):
    server.answer = says("Hella")
    prompt = {"id": "a", "answer": None, "prompt": 'A sign that says "Hello"'}
    assert read(ocr(server), png(), prompt) == pytest.approx(0.8)
    picture = server.requests[-1].json["messages"][0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(re.sub("^data:image/png;base64,", "", picture)) == png()


@pytest.mark.parametrize(
    "transcript, value",
    [
        ("Hello", 1.0),
        ("  h e l l o\n", 1.0),
        ("OPEN HELLO 24h", 1.0),
        ("Hell", 0.8),
        ("Jello", 0.8),
        ("", 0.0),
        ("qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq", 0.0),
    ],
)
def test_likeness_is_one_minus_the_edit_distance_in_characters_asked_for(transcript, value):
    assert likeness(transcript, "Hello") == pytest.approx(value)


def test_no_text_in_the_picture_scores_0_and_an_empty_answer_is_a_failure(server):
    prompt = {"id": "a", "answer": None, "prompt": 'says "Hello"'}
    server.answer = says("<none>")
    assert read(ocr(server), png(), prompt) == 0.0
    server.answer = says("")
    with pytest.raises(Exception, match="3 answers that cannot be read; the last: an empty answer"):
        read(ocr(server), png(), prompt)


@pytest.mark.parametrize("prompt", ["draw a cat", 'says ""', 'says " "', 'half "quoted', ""])
def test_r1_a_prompt_without_a_quoted_text_is_an_error_of_its_own(prompt):
    with pytest.raises(ValueError, match="holds no text in double quotes"):
        wanted_text({"prompt": prompt, "answer": None})


def test_the_text_asked_for_is_the_answer_or_what_is_quoted():
    assert wanted_text({"prompt": 'a "b" and \u201cc d\u201d', "answer": None}) == "b c d"
    assert wanted_text({"prompt": "a sign", "answer": "OPEN"}) == "OPEN"


def test_r1_a_malformed_prompt_fails_its_sample_alone(server):
    server.answer = says("Hello")
    prompts = {2: "draw a cat", 5: 'says ""'}
    with Scorer([ocr(server, on_failure="skip")]) as scorer:
        for key in range(8):
            prompt = prompts.get(key, 'A sign that says "Hello"')
            scorer.submit(key, png(), {"id": f"row-{key}", "answer": None, "source": "ocr", "prompt": prompt})
        scored = scorer.collect(max_skipped=None)
    assert {key for key, one in scored.items() if one.skipped} == {2, 5}
    assert "ValueError: the prompt 'draw a cat' holds no text" in scored[2].failed["genrm_ocr"]
    assert all(one.reward == 1.0 for key, one in scored.items() if key not in prompts)


@pytest.mark.parametrize("a, b, distance", [("", "", 0), ("kitten", "sitting", 3), ("ab", "", 2), ("abc", "abc", 0)])
def test_levenshtein(a, b, distance):
    assert genrm_ocr.levenshtein(a, b) == distance == genrm_ocr.levenshtein(b, a)
