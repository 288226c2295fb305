import asyncio
import json
import threading
import time
from email.utils import formatdate

import pytest

from omnitrain.errors import RewardError, RewardTimeout, RunError, UsageError
from omnitrain.recipe.rewards import ChoiceReward, HttpReward
from omnitrain.rewards import endpoints
from omnitrain.rewards.endpoints import open_reward
from omnitrain.rewards.scorer import Scorer


def http(server, **options):
    return HttpReward(kind="http", url=f"{server.root}/score", **{"timeout": 20.0} | options)


def row(number=0, **more):
    return {"id": f"row-{number}", "answer": "B", "source": "test", "meta": {"k": 1}, "prompt": "Which?"} | more


def score_one(spec, **more):
    with Scorer([spec]) as scorer:
        scorer.submit(0, "a response", row(**more))
        return scorer.collect()[0]


def failure(spec, kind=RewardError):
    """The error's text of one sample whose score fails."""
    with pytest.raises(kind) as caught:
        score_one(spec)
    assert type(caught.value) is kind
    return str(caught.value)


def after_start(*answers):
    """Answers each request in turn, the last one for ever; the start's check finds the server well."""
    waiting = list(answers)

    def answer(request, number):
        if request.method == "GET" or request.json.get("id") == "canary":
            return 200, {}, {}
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    return answer


def test_a_sample_is_posted_as_json_and_its_score_comes_back(server):
    server.answer = lambda request, number: (200, {}, {"score": 0.25})
    scored = score_one(http(server, weight=2.0))
    assert scored.values == {"http": 0.25} and scored.reward == 0.5
    assert server.posts() == [
        {"id": "row-0", "response": "a response", "prompt": "Which?", "answer": "B", "source": "test", "meta": {"k": 1}}
    ]
    assert server.requests[-1].headers["content-type"] == "application/json"
    assert "authorization" not in server.requests[-1].headers


def test_the_start_asks_the_health_path_and_without_one_an_empty_sample(server):
    with Scorer([http(server, health="/health")]):
        assert [(r.method, r.path) for r in server.requests] == [("GET", "/health")]
    server.answer = lambda request, number: (422, {}, b"an empty response")
    with Scorer([http(server)]):
        assert server.requests[-1].json["id"] == "canary"


@pytest.mark.parametrize("passing", [408, 429, 500, 503])
def test_a_fault_that_may_pass_is_asked_again(server, passing):
    server.answer = after_start((passing, {"Retry-After": "0"}, b"busy"), (200, {}, {"scores": [0.75]}))
    assert score_one(http(server)).values == {"http": 0.75}
    assert len(server.posts()) == 2


def test_a_connection_that_breaks_off_is_asked_again(server):
    broken = (200, {"Content-Length": "1000"}, b'{"score": 0.')
    server.answer = after_start(None, broken, (200, {}, {"score": 1}))
    assert score_one(http(server)).values == {"http": 1.0}
    assert len(server.posts()) == 3


@pytest.mark.parametrize("value", ["1", lambda: formatdate(time.time() + 2, usegmt=True)])
def test_retry_after_is_waited_for_in_seconds_or_as_a_date(server, value):
    seen = []
    value = value if isinstance(value, str) else value()

    def answer(request, number):
        seen.append(time.monotonic())
        return (429, {"Retry-After": value}, b"slow down") if len(seen) == 2 else (200, {}, {"score": 1})

    server.answer = answer
    score_one(http(server))
    assert len(seen) == 3 and seen[2] - seen[1] >= 0.9


def test_a_wait_beyond_the_samples_time_fails_now_and_says_so(server):
    server.answer = after_start((429, {"Retry-After": "600"}, b"slow down\nsecond line"))
    start = time.monotonic()
    text = failure(http(server, timeout=30.0))
    assert time.monotonic() - start < 5
    assert f"sample row-0: POST {server.root}/score: 429 Too Many Requests: slow down; no time is left" in text
    assert "second line" not in text


def test_r7_faults_that_stay_end_after_the_retries_with_url_status_and_first_line(server):
    server.answer = after_start((503, {}, b"\n<html>out of memory\nmore"))
    text = failure(http(server, retries=2))
    assert f"POST {server.root}/score: 503 Service Unavailable: <html>out of memory (3 attempts)" in text
    assert len(server.posts()) == 3


def test_r7_a_server_that_goes_away_fails_the_sample_after_its_retries(server):
    with Scorer([http(server, retries=2)]) as scorer:
        server.answer = lambda request, number: None
        server.close()
        scorer.submit(0, "a response", row())
        with pytest.raises(RewardError, match=rf"row-0: POST {server.root}/score: connection refused \(3 attempts\)"):
            scorer.collect()


def test_r7_a_refused_connection_at_the_start_fails_within_ten_seconds_by_field_and_url(closed_port):
    url = f"http://127.0.0.1:{closed_port}/score"
    specs = [ChoiceReward(kind="choice"), HttpReward(kind="http", url=url, health="/health")]
    start = time.monotonic()
    with pytest.raises(RunError) as caught:
        Scorer(specs, 1)
    assert time.monotonic() - start < 10
    assert f'rewards[1].url = "{url}" does not work: GET' in str(caught.value)
    assert "/health: connection refused" in str(caught.value)


def test_r7_a_server_that_never_answers_at_the_start_fails_within_ten_seconds(server, monkeypatch):
    assert endpoints.START_SECONDS < 9.5
    monkeypatch.setattr(endpoints, "START_SECONDS", 1.0)
    server.answer = lambda request, number: server.released.wait()
    start = time.monotonic()
    with pytest.raises(RunError, match=r"rewards\[0\].url = .*no whole answer in the .* s that were left"):
        Scorer([http(server)])
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("status, word", [(401, "Unauthorized"), (404, "Not Found"), (307, "redirects to http://x/")])
def test_r7_a_server_that_refuses_the_start_is_an_error_at_once(server, status, word):
    server.answer = lambda request, number: (status, {"Location": "http://x/"}, b"no")
    with pytest.raises(RunError, match=rf"rewards\[0\].url = .*{status}.*{word}"):
        Scorer([http(server)])
    assert len(server.requests) == 1


def test_without_waiting_the_start_is_heard_by_check_and_by_collect(closed_port):
    spec = HttpReward(kind="http", url=f"http://127.0.0.1:{closed_port}/")
    with Scorer([spec], wait=False) as scorer:
        scorer.submit(0, "", row())
        with pytest.raises(RunError, match="connection refused"):
            scorer.collect()
        with pytest.raises(RunError, match="connection refused"):
            scorer.check()


@pytest.mark.parametrize(
    "body, says",
    [
        (b"<html>hello", "200 OK, but no JSON: <html>hello"),
        (b"", "200 OK, but no JSON: an empty body"),
        (b"\xff\x00\x01", "200 OK, but no JSON: "),
        ({"scores": [1, 2]}, "2 scores for one sample"),
        ({"scores": []}, "0 scores for one sample"),
        ({"value": 1}, 'has no "score"'),
        (3, 'has no "score"'),
        ({"score": None}, "returned None, not a number"),
        ({"score": "0.5"}, "returned '0.5', not a number"),
        ({"score": [0.5]}, "a list of 1 for one response"),
        (b'{"score": NaN}', "returned nan, not a finite number"),
        (b'{"score": 1e999}', "returned inf, not a finite number"),
        (b"x" * (5 << 20), "a reply of more than 4 MiB"),
    ],
)
def test_r2_garbage_is_a_failure_and_never_a_zero(server, body, says):
    server.answer = after_start((200, {}, body))
    text = failure(http(server))
    assert says in text and server.root in text and len(text) < 600
    assert len(server.posts()) == 1


def test_a_failure_is_skipped_or_replaced_as_the_recipe_says(server):
    def answer(request, number):
        return 200, {}, {"score": "odd" if request.json["id"] == "row-3" else 1.0}

    server.answer = answer
    specs = [http(server, on_failure="skip"), http(server, on_failure="value:-1")]
    with Scorer(specs) as scorer:
        for key in range(20):
            scorer.submit(key, "", row(key))
        scored = scorer.collect()
    assert scored[3].skipped and scored[3].values == {"http_2": -1.0} and set(scored[3].failed) == {"http", "http_2"}
    assert sum(one.reward == 2.0 for one in scored.values()) == 19
    assert scorer.stats()["http"]["failed"] == 1 == scorer.stats()["http_2"]["failed"]


@pytest.mark.parametrize("trickle", [False, True])
def test_l6_an_answer_that_is_late_is_a_timeout_however_slowly_it_comes(server, trickle):
    def answer(request, number):
        if request.json["id"] == "canary":
            return 200, {}, {}
        if not trickle:
            server.released.wait()
        return 200, {}, [b" "] * 300

    server.answer = answer
    start = time.monotonic()
    text = failure(http(server, timeout=0.5), RewardTimeout)
    assert time.monotonic() - start < 4
    assert f"sample row-0: took longer than its limit of 0.5 s; POST {server.root}/score: no whole answer" in text


def test_the_key_goes_into_the_header_and_never_into_an_error(server, monkeypatch):
    monkeypatch.setenv("SCORER_KEY", "s3cret-key")
    server.answer = after_start((401, {}, b'{"error": "bad key s3cret-key"}'))
    text = failure(http(server, api_key_env="SCORER_KEY"))
    assert server.requests[-1].headers["authorization"] == "Bearer s3cret-key"
    assert "401 Unauthorized" in text and "check the key in SCORER_KEY" in text and "s3cret" not in text
    # Also where an error is cut in the middle of it.
    for body in ({"error": "s3cret-key"}, {"error": "x" * 65 + "s3cret-key"}, b"x" * 196 + b"s3cret-key"):
        server.answer = after_start((200, {}, body))
        assert "s3c" not in failure(http(server, api_key_env="SCORER_KEY"))


def test_a_wrong_key_is_refused_at_the_start(server, monkeypatch):
    def answer(request, number):
        return (200, {}, {}) if request.headers.get("authorization") == "Bearer right" else (403, {}, b"who are you?")

    server.answer = answer
    monkeypatch.setenv("SCORER_KEY", "wrong")
    with pytest.raises(RunError, match="403 Forbidden: who are you.*check the key in SCORER_KEY"):
        Scorer([http(server, api_key_env="SCORER_KEY", health="/")])
    with pytest.raises(RunError, match=r"403 Forbidden: who are you.*set rewards\[0\].api_key_env"):
        Scorer([http(server, health="/")])
    monkeypatch.setenv("SCORER_KEY", "right")
    Scorer([http(server, api_key_env="SCORER_KEY", health="/")]).close()


@pytest.mark.parametrize("value", [None, "", "a\nb", "schlüssel"])
def test_a_key_that_is_not_set_or_cannot_be_sent_is_refused_by_its_field(server, monkeypatch, value):
    monkeypatch.delenv("SCORER_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("SCORER_KEY", value)
    with pytest.raises(UsageError, match=r'rewards\[0\].api_key_env = "SCORER_KEY": ') as caught:
        Scorer([http(server, api_key_env="SCORER_KEY")])
    assert not value or value not in str(caught.value)
    assert not server.requests


def test_media_go_as_parts_of_a_form_with_their_media_types(server, tmp_path):
    from PIL import Image

    Image.new("RGB", (4, 4), "red").save(tmp_path / "a.png")
    Image.new("RGB", (4, 4), "red").save(tmp_path / "b.bmp")
    (tmp_path / "c.wav").write_bytes(b"RIFF....WAVE")
    parts = [{"type": "text", "text": "Which?"}]
    parts += [{"type": "image", "path": str(tmp_path / name)} for name in ("a.png", "b.bmp")]
    parts += [
        {"type": "audio", "path": str(tmp_path / "c.wav")},
        {"type": "image", "data": (tmp_path / "a.png").read_bytes()},
    ]
    assert score_one(http(server, media=True), messages=[{"role": "user", "content": parts}]).reward == 0.5
    assert server.posts()[0]["response"] == "a response"
    name, *media = server.requests[-1].parts
    assert name[:2] == ("sample", "application/json")
    assert [kind for _, kind, _ in media] == ["image/png", "image/png", "audio/wav", "image/png"]
    png = (tmp_path / "a.png").read_bytes()
    assert media[0][2] == png == media[3][2] and media[1][2].startswith(b"\x89PNG") and media[2][2] == b"RIFF....WAVE"


def test_a_missing_media_file_fails_its_sample(server, tmp_path):
    messages = [{"role": "user", "content": [{"type": "image", "path": str(tmp_path / "gone.png")}]}]
    with pytest.raises(RewardError, match="row-0: FileNotFoundError: .*gone.png"):
        score_one(http(server, media=True), messages=messages)


def test_a_body_of_tensors_goes_as_safetensors(server):
    async def post():
        reward, endpoint = open_reward("rewards[0]", http(server))
        value = await reward.post(
            {"id": "x"}, [("application/x-safetensors", b"\x08\0\0\0\0\0\0\0{}")], time.monotonic() + 5
        )
        await endpoint.close()
        return value

    assert asyncio.run(post()) == 0.5
    assert [part[:2] for part in server.requests[0].parts] == [
        ("sample", "application/json"),
        ("media", "application/x-safetensors"),
    ]


def test_as_many_samples_as_concurrency_allows_are_under_way_and_no_more(server):
    lock, together, most = threading.Lock(), threading.Barrier(4), [0, 0]

    def answer(request, number):
        if request.json["id"] == "canary":
            return 200, {}, {}
        with lock:
            most[0] += 1
            most[1] = max(most)
        together.wait(10)  # breaks unless four are here at once
        with lock:
            most[0] -= 1
        return 200, {}, {"score": 1}

    server.answer = answer
    with Scorer([http(server, concurrency=4)]) as scorer:
        for key in range(12):
            scorer.submit(key, "", row(key))
        assert {one.reward for one in scorer.collect().values()} == {1.0}
    assert most[1] == 4


def test_endpoints_occupy_no_process(server):
    with Scorer([http(server)], 4) as scorer:
        assert scorer.pids == []


def test_closing_ends_at_once_whatever_the_server_does(server):
    server.answer = lambda request, number: (200, {}, {}) if number == 0 else server.released.wait()
    scorer = Scorer([http(server, timeout=600)])
    for key in range(3):
        scorer.submit(key, "", row(key))
    while len(server.requests) < 4:
        time.sleep(0.01)
    start = time.monotonic()
    scorer.close()
    scorer.close()
    assert time.monotonic() - start < 2


def test_after_a_failure_what_was_under_way_is_forgotten_and_the_scorer_goes_on(server):
    def answer(request, number):
        name = request.json["id"]
        if name == "row-1":
            server.released.wait()
        return 200, {}, {"score": "odd" if name == "row-0" else 1}

    server.answer = answer
    with Scorer([http(server)]) as scorer:
        for key in range(2):
            scorer.submit(key, "", row(key))
        with pytest.raises(RewardError, match="row-0"):
            scorer.collect()
        scorer.submit(1, "", row(5))
        assert scorer.collect()[1].reward == 1.0


@pytest.mark.parametrize(
    "url, says",
    [
        ("localhost:8000", "not of the form http://host:port/path"),
        ("ftp://host/x", "not of the form"),
        ("http://", "not of the form"),
        ("http://host:port/", "not of the form"),
        ("http://user:hunter2@host/", "put the key into an environment variable"),
    ],
)
def test_a_url_that_cannot_be_one_is_refused(url, says):
    with pytest.raises(ValueError, match=says):
        HttpReward(kind="http", url=url)


def test_the_request_is_what_the_docs_say(server):
    score_one(http(server))
    assert json.loads(server.requests[-1].body).keys() == {"id", "response", "prompt", "answer", "source", "meta"}
