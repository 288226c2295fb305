"""The names in metrics.jsonl, and the writer. docs/metrics.md is this table."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

METRICS: dict[str, str] = {
    "step": "Step, counted from 1; a step is one rollout. Step 0 is the state before training.",
    "epoch": "Passes over the training rows completed.",
    "train/reward_mean": "Mean reward over the step's samples, failed ones left out.",
    "train/reward_std": "Standard deviation of the same.",
    "train/zero_std_ratio": "Share of groups whose rewards are all equal: they teach nothing.",
    "train/loss": "Loss per unit, mean over the step's updates.",
    "train/grad_norm": "Gradient norm before clipping, mean over the step's updates.",
    "train/learning_rate": "Learning rate of the step's last update.",
    "train/updates": "Optimizer updates since the start of the run.",
    "train/ratio_mean": "Mean importance ratio, current over old policy; 1 in a step's first update.",
    "train/ratio_max": "Largest importance ratio.",
    "train/log_ratio_first": "Largest |log ratio| in the step's first update: 0 up to rounding, or the run trains on something else than it sampled.",
    "train/clip_low_fraction": "Share of importance ratios (of sequences in GSPO, of tokens in DAPO) clipped from below.",
    "train/clip_high_fraction": "Share of the same clipped from above.",
    "train/dual_clip_fraction": "Share of the same bounded by algorithm.dual_clip.",
    "train/kl": "k3 KL to the reference, where one is asked for; averaged as the loss is.",
    "train/overlong_penalty": "Mean soft overlong penalty added to the rewards of the samples trained on.",
    "correction/weight_mean": "Mean importance weight of trainer over engine, after its limit; of tokens or of sequences.",
    "correction/weight_min": "Smallest of the same.",
    "correction/weight_max": "Largest of the same.",
    "correction/effective_samples": "(sum w)^2 / (n sum w^2): the share of the items that weights so uneven are worth; 1 if equal.",
    "correction/truncated": "Share of the weights cut to algorithm.correction.cap.",
    "correction/masked": "Share of the weights set to 0, outside [floor, cap].",
    "correction/rejected": "Share of the tokens or sequences left out of the loss and its units.",
    "train/dpo_accuracy": "Share of the step's pairs whose chosen response has gained more on the reference (DPO).",
    "train/dpo_margin": "Mean of chosen minus rejected reward over the step's pairs (DPO).",
    "train/chosen_reward": "Mean of beta times the log ratio of policy and reference on chosen responses (DPO).",
    "train/rejected_reward": "The same on rejected responses (DPO).",
    "train/entropy": "Entropy per response token in nats, under the sampling temperature.",
    "train/tokens_per_s": "Prompt and response tokens trained per second of the update, all ranks.",
    "train/samples": "Samples in the step's updates.",
    "rollout/engine": "The rollout engine's name.",
    "rollout/tokens_per_s": "Response tokens sampled per second of the rollout, all ranks.",
    "rollout/response_tokens_mean": "Mean response length in tokens.",
    "rollout/response_tokens_max": "Longest response in tokens.",
    "rollout/truncated_ratio": "Share of responses that hit max_new_tokens.",
    "rollout/pearson": "Correlation of token probabilities, engine and trainer.",
    "rollout/logp_diff_mean": "Mean |log-prob difference| of engine and trainer, in nats.",
    "rollout/logp_diff_max": "Largest |log-prob difference| of engine and trainer, in nats.",
    "rollout/k3": "k3 estimate of the KL from engine to trainer, per token.",
    "rollout/log_ppl_diff": "Log-perplexity of the trainer minus the engine's, mean over sequences.",
    "rollout/draws": "Draws of the step: more than one where dynamic sampling had to draw again.",
    "rollout/prompts_drawn": "Prompts that the step sampled, those not trained on included.",
    "rollout/kept_ratio": "Share of the drawn prompts that the step trains on.",
    "rollout/policy_version": "Updates that the weights sampled from had seen.",
    "sync/delta_norm": "Norm of (engine weight now - at the start) on a watched slice; 0 for ever means stale weights.",
    "sync/delta_kept": "Share of the LoRA delta's norm that survives the cast to the engine's dtype.",
    "sync/bytes": "Bytes pushed into the engine.",
    "data/overlong_dropped": "Rows skipped in this step because they are too long: their prompt, or offline a response.",
    "data/ties": "Training rows never drawn because chosen and rejected are the same text (DPO).",
    "reward/failed": "Samples whose reward failed in this step.",
    "reward/<name>/mean": "Mean of one reward over the step's samples.",
    "reward/<name>/seconds_p50": "Median seconds per sample of one reward.",
    "reward/<name>/seconds_p95": "95th percentile of the same.",
    "reward/<name>/seconds_max": "Slowest sample of the same.",
    "modality/<modality>/samples": "Samples whose prompt is of one modality, in steps that mix several.",
    "modality/<modality>/reward_mean": "Mean reward of these.",
    "modality/<modality>/reward_std": "Standard deviation of the same.",
    "modality/<modality>/zero_std_ratio": "Share of these groups whose rewards are all equal.",
    "modality/<modality>/response_tokens_mean": "Mean response length of these, in tokens.",
    "modality/<modality>/pearson": "Correlation of token probabilities, engine and trainer, on these.",
    "modality/<modality>/logp_diff_mean": "Mean |log-prob difference| of engine and trainer on these, in nats.",
    "val/<task>/accuracy": "Share of validation rows answered right; the task is the rows' source. In DPO: of pairs whose chosen response has gained more on the reference, so 0 at step 0, where the two are equal; the task is their modality, or all.",
    "val/<task>/reward": "Mean reward on the validation rows.",
    "val/<task>/loss": "Validation cross-entropy per target token (SFT), or loss per pair (DPO).",
    "val/<task>/margin": "Mean of chosen minus rejected reward on the validation pairs (DPO).",
    "val/<task>/chosen_reward": "Mean reward of their chosen responses (DPO).",
    "val/<task>/rejected_reward": "Mean reward of their rejected responses (DPO).",
    "val/<task>/rows": "Validation rows scored.",
    "time/data": "Seconds drawing and encoding the step's prompts.",
    "time/sync": "Seconds pushing weights into the engine.",
    "time/wake_sleep": "Seconds waking the engine and putting it to sleep.",
    "time/rollout": "Seconds sampling.",
    "time/reward_wait": "Seconds waiting for rewards after the last sample was there.",
    "time/exchange": "Seconds exchanging samples between ranks.",
    "time/old_logprobs": "Seconds of the trainer's own log-prob pass.",
    "time/update": "Seconds of forward, backward and optimizer.",
    "time/validate": "Seconds of validation.",
    "time/checkpoint": "Seconds of the last checkpoint before this step.",
    "time/logging": "Seconds writing metrics and samples of the step before.",
    "time/step": "Seconds of the whole step, validation and checkpoint left out.",
    "time/overhead_share": "(sync + wake_sleep + reward_wait + exchange + logging) / step: what is neither sampling nor training.",
    "memory/peak_gib": "Peak memory of rank 0: device memory, or resident memory on a CPU.",
}


def family(name: str) -> str:
    """The documented name a metric falls under: between its first and last part is a reward, a task or a modality, which
    may hold slashes of its own."""
    parts = name.split("/")
    middle = {"reward": "name", "val": "task", "modality": "modality"}
    if len(parts) >= 3 and parts[0] in middle:
        return f"{parts[0]}/<{middle[parts[0]]}>/{parts[-1]}"
    return name


class MetricsFile:
    """metrics.jsonl: one flat JSON object per step, flushed to disk line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        """Append one line. Numbers that are not finite become null.

        Raises:
            KeyError: a name that METRICS does not document.
        """
        unknown = [name for name in values if family(name) not in METRICS]
        if unknown:
            raise KeyError(f"metrics without a line in METRICS: {', '.join(unknown)}")
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def table() -> str:
    """The names and their meanings as a Markdown table."""
    return "\n".join(["| name | meaning |", "|---|---|", *(f"| `{name}` | {text} |" for name, text in METRICS.items())])


# What a clock or a memory gave: two equal runs differ in it.
_MEASURED = ("time/", "memory/", "rollout/tokens_per_s", "train/tokens_per_s")


def comparable(values: dict[str, Any]) -> dict[str, Any]:
    """The numbers of one step that are equal in two equal runs: all but what was measured."""
    return {name: v for name, v in values.items() if not name.startswith(_MEASURED) and "/seconds_" not in name}
