"""Who answers which prompt."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from omnitrain.rollout.engine import Request
from omnitrain.rollout.queue import EngineGroup, PromptQueue, SharedCounter


def drain(queue) -> list[int]:
    return [request.group for request in iter(queue.pull, None)]


def make(place, count, **options):
    return PromptQueue(place, count, lambda i: Request(i, None, i), **options)


@pytest.mark.parametrize("count", [0, 1, 5, 8])
@pytest.mark.parametrize("engines", [1, 2, 3])
def test_l2_deterministic_shares_are_disjoint_complete_and_ordered(count, engines):
    shares = [drain(make(EngineGroup(engine=e, engines=engines), count, deterministic=True)) for e in range(engines)]
    assert sorted(i for share in shares for i in share) == list(range(count))
    assert all(share == sorted(share) for share in shares)


def test_a_shared_counter_gives_every_number_once(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: SharedCounter("rollout/3", store).next(), range(40)))
    assert sorted(taken) == list(range(40))
    assert SharedCounter("rollout/4", store).next() == 0


def test_without_other_ranks_all_prompts_come_in_order():
    queue = make(EngineGroup(), 5)
    assert drain(queue) == [0, 1, 2, 3, 4]
    assert queue.pull() is None


@pytest.mark.parametrize("deterministic", [True, False])
def test_no_prompt_is_begun_after_a_stop(deterministic):
    asked = []
    queue = make(EngineGroup(), 5, deterministic=deterministic, stop=lambda: len(asked) >= 2)
    for request in iter(queue.pull, None):
        asked.append(request.group)
    assert asked == [0, 1]


def test_an_engine_holds_at_most_an_even_share_at_once():
    assert make(EngineGroup(engine=1, engines=3), 8).limit == 3
    assert make(EngineGroup(engines=4), 2).limit == 1


def test_u_importing_the_rollout_package_loads_neither_torch_nor_vllm():
    code = (
        "import sys, omnitrain.rollout, omnitrain.rollout.vllm_compat as c, omnitrain.rollout.queue, omnitrain.rollout.engine\n"
        "c.environment(); bad = {'torch', 'vllm', 'transformers'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
