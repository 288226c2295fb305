"""TRL as an oracle: its own loss methods, unbound, on stubs that hold what they read."""

import collections
import importlib
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch


def _trainer(**settings):
    """A stub of a TRL trainer of one process without accumulation; `args__x` sets `args.x`."""
    trainer = MagicMock()
    trainer.model.training, trainer.accelerator.num_processes, trainer.accelerator.device = True, 1, "cpu"
    trainer.accelerator.gather = trainer.accelerator.gather_for_metrics = lambda value: value
    trainer._metrics = collections.defaultdict(lambda: collections.defaultdict(list))
    trainer.aux_loss_enabled = False
    for name, value in settings.items():
        owner = trainer.args if name.startswith("args__") else trainer
        setattr(owner, name.removeprefix("args__"), value)
    return trainer


class Oracle:
    """TRL's GRPO and DPO losses on flat log-probs and lengths."""

    def grpo(
        self,
        logp,
        old,
        advantages,
        lengths,
        *,
        ref=None,
        beta=0.0,
        level="token",
        loss_type="dapo",
        low=0.2,
        high=0.28,
        delta=None,
        max_tokens=None,
        weights=None,
    ):
        """GRPOTrainer's loss of the padded batch. weights: (S, T) or (S, 1), as TRL's vLLM correction has them."""
        from trl.trainer.grpo_trainer import GRPOTrainer

        def padded(flat):
            return torch.nn.utils.rnn.pad_sequence(flat.split(lengths), batch_first=True)

        mask = padded(torch.ones(sum(lengths)))
        count, longest = mask.shape
        ids = torch.zeros(count, longest, dtype=torch.long)
        trainer = _trainer(
            importance_sampling_level=level,
            loss_type=loss_type,
            epsilon_low=low,
            epsilon_high=high,
            beta=beta,
            args__delta=delta,
            max_completion_length=max_tokens or longest,
            use_vllm=weights is not None,
            vllm_importance_sampling_correction=weights is not None,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            _entropy_bonus_enabled=False,
            tools=None,
            environments=None,
            args__use_bias_correction_kl=False,
            args__steps_per_generation=1,
            current_gradient_accumulation_steps=1,
            _get_per_token_logps_and_entropies=lambda *_, **__: (padded(logp), torch.zeros_like(mask), None),
        )
        batch = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones(count, 1, dtype=torch.long),
            "completion_ids": ids,
            "completion_mask": mask.long(),
            "advantages": advantages,
            "old_per_token_logps": padded(old),
            "num_items_in_batch": mask.sum(),
        }
        if ref is not None:
            batch["ref_per_token_logps"] = padded(ref)
        if weights is not None:
            batch["importance_sampling_ratio"] = weights
        return GRPOTrainer._compute_loss(trainer, None, batch)

    def dpo(self, logp, ref, lengths, *, loss_type, beta):
        """DPOTrainer's loss; the responses are P chosen ones, then P rejected ones. ref: (2P,) summed."""
        from trl.trainer.dpo_trainer import DPOTrainer

        padded = torch.nn.utils.rnn.pad_sequence(logp.split(lengths), batch_first=True)
        mask = torch.arange(padded.shape[1])[None] < torch.tensor(lengths)[:, None]
        prompt = torch.zeros(len(lengths), 1, dtype=torch.long)
        trainer = _trainer(
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=[loss_type],
            loss_weights=[1.0],
            beta=beta,
            label_smoothing=0.0,
            use_weighting=False,
            _total_train_tokens=0,
        )
        zeros = torch.zeros_like(padded)
        model = MagicMock(return_value=SimpleNamespace(
            log_probs=padded, entropy=zeros, entropies=zeros, mean_logits=zeros, logits=None, aux_loss=None,
            is_top1=zeros.bool(), is_correct=zeros.bool(),
        ))  # fmt: skip
        pairs = len(lengths) // 2
        batch = {
            "input_ids": torch.zeros(len(lengths), padded.shape[1] + 1, dtype=torch.long),
            "attention_mask": torch.ones(len(lengths), padded.shape[1] + 1, dtype=torch.long),
            "completion_mask": torch.cat([prompt, mask.long()], 1),
            "ref_chosen_logps": ref[:pairs],
            "ref_rejected_logps": ref[pairs:],
        }
        return DPOTrainer._compute_loss(trainer, model, batch, False)


@pytest.fixture
def trl(monkeypatch):
    pytest.importorskip("trl")
    # TRL would import vllm, which takes seconds and is not needed here.
    monkeypatch.setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda *_, **__: False)
    return Oracle()
