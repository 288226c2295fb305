"""The language-model head that returns log-probs of chosen tokens and never holds all logits.

(tokens, vocabulary) in float32 would be 10 GB for 16k tokens of a 152k vocabulary; a chunk is 256 MB.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# Float32 logits held at once.
_CHUNK_ELEMENTS = 2**26
_LEAST_ROWS = 64


@dataclass(frozen=True)
class Question:
    """What the next forward should return instead of logits."""

    index: torch.Tensor
    """(N,) positions in the packed row whose next token is asked about."""
    labels: torch.Tensor | None
    """(N,) those next tokens; None asks for the logits (N, V) themselves, in float32."""
    temperature: float = 1.0
    entropy: bool = False


class LogprobHead(nn.Linear):
    """lm_head, which inside `asked(question)` answers it within its own forward.

    Being part of the forward matters under FSDP: only there is the weight whole, and its gradient collected.
    """

    question: Question | None = None

    @contextmanager
    def asked(self, question: Question):
        self.question = question
        try:
            yield
        finally:
            self.question = None

    def forward(self, hidden: torch.Tensor):
        """hidden (1, T, H) -> logits, or for a question (log-probs (N,), entropy (N,) or None)."""
        question = self.question
        if question is None:
            return super().forward(hidden)
        hidden = hidden.flatten(0, -2)[question.index]
        if question.labels is None:
            return super().forward(hidden).float()
        return logprobs(hidden, self.weight, question.labels, question.temperature, question.entropy)


def logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0, entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(hidden weight^T / temperature) at `labels`, in chunks.

    hidden (N, H), weight (V, H), labels (N,) -> log-probs (N,) and entropy (N,) without gradient, or None;
    both float32. A frozen weight costs one forward and (N, H) of memory, a trained one is recomputed.
    """
    rows = max(_LEAST_ROWS, _CHUNK_ELEMENTS // weight.shape[0])
    if not torch.is_grad_enabled() or weight.requires_grad:
        logp, ent = [], []
        for h, label in zip(hidden.split(rows), labels.split(rows), strict=True):
            args = (h, weight, label, temperature, entropy)
            lp, e = checkpoint(_answers, *args, use_reentrant=False) if torch.is_grad_enabled() else _answers(*args)
            logp.append(lp)
            ent.append(e)
        return torch.cat(logp), torch.cat(ent) if entropy else None
    logp, ent = _FrozenHead.apply(hidden, weight, labels, temperature, entropy, rows)
    return logp, ent if entropy else None


def _chunk(hidden, weight, labels, temperature, entropy):
    """log-probs, entropies, tempered logits and their log-sum-exp of one chunk."""
    logits = (hidden @ weight.t()).float() / temperature
    norm = logits.logsumexp(-1)
    logp = logits.gather(-1, labels[:, None]).squeeze(-1) - norm
    if not entropy:
        return logp, None, logits, norm
    with torch.no_grad():
        probabilities = (logits - norm[:, None]).exp()
        return logp, norm - (probabilities * logits).sum(-1), logits, norm


def _answers(*args):
    return _chunk(*args)[:2]  # a checkpointed function keeps what it returns, so no logits


class _FrozenHead(torch.autograd.Function):
    """With a frozen weight, d logp_i / d hidden_i is one H-vector: (w[label] - sum_v p_v w_v) / temperature."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, temperature, entropy, rows):
        logp, ent, jacobian = [], [], []
        for h, label in zip(hidden.split(rows), labels.split(rows), strict=True):
            lp, e, logits, norm = _chunk(h, weight, label, temperature, entropy)
            probabilities = logits.sub_(norm[:, None]).exp_().to(weight.dtype)
            jacobian.append((weight[label] - probabilities @ weight) / temperature)
            logp.append(lp)
            ent.append(e if entropy else lp.new_zeros(0))
        ctx.save_for_backward(torch.cat(jacobian))
        ent = torch.cat(ent)
        ctx.mark_non_differentiable(ent)
        return torch.cat(logp), ent

    @staticmethod
    def backward(ctx, grad, _):
        (jacobian,) = ctx.saved_tensors
        return (grad[:, None] * jacobian).to(jacobian.dtype), None, None, None, None, None
