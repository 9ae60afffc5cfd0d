"""Where relative paths of settings point to: never into Ray's uploaded copy of the code, where results would vanish."""

import logging
import os
from pathlib import Path

_JOB_MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray for the entrypoint of a submitted job
_URI_SCHEMES = ("s3://",)
_logger = logging.getLogger(__name__)


def is_submitted_job() -> bool:
    """True in the entrypoint of `ray job submit`."""
    return _JOB_MARK in os.environ


def home() -> Path:
    """The folder relative paths start from: `MARSRAY_HOME`, else `~/marsray` in a submitted job, else the current one."""
    configured = os.environ.get("MARSRAY_HOME")
    if configured:
        return Path(configured).expanduser().resolve()
    return Path("~/marsray").expanduser() if is_submitted_job() else Path.cwd()


def resolve(path: str) -> str:
    """An absolute path for a path of the settings; URIs pass unchanged."""
    return path if path.startswith(_URI_SCHEMES) else str((home() / Path(path).expanduser()).absolute())


def log_home() -> None:
    """Says where relative paths point to; the first line of every job."""
    if os.environ.get("MARSRAY_HOME"):
        why = "MARSRAY_HOME"
    else:
        why = "submitted job; MARSRAY_HOME changes it" if is_submitted_job() else "the current folder"
    _logger.info("relative paths start at %s (%s)", home(), why)
