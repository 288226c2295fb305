"""The gates in words: what each compares, why it usually fires, and what to do. Imports no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Gate:
    """One check that stops a run at step 0 when it would train the wrong thing."""

    title: str
    compares: str
    causes: tuple[str, ...]
    """Likely ones first."""
    fix: str
    online_text: bool = True
    """Whether it runs for text rollouts."""


# What runs with online algorithms.
GATES: dict[str, Gate] = {
    "g1": Gate(
        "a weight sync reaches the engine",
        "Perturbs every trained parameter and syncs: the engine's output must change, and its log-probs must equal the "
        "trainer's. The weights are then restored.",
        (
            "weights were streamed under names that the engine drops without an error",
            "the engine still answers from a prefix cache or encoder cache of the old weights",
            "the engine repacks its weights on load and the push went to the unpacked copy",
            "a sleep dropped the weights and only a part was filled again",
        ),
        "Read the names in the message. Set rollout.prefix_caching = false to rule out the cache.",
    ),
    "g2": Gate(
        "sleep and wake leave the output unchanged",
        "Greedy answers to fixed prompts (with media) before a sleep, and after waking and syncing: their tokens, and mean "
        "|difference of log-probs| of each modality (1e-3 in float32, 0.1 in bfloat16).",
        (
            "a level-2 sleep dropped weights or buffers that the refill does not cover, the towers for instance",
            "the KV cache was woken before the weights were synced",
        ),
        'Set rollout.sleep = "kv", or "off" if memory allows.',
    ),
    "g3": Gate(
        "every trained tensor is bound in the engine",
        "The tensors trained (LoRA modules, or whole weights) against those that the engine took, by name and by count; the "
        "count is above 0.",
        (
            "model.lora.targets match no module",
            "the engine fuses projections (q, k and v), and only some parts were sent",
            "the adapter's names have a prefix that the engine does not know",
        ),
        'Use model.lora.targets = "attention", or correct the names listed in the message.',
    ),
    "g4": Gate(
        "the engine's sigmas equal the trainer's",
        "The noise schedule recorded in the rollout and the trainer's, bitwise.",
        ("the number of steps means something else to the engine", "the scheduler's shift differs"),
        "Both lists are in the message; set the steps and the shift in the recipe.",
        online_text=False,
    ),
    "g5": Gate(
        "the first ratio is 1",
        "Current against old log-probs on the first on-policy micro-batch: max |log ratio| within rounding (1e-6 in "
        "float32, a multiple of the same-weights noise in bfloat16).",
        (
            "old and current log-probs were computed in different packings",
            "dropout is active",
            "the temperature is applied on one side only",
            "weights changed between the two forwards",
        ),
        'Check anything of your own that touches the forward; compare once with model.dtype = "float32".',
    ),
    "g6": Gate(
        "engine and trainer agree on log-probs",
        "Pearson of token probabilities and mean |difference of log-probs|, for each modality in the data, "
        "and for videos with and without a sound track where data.use_audio_in_video asks for it. In bfloat16 it "
        "stops below 0.99 or above 0.1 and warns below 0.995; in float32 it stops below 0.9999 or above 1e-3.",
        (
            "positions of media tokens differ between the engine and the trainer",
            "the frames of a video, or its sound, are placed at other times on one side",
            "the audio or vision tower attends differently on one side",
            "the temperature is applied on one side only",
            "router flips of a mixture of experts in bfloat16",
            "the engine has stale weights (see g1)",
        ),
        "`omnitrain bench RECIPE --agreement` shows the gap by modality; float32 separates rounding from a bug.",
    ),
    "g7": Gate(
        "the engine's prompt ids equal the processor's",
        "The prompt ids that the engine expanded and those the processor wrote, for prompts of each kind (see g6).",
        (
            "already expanded placeholders were expanded again",
            "the engine resizes or resamples media by other limits (data.image, data.video), or takes other frames",
            "two versions of the processor's configuration",
        ),
        "The first differing position is in the message. Use the checkpoint's own processor files.",
    ),
    "g8": Gate(
        "one SDE window for each group and step",
        "The stochastic steps of all samples of a group, and the stored latents' dtype (float32).",
        ("the window is drawn for each request rather than for each group", "latents are stored in bfloat16"),
        "Set the window in rollout.sde.",
        online_text=False,
    ),
    "g9": Gate(
        "each reward returns finite values",
        "Every reward on one answer to a few rows of each kind and of each source: one finite number each, within rewards[].timeout. A "
        "reward whose on_failure tolerates failures must work for one of them.",
        (
            "the reward raises, or returns None or NaN, on the data's own format",
            "the label is not in the form that the reward reads",
            "the reward is slower than its timeout",
        ),
        "The message names the row and the error. See rewards[].on_failure for failures you want to tolerate.",
    ),
    "g10": Gate(
        "a checkpoint round-trips",
        "The real sharded state, written and read again: every trained weight is in it, and bitwise the same.",
        (
            "the disk is full or read-only",
            "a parameter is missing from the saved state",
            "an adapter was left out as frozen",
        ),
        "Free disk space (`omnitrain plan` says how much); otherwise the names are in the message.",
    ),
    "g11": Gate(
        "every op on the training path has a backward",
        "Lists fused ops without a gradient (must be none), and compares a finite difference with the gradient of each "
        "fused slice.",
        ("a fused kernel of the engine is on the training path",),
        "The message names the op; its plain-torch replacement must be installed for both roles.",
        online_text=False,
    ),
}

# What runs with offline algorithms, under the same names where the same thing is asked of another pair of numbers.
OFFLINE: dict[str, Gate] = {
    "g3": Gate(
        "every adapter is trained",
        "The adapters' targets against what is trained, and the gradients of a few rows of each kind: each adapter (without "
        "LoRA, each trained tensor) has one that is finite and above 0.",
        (
            "model.lora.targets match no module",
            "a fused kernel computes the module without its adapter (the experts of a mixture, for instance)",
            "a version of peft that binds or names adapters differently",
        ),
        'Use model.lora.targets = "attention", or correct the names listed in the message.',
    ),
    "g5": Gate(
        "the reference is the policy that training starts from",
        "Policy against reference before step 1, on the pairs of a few rows of each kind (dpo): max |log ratio| of a token, and "
        "each pair's D, within rounding (1e-6 in float32, 1e-5 against precomputed log-probs, a multiple of the "
        "same-weights noise in bfloat16). Skipped where model.init_from moves the adapter, and on resume.",
        (
            "dropout is active",
            "switching the adapter off leaves a part of it on",
            "model.adapter was loaded into the policy or the reference only",
            "reference.json holds the log-probs of other weights or other rows",
        ),
        "A new run (--fresh) computes reference.json again; check anything of your own that touches the forward.",
    ),
    "g10": GATES["g10"],
}
