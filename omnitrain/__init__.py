"""omnitrain: post-train omni-modal models with reinforcement learning."""

__version__ = "0.1.0"
