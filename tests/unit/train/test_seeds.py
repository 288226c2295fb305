import subprocess
import sys

from omnitrain.train.seeds import derive


def test_seeds_differ_by_prompt_and_step_and_stay_apart():
    seeds = sorted(derive(0, "train", step, f"row-{row}") >> 31 for step in range(20) for row in range(50))
    assert all(0 <= seed < 2**31 for seed in seeds)
    # The engine gives child i the seed + i: neighbours would share noise.
    assert min(b - a for a, b in zip(seeds, seeds[1:])) > 16


def test_the_seed_is_the_same_in_another_process():
    code = "from omnitrain.train.seeds import derive; print(derive(7, 'train', 3, 'row'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == derive(7, "train", 3, "row")
