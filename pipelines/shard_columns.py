"""Whether the shards have columns that can be trained on, and how they differ from each other.

What can be used is used: text in any encoding, lists of messages of any kind, shards of messages beside shards of prompts and
responses. A shard that cannot be used at all is refused by name; a row that cannot be used is rejected later, by itself.
"""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipelines.column_types import is_messages, is_text
from pipelines.reports import text_table
from pipelines.row_files import MalformedLine, RowFile, json_lines, parquet_schema
from workers.config import DataSettings
from workers.errors import InputError

INSPECTED_ROWS = 20  # of a JSONL shard, for its columns
NUM_KINDS_SHOWN = 20
_JSON_TYPES = {
    "str": "text",
    "NoneType": "null",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "dict": "object",
}


@dataclass(frozen=True)
class ShardColumns:
    """The configured columns of a shard as `name: type`, and the names of the others, sorted."""

    configured: tuple[str, ...]
    others: tuple[str, ...]


def has_columns(names: Collection[str], settings: DataSettings) -> bool:
    """Whether a row with these columns is a conversation, or a prompt and a response."""
    return settings.messages_column in names or (settings.prompt_column in names and settings.response_column in names)


def inspect_columns(shard: RowFile, settings: DataSettings) -> ShardColumns:
    """The columns of a shard, from the footer of Parquet or the first rows of JSONL.

    Raises:
        InputError: as `parquet_schema`; a shard without rows, without the right columns, or with a column of another type.
    """
    return _inspect_parquet(shard, settings) if shard.is_parquet else _inspect_json(shard, settings)


def differences(shards: Sequence[RowFile], columns: Sequence[ShardColumns]) -> str | None:
    """A table of which shards have which columns, the most frequent first; None when all have the same."""
    members: dict[ShardColumns, list[RowFile]] = {}
    for shard, each in zip(shards, columns, strict=True):
        members.setdefault(each, []).append(shard)
    if len(members) == 1:
        return None
    kinds = sorted(members.items(), key=lambda item: -len(item[1]))
    rows = [
        [len(group), ", ".join(kind.configured), ", ".join(kind.others) or "-", group[0].path]
        for kind, group in kinds[:NUM_KINDS_SHOWN]
    ]
    rest = f"and {len(kinds) - NUM_KINDS_SHOWN} kinds more\n" if len(kinds) > NUM_KINDS_SHOWN else ""
    return text_table(["shards", "columns used", "others", "for example"], rows) + rest


def _inspect_parquet(shard: RowFile, settings: DataSettings) -> ShardColumns:
    schema, num_rows = parquet_schema(shard)
    if not num_rows:
        raise InputError(shard.path, "a Parquet file without rows", "a shard with rows", "Remove it.")
    if not has_columns(schema.names, settings):
        raise _wrong_columns(shard, schema.names, settings)
    messages, *pair = _configured(settings)
    used = [messages] if messages in schema.names else []
    if not used or pa.types.is_null(schema.field(messages).type):
        used += [name for name in pair if name in schema.names]
    for name in used:
        kind = schema.field(name).type
        is_fit, expected = (is_messages, "a list of {role, content}") if name == messages else (is_text, "text")
        if not is_fit(kind):
            advice = (
                "Convert it, or name another with data.messages_column, data.prompt_column or data.response_column."
            )
            raise InputError(f"{shard.path} column {name!r}", str(kind), expected, advice)
    types = {field.name: str(field.type) for field in schema}
    return _shard_columns(types, settings)


def _inspect_json(shard: RowFile, settings: DataSettings) -> ShardColumns:
    rows = [row for _, row in itertools.islice(json_lines(shard), INSPECTED_ROWS)]
    if not rows:
        raise InputError(shard.path, "a file of blank lines", "a shard with rows", "Remove it.")
    objects = [row for row in rows if not isinstance(row, MalformedLine)]
    types: dict[str, set[str]] = {}
    for row in objects:
        for name, value in row.items():
            types.setdefault(name, set()).add(_json_type(value))
    # A few bad lines are rejected rows, and are counted later. A shard in which no row has the columns is a wrong setting.
    if objects and not any(has_columns(row, settings) for row in objects):
        raise _wrong_columns(shard, sorted(types), settings)
    return _shard_columns({name: " or ".join(sorted(found)) for name, found in types.items()}, settings)


def _json_type(value: Any) -> str:
    name = type(value).__name__
    return _JSON_TYPES.get(name, name)


def _shard_columns(types: dict[str, str], settings: DataSettings) -> ShardColumns:
    configured = _configured(settings)
    return ShardColumns(
        tuple(f"{name}: {types[name]}" for name in configured if name in types),
        tuple(sorted(name for name in types if name not in configured)),
    )


def _configured(settings: DataSettings) -> tuple[str, str, str]:
    return settings.messages_column, settings.prompt_column, settings.response_column


def _wrong_columns(shard: RowFile, names: Sequence[str], settings: DataSettings) -> InputError:
    return InputError(
        shard.path,
        f"the columns {', '.join(names)}",
        f"{settings.messages_column!r}, or {settings.prompt_column!r} and {settings.response_column!r}",
        "Name the columns with data.messages_column, or data.prompt_column and data.response_column.",
    )
