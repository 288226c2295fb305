"""Errors that a user can act on, each with the process exit code it leads to.

Exit codes: 0 ok, 1 data or run failed, 2 command or recipe wrong, 3 a gate refused,
130 interrupted with a checkpoint saved. The command line prints these errors without a
traceback; every other exception is a bug and keeps its traceback.
"""


import errno

_ENVIRONMENT = {
    errno.ENOSPC: "no space left; make room there",
    errno.EDQUOT: "the disk quota is used up; make room there",
    errno.EROFS: "the file system is read-only; choose another place",
    errno.EACCES: "permission denied; choose another place or change its permissions",
    errno.EPERM: "not permitted; choose another place or change its permissions",
}


def environment_fault(error: BaseException) -> str | None:
    """One line for an error of the machine that only the user can mend (a full disk, a missing right), else None.

    It is found also as the cause of another error.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in _ENVIRONMENT:
            return f"{seen.filename or 'cannot write'}: {_ENVIRONMENT[seen.errno]}"
        seen = seen.__cause__
    return None


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


class BadMedia(Exception):
    """A media file that cannot be used: `reason` is the drop reason ("truncated image"), the message says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason


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
