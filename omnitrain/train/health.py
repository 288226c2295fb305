"""Numbers that say whether a step trained what it should: computed from all ranks' samples and sums."""

from __future__ import annotations

from collections.abc import Callable

import torch

from omnitrain.algorithms.agreement import agreement
from omnitrain.algorithms.correction import correction_metrics
from omnitrain.data.sample import Sample
from omnitrain.rewards.scorer import Scorer
from omnitrain.train.updates import Update, UpdateStats, largest

LogProbs = dict[tuple[int, int], list[float]]
"""Token log-probs by (group, child)."""


def old_logprobs(updates: list[Update]) -> LogProbs:
    """This rank's frozen log-probs, as `score_batches` left them."""
    found: LogProbs = {}
    for batch in (b for update in updates for b in update.batches if not b.filler):
        parts = batch.old.float().cpu().split([len(s.tokens) for s in batch.samples])
        found |= {(s.group, s.child): part.tolist() for s, part in zip(batch.samples, parts)}
    return found


def agreement_metrics(samples: list[Sample], trained: LogProbs) -> dict[str, float]:
    """Engine against trainer on the samples whose log-probs, of all ranks, `trained` holds."""
    found = compare([s for s in samples if (s.group, s.child) in trained], trained)
    return {
        "rollout/pearson": found["pearson"],
        "rollout/logp_diff_mean": found["abs_mean"],
        "rollout/logp_diff_max": found["abs_max"],
        "rollout/k3": found["k3"],
        "rollout/log_ppl_diff": found["log_ppl_diff"],
    }


def compare(samples: list[Sample], trained: LogProbs) -> dict[str, float]:
    """`agreement` of the engine's log-probs of these samples with the trainer's."""
    theirs = [s.logprobs for s in samples]
    ours = [trained[s.group, s.child] for s in samples]
    flat = [torch.tensor([x for part in parts for x in part], dtype=torch.float64) for parts in (ours, theirs)]
    return agreement(flat[0], flat[1], [len(part) for part in ours])


def reward_metrics(samples: list[Sample], scorer: Scorer) -> dict[str, float]:
    """Rewards of everything that was sampled, trained on or not: their mean is the policy's, and this rank's times."""
    values: dict[str, float] = {"reward/failed": sum(s.reward_failures > 0 for s in samples)}
    values |= {f"train/{name}": value for name, value in _rewards(samples).items()}
    for name in scorer.names:
        scores = [s.rewards[name] for s in samples if name in s.rewards]
        if scores:
            values[f"reward/{name}/mean"] = sum(scores) / len(scores)
    for name, stats in scorer.stats().items():
        values |= {f"reward/{name}/seconds_{quantile}": stats[quantile] for quantile in ("p50", "p95", "max")}
    return values


def _rewards(samples: list[Sample]) -> dict[str, float]:
    """Mean and standard deviation over samples, and the share of groups that teach nothing."""
    groups: dict[int, list[float]] = {}
    for sample in samples:
        if not sample.failed:
            groups.setdefault(sample.group, []).append(sample.reward)
    rewards = torch.tensor([reward for group in groups.values() for reward in group], dtype=torch.float64)
    if not len(rewards):
        return {}
    flat = sum(min(group) == max(group) for group in groups.values())
    return {
        "reward_mean": rewards.mean().item(),
        "reward_std": rewards.std(correction=0).item(),
        "zero_std_ratio": flat / len(groups),
    }


def modality_metrics(samples: list[Sample], modality: Callable[[Sample], str], trained: LogProbs) -> dict[str, float]:
    """The step's health by the modality of its prompts, where there are several: one of them may learn nothing."""
    parts: dict[str, list[Sample]] = {}
    for sample in samples:
        parts.setdefault(modality(sample), []).append(sample)
    values: dict[str, float] = {}
    for name, part in sorted(parts.items()) if len(parts) > 1 else ():
        found = _rewards(part) | {"samples": len(part)}
        found["response_tokens_mean"] = sum(len(s.tokens) for s in part) / len(part)
        if compared := [s for s in part if (s.group, s.child) in trained]:
            gap = compare(compared, trained)
            found |= {"pearson": gap["pearson"], "logp_diff_mean": gap["abs_mean"]}
        values |= {f"modality/{name}/{key}": value for key, value in found.items()}
    return values


def rollout_metrics(samples: list[Sample], seconds: float) -> dict[str, float]:
    """Lengths, truncation and speed of a rollout."""
    lengths = [len(s.tokens) for s in samples]
    return {
        "rollout/tokens_per_s": sum(lengths) / max(seconds, 1e-9),
        "rollout/response_tokens_mean": sum(lengths) / len(lengths),
        "rollout/response_tokens_max": max(lengths),
        "rollout/truncated_ratio": sum(s.finish_reason == "length" for s in samples) / len(samples),
    }


def update_metrics(updates: list[Update], shares: list[list[UpdateStats]], seconds: float) -> dict[str, float]:
    """Loss, ratio, clipping, entropy and speed over a step's updates; `shares` holds every rank's statistics."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for stats in (s for share in shares for s in share):
        for name, value in stats.sums.items():
            sums[name] = sums.get(name, 0.0) + value
        for name, value in stats.maxima.items():
            maxima[name] = largest([maxima.get(name, value), value])
    units = sums["units"]  # those that were kept: a correction may reject some
    tokens = sum(s.tokens for share in shares for s in share)
    whole = sum(len(s.prompt_ids) + len(s.tokens) for u in updates for s in u.samples)
    values = {
        "train/loss": sums["loss_sum"] / max(1, units),
        "train/samples": sum(len(u.samples) for u in updates),
        "train/tokens_per_s": whole / max(seconds, 1e-9),
        "train/entropy": sums["entropy_sum"] / tokens,
    }
    if ratios := sums.get("ratio_count"):
        values |= {
            "train/ratio_mean": sums["ratio_sum"] / ratios,
            "train/ratio_max": maxima["ratio_max"],
            "train/clip_low_fraction": sums["clip_low_count"] / ratios,
            "train/clip_high_fraction": sums["clip_high_count"] / ratios,
            "train/log_ratio_first": largest([share[0].maxima.get("abs_log_ratio_max", 0.0) for share in shares]),
        }
    if ratios and "dual_clip_count" in sums:
        values["train/dual_clip_fraction"] = sums["dual_clip_count"] / ratios
    if "kl_sum" in sums:
        values["train/kl"] = sums["kl_sum"] / max(1, units)
    return values | correction_metrics(sums, maxima)
