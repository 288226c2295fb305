"""The examples of docs/rewards.md are what they say."""

import re
import threading
import tomllib
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from omnitrain.recipe.rewards import HttpReward, Reward
from omnitrain.rewards.scorer import Scorer

TEXT = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def tables():
    return [table for block in blocks("toml") for table in tomllib.loads(block)["rewards"]]


@pytest.mark.parametrize("table", tables(), ids=lambda table: table["kind"])
def test_every_table_is_a_reward(table):
    assert TypeAdapter(Reward).validate_python(table).kind == table["kind"]


def test_every_kind_is_in_the_docs():
    kinds = {tag for tag in re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)}
    known = TypeAdapter(Reward).json_schema()["discriminator"]["mapping"].keys()
    assert known - kinds == {"python"}


def test_the_server_scores():
    space = {"__name__": "scorer"}
    exec(blocks("python")[1], space)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Silent", (space["Scorer"],), {"log_message": lambda *_: None}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        spec = HttpReward(kind="http", url=f"http://127.0.0.1:{server.server_port}/score", health="/health")
        with Scorer([spec]) as scorer:
            for key, response in enumerate(["it is 7", "it is 8"]):
                scorer.submit(key, response, {"id": "a", "answer": "7", "source": "s", "meta": {}, "prompt": ""})
            assert [one.reward for one in scorer.collect().values()] == [1.0, 0.0]
    finally:
        server.shutdown()
        server.server_close()
