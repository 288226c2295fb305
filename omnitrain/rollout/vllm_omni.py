"""vLLM-Omni's Thinker inside a training process: token in, token out, weights pushed in memory."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Callable, Iterable, Iterator

from omnitrain.data.sample import Sample
from omnitrain.errors import DataError, EngineStateError, RunError
from omnitrain.rollout import vllm_compat, vllm_weights
from omnitrain.rollout.engine import Request, Sampling, State, StateMachine, SyncReport
from omnitrain.rollout.queue import EngineGroup

if TYPE_CHECKING:
    import torch

_MEDIA = {"image": 8, "audio": 8, "video": 8}
_WATCHED = tuple(
    f"thinker.model.layers.0.{name}.weight"
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.experts.0.gate_proj", "mlp.experts.0.down_proj")
)


class VllmOmniEngine(StateMachine):
    """One in-process engine of this rank, or this rank's part of a tensor-parallel one.

    What `sleep` gives back, on devices whose pool can be unmapped (elsewhere it is logical only):
      "off"      nothing;
      "kv"       the KV cache. vLLM's level 1: it also moves the weights to pinned host memory and back, which
                 costs a copy of the weights each way (57 GiB took 45 s to sleep);
      "weights"  both, at once. A full load_weights must follow before the next generate, on every device.
    "auto" is "kv": a plan that knows the sizes resolves it beforehand.
    """

    name = "vllm_omni"

    def __init__(
        self,
        path: str,
        *,
        place: EngineGroup = EngineGroup(),
        dtype: str = "bfloat16",
        seed: int = 0,
        max_model_len: int = 4096,
        max_concurrent: int = 256,
        max_batched_tokens: int = 8192,
        gpu_memory_utilization: float = 0.7,
        sleep: str = "off",
        prefix_caching: bool = True,
        enforce_eager: bool = False,
        media: dict[str, int] | None = None,
        eos_ids: Iterable[int] = (),
        decode: Callable[[list[int]], str] | None = None,
        dummy_weights: bool = False,
    ) -> None:
        """`max_model_len` counts prompt and response tokens. `seed` is the run's; peers of one engine share theirs.

        `dummy_weights` skips reading the checkpoint: the first load_weights must be full. Raises ModelError
        when the checkpoint is not served by vLLM-Omni's class.
        """
        super().__init__()
        import torch.distributed as dist

        started = time.monotonic()
        self.place, self.sleep_meaning = place, "kv" if sleep == "auto" else sleep
        self.max_concurrent, self._media = max_concurrent, media or _MEDIA
        self._stop_ids, self._decode = sorted(set(eos_ids)), decode
        self._known_names: set[str] = set()
        self._group_is_ours = not dist.is_initialized()
        self._requests = 0
        self._run = 0
        options: dict[str, Any] = {}
        if dist.is_initialized() and dist.get_world_size() > 1:
            options["distributed_executor_backend"] = "external_launcher"
        self._llm = vllm_compat.build_llm(
            path,
            sleep=self.sleep_meaning != "off",
            eager=enforce_eager,
            memory_utilization=gpu_memory_utilization,
            media=self._media,
            dtype=dtype,
            # Different engines must not repeat each other where a request has no seed of its own; peers must.
            seed=(seed + place.engine) % 2**31,
            tensor_parallel_size=place.tp_size,
            max_model_len=max_model_len,
            max_num_seqs=max_concurrent,
            max_num_batched_tokens=max(max_batched_tokens, 64),
            enable_prefix_caching=prefix_caching,
            load_format="dummy" if dummy_weights else "auto",
            **options,
        )
        self.model_class = vllm_compat.model_class(self._llm)
        self.weights_valid = not dummy_weights
        self._initial: list["torch.Tensor"] | None = None if dummy_weights else self._watched()
        self.start_seconds = time.monotonic() - started

    # -- generating ---------------------------------------------------------------------------------------

    def generate(self, pull: Callable[[], Request | None], sampling: Sampling) -> Iterator[Sample]:
        """Yield samples as they finish; one engine request per prompt with n responses.

        Leaving the iterator early, or an exception anywhere, aborts what is in flight: the engine stays usable.
        """
        self.require_generate()
        return self._generate(pull, sampling)

    def _generate(self, pull, sampling: Sampling) -> Iterator[Sample]:
        from omnitrain.device import engine_kernels

        engine = self._llm.llm_engine
        if engine.has_unfinished_requests():  # an abandoned iterator that nobody has closed yet
            vllm_compat.abort_all(self._llm)
        self._run = run = self._run + 1
        limit = getattr(pull, "limit", None)
        open_requests: dict[str, tuple[Request, int]] = {}  # id -> request, responses still to come
        exhausted = False
        try:
            while True:
                while not exhausted and self._room(open_requests, sampling.n, limit):
                    request = pull()
                    exhausted = request is None
                    if request is not None:
                        open_requests[self._add(request, sampling)] = (request, sampling.n)
                if not open_requests:
                    return
                with engine_kernels():
                    outputs = engine.step()
                for output in outputs:
                    request, left = open_requests[output.request_id]
                    for completion in output.outputs:
                        left -= 1
                        if left:
                            open_requests[output.request_id] = (request, left)
                        else:
                            del open_requests[output.request_id]
                        yield self._sample(request, output, completion)
        finally:
            if self._run == run and self._llm is not None and engine.has_unfinished_requests():
                vllm_compat.abort_all(self._llm)

    def _room(self, open_requests: dict, n: int, limit: int | None) -> bool:
        """Whether another prompt fits. Depends on nothing but what all ranks of the engine know alike."""
        if not open_requests:
            return True
        in_flight = sum(left for _, left in open_requests.values())
        return in_flight + n <= self.max_concurrent and (limit is None or len(open_requests) < limit)

    def _add(self, request: Request, sampling: Sampling) -> str:
        self._requests += 1
        request_id = str(self._requests)
        prompt: dict[str, Any] = {"prompt_token_ids": list(request.prompt.engine_ids)}
        media = {kind: items for kind, items in request.prompt.media.items() if items}
        for kind, items in media.items():
            if len(items) > self._media.get(kind, 0):
                raise DataError(
                    f"row {request.prompt.row.id!r}: {len(items)} {kind} items, the engine takes {self._media.get(kind, 0)} "
                    "in a prompt; leave such rows out"
                )
        if media:
            prompt["multi_modal_data"] = media
            prompt["mm_processor_kwargs"] = vllm_compat.media_options(request.prompt.options)
        vllm_compat.add_request(self._llm, request_id, prompt, self.sampling_params(sampling, request.seed))
        return request_id

    def sampling_params(self, sampling: Sampling, seed: int) -> Any:
        """vLLM's parameters for one request. Every field of `sampling` must have its place here."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        fields = asdict(sampling)
        params = SamplingParams(
            n=fields.pop("n"),
            temperature=fields.pop("temperature"),
            max_tokens=fields.pop("max_new_tokens"),
            top_p=fields.pop("top_p"),
            top_k=fields.pop("top_k"),
            seed=seed % (2**63 - 2**16),  # child i samples with seed + i
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            stop_token_ids=self._stop_ids,
        )
        if fields:
            raise RunError(f"vllm_omni: sampling fields without effect: {', '.join(fields)}")
        return params

    def _sample(self, request: Request, output: Any, completion: Any) -> Sample:
        tokens = list(completion.token_ids)
        entries = list(completion.logprobs or [])
        if len(entries) != len(tokens):
            raise RunError(f"vllm_omni: {len(tokens)} tokens but {len(entries)} log-probs for row {request.prompt.row}")
        return Sample(
            row=request.prompt.row.index if request.prompt.row is not None else -1,
            group=request.group,
            child=completion.index,
            prompt_ids=list(output.prompt_token_ids),
            tokens=tokens,
            logprobs=[entry[token].logprob for entry, token in zip(entries, tokens)],
            finish_reason=completion.finish_reason,
            text=self._decode(tokens) if self._decode else "",
        )

    # -- weights ------------------------------------------------------------------------------------------

    def load_weights(self, named: Iterable[tuple[str, "torch.Tensor"]], *, full: bool = False) -> SyncReport:
        """Take weights by checkpoint name ("thinker." + transformers' name, experts one by one) and forget all caches.

        Drains `named` on every rank. What the engine did not take is in `ignored`, with the parts of a fused
        module that came without the others. `full` must cover every parameter, else RunError.
        """
        self.require("load_weights", State.WEIGHTS, State.AWAKE)
        started = time.monotonic()
        result = vllm_weights.reload(self._llm, named, self._known_names)
        if full:
            missing = vllm_weights.parameter_names(self._llm) - result.loaded
            if missing:
                self.weights_valid = False
                raise RunError(
                    f"vllm_omni: a full weight sync left {len(missing)} of the engine's parameters out: "
                    f"{', '.join(sorted(missing)[:5])}{' ...' if len(missing) > 5 else ''}"
                )
            self.weights_valid = not result.ignored
            if self._initial is None:
                self._initial = self._watched()
        return SyncReport(result.taken, result.ignored, result.bytes, time.monotonic() - started)

    def watch(self, name: str) -> "torch.Tensor":
        """(columns, out) float32: the first input columns of a linear weight, as the engine's kernel has them.

        `name` as in load_weights; for q, k or v the whole fused projection, of this rank's shard. Its change over
        a sync is the metric sync/delta_norm.
        """
        self.require("watch", State.WEIGHTS, State.AWAKE)
        return vllm_weights.watch(self._llm, name)

    def delta_norm(self) -> float:
        """Norm of what syncs have changed since the start, on the first layer's attention and experts."""
        self.require("delta_norm", State.WEIGHTS, State.AWAKE)
        if self._initial is None:
            raise EngineStateError(f"{self.name}: delta_norm before the first full load_weights")
        return sum(float((now - then).norm() ** 2) for now, then in zip(self._watched(), self._initial)) ** 0.5

    def _watched(self) -> list["torch.Tensor"]:
        return [vllm_weights.watch(self._llm, name) for name in _WATCHED]

    # -- states -------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        self.require("sleep", State.AWAKE, State.WEIGHTS)
        if self._llm.llm_engine.has_unfinished_requests():
            raise EngineStateError(f"{self.name}: sleep while requests are running; finish or leave generate first")
        if vllm_compat.can_sleep(self._llm):
            vllm_compat.sleep(self._llm, 2 if self.sleep_meaning == "weights" else 1)
        if self.sleep_meaning == "weights":
            self.weights_valid = False
        self.state = State.ASLEEP

    def wake(self, state: State = State.AWAKE) -> None:
        """ASLEEP -> WEIGHTS (sync here, while there is no KV cache) -> AWAKE; ASLEEP -> AWAKE does both."""
        if state is State.ASLEEP:
            raise EngineStateError(f"{self.name}: wake(ASLEEP); call sleep()")
        self.require(f"wake({state.name})", *([State.ASLEEP] if state is State.WEIGHTS else [State.ASLEEP, State.WEIGHTS]))
        if vllm_compat.can_sleep(self._llm):
            if self.state is State.ASLEEP:
                vllm_compat.wake(self._llm, "weights")
            if state is State.AWAKE:
                vllm_compat.wake(self._llm, "kv_cache")
        self.state = state

    def describe(self) -> dict[str, Any]:
        """Name, model class, versions, sizes in bytes, and what sleep really frees."""
        config = self._llm.llm_engine.vllm_config
        parameters = sum(p.numel() * p.element_size() for p in vllm_compat.model(self._llm).parameters())
        return {
            "name": self.name,
            "model_class": self.model_class,
            "versions": vllm_compat.versions(),
            "tensor_parallel": self.place.tp_size,
            "max_model_len": config.model_config.max_model_len,
            "kv_blocks": config.cache_config.num_gpu_blocks,
            "kv_tokens": (config.cache_config.num_gpu_blocks or 0) * config.cache_config.block_size,
            "parameter_bytes": parameters,
            "sleep": self.sleep_meaning,
            "sleep_frees_memory": vllm_compat.can_sleep(self._llm),
            "start_seconds": self.start_seconds,
        }

    def close(self) -> None:
        """Free the engine; calling it twice is harmless. The trainer's process groups stay."""
        if getattr(self, "_llm", None) is None:
            return
        vllm_compat.shutdown(self._llm, keep_group=not self._group_is_ours)
        self._llm = None
        self.state = State.ASLEEP
        gc.collect()
