"""Where relative paths of settings point to: never into Ray's uploaded copy of the code, where results would vanish."""

import logging
import os
import re
from pathlib import Path

from workers.errors import InputError

_JOB_MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray for the entrypoint of a submitted job
_SCHEME = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")
_S3 = "s3://"
_logger = logging.getLogger(__name__)


def is_submitted_job() -> bool:
    """True in the entrypoint of `ray job submit`."""
    return _JOB_MARK in os.environ


def home() -> Path:
    """The folder relative paths start from: `MARSRAY_HOME`, else `~/marsray` in a submitted job, else the current one."""
    configured = os.environ.get("MARSRAY_HOME")
    if configured:
        if _SCHEME.match(configured):
            raise InputError("MARSRAY_HOME", configured, "a folder of a file system")
        return Path(_expanded(configured)).resolve()
    return Path(_expanded("~/marsray")) if is_submitted_job() else Path.cwd()


def cache_folder() -> str:
    """The folder of this node for copies of what is on S3: `MARSRAY_CACHE`, else `~/.cache/marsray`."""
    return _expanded(os.environ.get("MARSRAY_CACHE") or "~/.cache/marsray")


def resolve(path: str, where: str = "a path of the settings", expected: str = "a file or folder") -> str:
    """An absolute path without `..` for a path of the settings; `s3://` paths pass unchanged.

    Args:
        where: the setting, for the message about an empty text.
        expected: what should be there.

    Raises:
        InputError: empty, of another scheme, or in the home folder of an unknown user.
    """
    if path.startswith(_S3):
        return path
    scheme = _SCHEME.match(path)
    if scheme:
        advice = (
            "Write the path without file://." if scheme[0].lower() == "file://" else "Copy the files to one of these."
        )
        raise InputError(path, f"the scheme {scheme[0]}", "a path of a file system or s3://bucket/key", advice)
    if not path:
        raise InputError(where, "an empty text", expected)
    return os.path.normpath(home() / _expanded(path))


def _expanded(path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise InputError(path, "a home folder that does not exist", "a known user", "Write the whole path.")
    return expanded


def log_home() -> None:
    """Says where relative paths point to; the first line of every job."""
    if os.environ.get("MARSRAY_HOME"):
        why = "MARSRAY_HOME"
    else:
        why = "submitted job; MARSRAY_HOME changes it" if is_submitted_job() else "the current folder"
    _logger.info("relative paths start at %s (%s)", home(), why)
