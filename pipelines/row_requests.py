"""One row of a prompt set to one decoding request, or to the reason why it cannot be done. Nothing here ever stops a job."""

import json
import math
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from pipelines.prompt_rows import OVERRIDE_COLUMNS
from pipelines.work_units import PromptRow
from workers.chat import Rejected, encode_prompt
from workers.config import PromptFormat, PromptSettings, RowDecodingSettings
from workers.decoding.request import Request
from workers.errors import InputError

_INTEGER_COLUMNS = ("window", "max_new_tokens", "min_new_tokens", "top_k", "seed")


@dataclass(frozen=True)
class RowFault:
    """Why a row could not be done: a stable code and a message for people."""

    code: str
    message: str


class RequestBuilder:
    """Makes requests with one tokenizer.

    Args:
        tokenizer: of the model folder.
        end_ids: ids that end an answer.
        prompt_format: what a plain prompt is: a user turn, or the beginning of a text.
        prompts: names of the columns.
        decoding: settings of rows that override nothing.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: frozenset[int],
        prompt_format: PromptFormat,
        prompts: PromptSettings,
        decoding: RowDecodingSettings,
    ) -> None:
        self._tokenizer, self._end_ids, self._prompt_format = tokenizer, end_ids, prompt_format
        self._prompts = prompts
        # The engine mixes the job's seed with the row's id, so that rows do not share their noise.
        fields = set(RowDecodingSettings.model_fields)
        self._defaults = decoding.model_dump(mode="json", include=fields) | {"seed": None}

    def build(self, row: PromptRow) -> Request | RowFault:
        """The request of a row, or its fault. Codes: those of `workers.chat` with underscores, and those below."""
        if row.problem:
            return RowFault("malformed_json_line", row.problem)
        prompt, messages = (
            row.values.get(name) for name in (self._prompts.prompt_column, self._prompts.messages_column)
        )
        if prompt is not None and messages is not None:
            return RowFault("two_prompts", "both a prompt and messages; expected one of them, the other one null")
        decoding = self._decoding(row.values)
        if isinstance(decoding, RowFault):
            return decoding
        try:
            prompt_ids = encode_prompt(
                self._tokenizer,
                prompt if messages is None else messages,
                prompt_format=self._prompt_format,
                end_ids=self._end_ids,
            )
        except Rejected as verdict:
            return RowFault(verdict.reason.replace(" ", "_"), verdict.detail or verdict.reason)
        except InputError as error:  # messages, and a tokenizer that has no chat template
            return RowFault("cannot_encode", str(error))
        return Request(row.id if row.id is not None else row.location, tuple(prompt_ids), decoding)

    def _decoding(self, values: dict[str, Any]) -> RowDecodingSettings | RowFault:
        own = {name: _cleaned(name, values[name]) for name in OVERRIDE_COLUMNS if name in values}
        own = {name: value for name, value in own.items() if value is not None}
        if "threshold" in own:
            own.setdefault("mode", "tau")
        # They belong to the job's mode: a row with a mode of its own starts from that mode's defaults.
        dropped = ("threshold", "draft_branches") if "mode" in own else ()
        defaults = {name: value for name, value in self._defaults.items() if name not in dropped}
        try:
            # JSON mode, as for recipes: strict about types, yet a list is a tuple and 1 is a float.
            return RowDecodingSettings.model_validate_json(json.dumps({**defaults, **own}))
        except ValidationError as error:
            first = error.errors()[0]
            if not first["loc"]:  # a combination
                return RowFault("invalid_settings", f"{own}: {first['msg'].removeprefix('Value error, ')}")
            where = ".".join(map(str, first["loc"]))
            return RowFault("invalid_settings", f"{where}: {first['input']!r}: {first['msg']}")
        except TypeError as error:
            return RowFault("invalid_settings", f"{', '.join(own)}: {error}")


def _cleaned(name: str, value: Any) -> Any:
    """Undoes what data frames do to columns with gaps: NaN for null, and 8.0 for 8."""
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if name in _INTEGER_COLUMNS and value.is_integer():
            return int(value)
    return [value] if name == "stop" and isinstance(value, str) else value
