"""Errors that a user can act on, each with the process exit code it leads to.

Exit codes: 0 ok, 1 data or run failed, 2 command or recipe wrong, 3 a gate refused,
130 interrupted with a checkpoint saved. The command line prints these errors without a
traceback; every other exception is a bug and keeps its traceback.
"""


class OmnitrainError(Exception):
    """Base of all errors that are reported without a traceback."""

    exit_code = 1


class UsageError(OmnitrainError):
    """The command line or the recipe is wrong; nothing was started."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe does not validate. The message holds file:line:column, the line and a caret."""


class DataError(OmnitrainError):
    """A data file is missing, damaged, or of another schema version."""


class ModelError(OmnitrainError):
    """A model directory is incomplete, of another architecture, or cannot be used as asked."""


class RunError(OmnitrainError):
    """A run failed: a rank died, a reward failed, the disk is full."""


class RewardError(RunError):
    """A reward raised, timed out, or returned something that is not one finite number."""


class RewardTimeout(RewardError):
    """A reward took longer than its time limit for one sample."""


class EngineStateError(RunError):
    """A call that the rollout engine's state does not allow."""


class GateRefused(OmnitrainError):
    """A gate found that the run would train the wrong thing."""

    exit_code = 3


class Interrupted(OmnitrainError):
    """The user asked to stop; the checkpoint is saved."""

    exit_code = 130
