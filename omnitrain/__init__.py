"""omnitrain: post-train omni-modal and diffusion models with RL and preferences."""

__version__ = "0.1.0"
