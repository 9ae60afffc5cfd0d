"""`metrics.jsonl` of a training stage: one line for each report, in the order of the steps."""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipelines import storage

Line = dict[str, Any]
_SECONDS_BETWEEN_UPLOADS = 3.0
_UPLOAD_BYTES_PER_SECOND = 1e6  # a long file is sent less often, so that its whole costs no more than this


class MetricsFile:
    """Keeps the file up to date: locally by appending, on S3, where nothing can be appended, by sending the whole now and then.

    Args:
        path: local or on S3.
        lines: what is in the file already.
    """

    def __init__(self, path: str, lines: Iterable[Line]) -> None:
        self._path = path
        self._texts = [_as_json(line) for line in lines]
        self._is_published = True
        self._may_end_in_half_a_line = True  # after a kill
        self._next_upload = 0.0

    def restart(self, step: int, lines: Iterable[Line]) -> None:
        """What was beyond `step` is gone; `lines` remain."""
        self._texts = [_as_json(line) for line in lines]
        self._publish()

    def write(self, line: Line) -> None:
        """Adds a line."""
        self._texts.append(_as_json(line))
        if storage.is_s3(self._path):
            self._is_published = False
            self.flush()
            return
        if self._may_end_in_half_a_line:
            self._publish()
            return
        self._may_end_in_half_a_line = True  # until this one is whole
        with Path(self._path).open("a") as file:
            file.write(self._texts[-1])
        self._may_end_in_half_a_line = False

    def flush(self) -> None:
        """Sends to S3 what has waited long enough."""
        if not self._is_published and time.monotonic() >= self._next_upload:
            self._publish()

    def close(self, status: str) -> None:
        """Sends what has not been sent."""
        if not self._is_published:
            self._publish()

    def _publish(self) -> None:
        content = "".join(self._texts).encode()
        self._next_upload = time.monotonic() + max(_SECONDS_BETWEEN_UPLOADS, len(content) / _UPLOAD_BYTES_PER_SECOND)
        storage.publish_bytes(self._path, content)
        self._is_published, self._may_end_in_half_a_line = True, False


def read_metrics(path: str) -> list[Line]:
    """The lines of a `metrics.jsonl`; one that a kill has cut short is left out, and will be written again."""
    if not storage.exists(path):
        return []
    texts = storage.read_bytes(path).decode().splitlines(keepends=True)
    return [json.loads(text) for text in texts if text.endswith("\n")]


def _as_json(line: Line) -> str:
    return json.dumps(line) + "\n"
