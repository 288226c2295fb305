"""Every documented metric is written by some run: DAPO with everything on, GSPO, DPO and SFT, in this process."""

import json

import pytest

from omnitrain.data.schema import RowFile, system_hash, write_rows
from omnitrain.train.metrics import METRICS, family

pytestmark = pytest.mark.timeout(200)
RECIPE = """
name = "names"
seed = 5
model = {{ family = "qwen3_omni", path = "{model}", dtype = "float32", lora = {{ rank = 4, alpha = 8 }} }}
data = {{ train = "{train}", validation = "{train}", max_prompt_tokens = 512 }}
train = {{ prompts_per_step = 4, prompts_per_update = 2, max_tokens_per_device = 1024, learning_rate = 1e-3, max_steps = 2 }}
validate = {{ every = 1, max_rows = 4 }}
checkpoint = {{ every = 1 }}
"""
ONLINE = """
rollout = {{ engine = "trainer", group_size = 2, max_new_tokens = 6 }}
rewards = [{{ kind = "python", function = "coins:score" }}, {{ kind = "choice" }}]
gates = {{ skip = ["g1", "g2", "g3", "g5", "g6", "g7", "g9", "g10"] }}
"""
ALGORITHMS = {
    "dapo": """{{ kind = "dapo", kl = 0.01, dual_clip = 3.0, overlong_buffer = 2, combine = "advantage",
  correction = {{ weights = "token", reject = "sequence", reject_high = 9.0 }} }}""",
    "gspo": """{{ kind = "gspo", correction = {{ weights = "sequence", limit = "mask" }} }}""",
    "dpo": """{{ kind = "dpo" }}""",
    "sft": """{{ kind = "sft" }}""",
}
REWARD = "import zlib\ndef score(response, row):\n    return zlib.crc32(response.encode()) % 7\n"


@pytest.fixture(scope="module")
def pairs(mixed_rows):
    """The mixed rows as preference pairs, one of them a tie."""
    source, rows = RowFile(mixed_rows), []
    for row in source:
        messages = [
            {
                "role": message.role,
                "content": [{k: v for k, v in vars(part).items() if v is not None} for part in message.content],
            }
            for message in row.messages
        ]
        rejected = "It is red." if row.index == 3 else "No idea!"
        pair = {"id": row.id, "messages": messages, "source": "pairs", "chosen": "It is red.", "rejected": rejected}
        rows.append(pair)
    path = mixed_rows.with_name("names-pairs.parquet")
    write_rows(path, rows, system_hash=system_hash(None))
    return path


def test_every_documented_metric_is_written_by_some_run(tmp_path, brief_model, mixed_rows, pairs, one_rank):
    (tmp_path / "coins.py").write_text(REWARD)
    written: dict[str, set[str]] = {}
    for kind, algorithm in ALGORITHMS.items():
        online = kind in ("dapo", "gspo")
        text = (ONLINE if online else "") + f"algorithm = {algorithm}\n" + RECIPE
        recipe = tmp_path / f"{kind}.toml"
        recipe.write_text(text.format(model=brief_model, train=mixed_rows if online else pairs))
        with one_rank(recipe, name=kind) as run:
            run.train()
        lines = [json.loads(line) for line in run.run.metrics.read_text().splitlines()]
        written[kind] = {family(name) for line in lines for name in line}
    everything = set().union(*written.values())
    assert set(METRICS) - everything == set() and everything <= set(METRICS)
    # An offline run has neither an engine nor a reward to speak of.
    for kind in ("dpo", "sft"):
        foreign = {
            name
            for name in written[kind]
            if name.startswith(("rollout/", "reward/", "sync/", "modality/", "correction/"))
        }
        assert not foreign, kind
