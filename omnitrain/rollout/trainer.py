"""The trainer's own module samples, token by token: slow, exact, and the oracle for every other engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator, Protocol

import torch
import torch.distributed as dist

from omnitrain.data.sample import Prompt, Sample
from omnitrain.errors import EngineStateError
from omnitrain.rollout.engine import Request, Sampling, State, StateMachine, SyncReport

if TYPE_CHECKING:
    from collections.abc import Sequence


class NextLogits(Protocol):
    """What this engine needs of a policy."""

    def next_logits(self, batch: "Sequence[tuple[Prompt, list[int]]]") -> torch.Tensor:
        """(B, V) float32 logits of the token after each prompt and its response so far. An empty batch runs the model too."""


@dataclass
class _Running:
    request: Request
    child: int
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class TrainerEngine(StateMachine):
    """Samples with `policy.next_logits`. Its weights are the policy's: a sync has nothing to do.

    Under FSDP a forward is collective, so all ranks go on until the last of them is done; those without work
    run the model on an empty batch. For the same reason an exception on one rank ends the run on all.
    """

    name = "trainer"

    def __init__(
        self,
        policy: NextLogits,
        *,
        max_concurrent: int = 256,
        eos_ids: Iterable[int] = (),
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        super().__init__()
        self._policy, self._max_concurrent = policy, max_concurrent
        self._stop_ids, self._decode = set(eos_ids), decode
        self._watched: str | None = None
        self._first: torch.Tensor | None = None
        self._last: torch.Tensor | None = None
        self.model_class = f"{type(policy).__module__}.{type(policy).__qualname__}"

    def generate(self, pull: Callable[[], Request | None], sampling: Sampling) -> Iterator[Sample]:
        """Yield samples as they finish. Every rank must iterate to the end."""
        self.require_generate()
        return self._generate(pull, sampling)

    def _generate(self, pull, sampling: Sampling) -> Iterator[Sample]:
        limit = getattr(pull, "limit", None)
        running: list[_Running] = []
        exhausted = False
        while True:
            while not exhausted and self._room(running, sampling.n, limit):
                request = pull()
                exhausted = request is None
                if request is not None:
                    running += [_Running(request, i, _generator(request.seed + i)) for i in range(sampling.n)]
            if not _any_rank(bool(running)):
                return
            batch = [(r.request.prompt, r.tokens) for r in running]  # empty: a forward all the same
            with torch.no_grad():
                logits = self._policy.next_logits(batch).float().cpu()
            finished = [self._advance(r, row, sampling) for r, row in zip(running, logits)]
            done = [self._sample(r, reason) for r, reason in zip(running, finished) if reason]
            running = [r for r, reason in zip(running, finished) if not reason]
            yield from done

    def _room(self, running: list[_Running], n: int, limit: int | None) -> bool:
        if not running:
            return True
        prompts = len({r.request.group for r in running})
        return len(running) + n <= self._max_concurrent and (limit is None or prompts < limit)

    def _advance(self, r: _Running, logits: torch.Tensor, sampling: Sampling) -> str | None:
        """Sample one token for `r` from logits (V,); the finish reason when it was the last."""
        logprobs = log_distribution(logits, sampling)
        if sampling.temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=r.generator))
        r.tokens.append(token)
        r.logprobs.append(float(logprobs[token]))
        if token in self._stop_ids:
            return "stop"
        return "length" if len(r.tokens) >= sampling.max_new_tokens else None

    def _sample(self, r: _Running, reason: str) -> Sample:
        row = r.request.prompt.row
        return Sample(
            row=row.index if row is not None else -1,
            group=r.request.group,
            child=r.child,
            prompt_ids=list(r.request.prompt.ids),
            tokens=r.tokens,
            logprobs=r.logprobs,
            finish_reason=reason,
            text=self._decode(r.tokens) if self._decode else "",
        )

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], *, full: bool = False) -> SyncReport:
        """Drain `named`, which is collective; the policy's weights are this engine's already."""
        self.require("load_weights", State.WEIGHTS, State.AWAKE)
        report, candidate, watched = SyncReport(), None, None
        for name, tensor in named:
            report.pushed.add(name)
            if name == self._watched or (candidate is None and tensor.ndim == 2):
                copy = tensor.detach().float().cpu().clone()
                candidate = candidate or (name, copy)
                watched = copy if name == self._watched else watched
        if watched is None and candidate is not None:  # the first sync, or one that streams other parameters
            self._watched, self._first = candidate
            watched = self._first
        self._last = watched
        return report

    def delta_norm(self) -> float:
        """Norm of the change since the first sync, on the first matrix that the syncs stream alike."""
        if self._first is None or self._last is None:
            return 0.0
        return float((self._last - self._first).norm())

    def sleep(self) -> None:
        """Logical: there is no second copy of anything."""
        self.require("sleep", State.AWAKE, State.WEIGHTS)
        self.state = State.ASLEEP

    def wake(self, state: State = State.AWAKE) -> None:
        if state is State.ASLEEP:
            raise EngineStateError(f"{self.name}: wake(ASLEEP); call sleep()")
        self.require(f"wake({state.name})", *([State.ASLEEP] if state is State.WEIGHTS else [State.ASLEEP, State.WEIGHTS]))
        self.state = state

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "model_class": self.model_class, "sleep_frees_memory": False}

    def close(self) -> None:
        self.state = State.ASLEEP


def log_distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """(V,) log-probs of the distribution that is sampled from: temperature, then top-k, then top-p; greedy: T = 1."""
    logits = logits / sampling.temperature if sampling.temperature > 0 else logits.clone()
    if sampling.temperature > 0 and 0 < sampling.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], float("-inf"))
    if sampling.temperature > 0 and sampling.top_p < 1:
        ordered, index = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        logits[index[before >= sampling.top_p]] = float("-inf")
    return torch.log_softmax(logits, -1)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed % 2**63)


def _any_rank(flag: bool) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    count = torch.tensor([int(flag)])  # control messages go by the CPU's backend
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return bool(count)
