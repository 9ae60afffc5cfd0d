"""Raw SFT shards to token ids and response spans, once, before training.

The output folder:

- `parts/{file}-{k}.parquet`: good rows in input order, with `file` (number in the sorted listing) and `row` (number in
that file);
- `rejected/{file}.parquet`: location, reason and detail of the rows that were left out;
- `done/{file}.json`: what became of a shard, written when all of its files are there;
- `fingerprint.json`: what the files were made of and with; another fingerprint deletes them;
- `index.json`: the whole, written last.

Every file is a function of its shard and the settings and appears as a whole, so a task that runs twice does no harm,
and a killed preparation goes on with the shards that are not done.
"""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import ray.data

from pipelines import storage
from pipelines.model_folders import fetch_facts
from pipelines.sft_rows import PartWriter, RejectedWriter, encode_row
from pipelines.sft_source import MalformedLine, Shard, inspect_shards, iterate_rows
from workers.chat import MALFORMED_LINE, Rejected, check_prompt_format
from workers.config import DataSettings
from workers.errors import InputError

# Raise this when the same input would give other files.
PREPARATION_VERSION = 1
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
# Settings that do not change what a row becomes.
SETTINGS_OF_THE_RUN = {"train", "max_rejected_share", "shuffle_window"}


@dataclass(frozen=True)
class PreparedPart:
    """One file of prepared rows; `num_response_tokens` are the tokens inside response spans."""

    path: str
    num_rows: int
    num_tokens: int
    num_response_tokens: int


@dataclass(frozen=True)
class PreparedIndex:
    """All prepared rows. `parts` and `files` (the shards' paths, by number) are in the order of the sorted listing."""

    parts: tuple[PreparedPart, ...]
    num_rows: int
    num_rejected: int
    reasons: dict[str, int]
    fingerprint: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class _Preparation:
    """All that a task needs to know, the same for every shard."""

    settings: DataSettings
    tokenizer_folder: str
    mask_token_id: int | None
    end_ids: frozenset[int]
    output: str


def prepare_sft_data(
    settings: DataSettings,
    *,
    tokenizer_folder: str,
    mask_token_id: int | None,
    end_ids: frozenset[int],
    output: str,
    report: Callable[[int, int], None] = lambda done, total: None,
    paths: Sequence[str] | None = None,
    where: str = "data.train",
) -> PreparedIndex:
    """Prepares all shards with Ray Data, one task per shard, or finds the result of an earlier call with the same input.

    Args:
        settings: columns, format, length and the allowed share of rejected rows.
        tokenizer_folder: a model folder, local or on S3; its tokenizer files are part of the fingerprint.
        mask_token_id: a row whose tokens have this id is rejected; None rejects none.
        end_ids: ids that end a turn.
        output: the folder described above, local or S3.
        report: called with (shards done, shards in all).
        paths: other shards than `settings.train`, named by the setting `where`.

    Raises:
        InputError: a fault of the input files, more than `max_rejected_share` rejected, or no row left.
    """
    shards = inspect_shards(settings, paths, where)
    fingerprint = _fingerprint(shards, settings, tokenizer_folder, mask_token_id, end_ids)
    index = _load_index(output, fingerprint)
    if index is None:
        check_prompt_format(
            _load_tokenizer(fetch_facts(tokenizer_folder)), settings.prompt_format, "data.prompt_format"
        )
        _start_or_continue(output, fingerprint)
        preparation = _Preparation(settings, tokenizer_folder, mask_token_id, end_ids, output)
        index = _merge(_prepare_shards(preparation, shards, report), shards, fingerprint, output)
        _save_index(index, output)
    _check_rejected(index, settings, output)
    return index


def _prepare_shards(
    preparation: _Preparation, shards: Sequence[Shard], report: Callable[[int, int], None]
) -> dict[int, dict[str, Any]]:
    """The `done` record of every shard, by number; works on those that have none."""
    done = {}
    for info in storage.list_folder(storage.join(preparation.output, "done")):
        record = json.loads(storage.read_bytes(info.path))
        done[record["file"]] = record
    report(len(done), len(shards))
    pending = [{"file": number, **asdict(shard)} for number, shard in enumerate(shards) if number not in done]
    for answer in _run_tasks(preparation, pending):
        if answer["error"]:
            # Given back as data: Ray Data would wrap an exception, and would try the same bad file again.
            raise InputError(*json.loads(answer["error"]))
        done[answer["file"]] = json.loads(answer["record"])
        report(len(done), len(shards))
    assert len(done) == len(shards), "Ray Data lost a shard"
    return done


def _run_tasks(preparation: _Preparation, pending: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    if not pending:
        return
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    with ray.data.DataContext.current(context):
        # One block per shard: a task takes a whole block.
        shards = ray.data.from_items(pending, override_num_blocks=len(pending))
        yield from shards.map(functools.partial(_prepare_shard, preparation=preparation)).iter_rows()


def _prepare_shard(item: dict[str, Any], preparation: _Preparation) -> dict[str, Any]:
    """The task: one shard to its files. Streams, so memory is bounded by one part."""
    shard = Shard(item["path"], int(item["size"]), item["version"])
    file = int(item["file"])
    try:
        record = json.dumps(_write_shard(file, shard, preparation))
    except InputError as error:
        return {"file": file, "record": "", "error": json.dumps(error.args)}
    return {"file": file, "record": record, "error": ""}


def _write_shard(file: int, shard: Shard, preparation: _Preparation) -> dict[str, Any]:
    pa.set_cpu_count(1)
    tokenizer = _load_tokenizer(fetch_facts(preparation.tokenizer_folder))
    reasons: Counter[str] = Counter()
    with (
        PartWriter(storage.join(preparation.output, "parts"), file) as parts,
        RejectedWriter(storage.join(preparation.output, "rejected"), file, shard.path) as rejected,
    ):
        for number, row in iterate_rows(shard, preparation.settings):
            try:
                if isinstance(row, MalformedLine):
                    raise Rejected(MALFORMED_LINE, row.detail)
                conversation = encode_row(
                    tokenizer,
                    row,
                    preparation.settings,
                    mask_token_id=preparation.mask_token_id,
                    end_ids=preparation.end_ids,
                )
            except Rejected as verdict:
                reasons[verdict.reason] += 1
                rejected.add(number, verdict)
            else:
                parts.add(number, conversation)
    record = {"file": file, "parts": parts.written, "reasons": dict(reasons)}
    storage.publish_bytes(storage.join(preparation.output, "done", f"{file:05d}.json"), json.dumps(record).encode())
    return record


def _merge(done: dict[int, dict[str, Any]], shards: Sequence[Shard], fingerprint: str, output: str) -> PreparedIndex:
    reasons: Counter[str] = Counter()
    parts = []
    for number in range(len(shards)):
        reasons.update(done[number]["reasons"])
        parts += [_part(output, entry) for entry in done[number]["parts"]]
    return PreparedIndex(
        parts=tuple(parts),
        num_rows=sum(part.num_rows for part in parts),
        num_rejected=reasons.total(),
        reasons=dict(reasons.most_common()),
        fingerprint=fingerprint,
        files=tuple(shard.path for shard in shards),
    )


def _part(output: str, entry: dict[str, Any]) -> PreparedPart:
    return PreparedPart(**{**entry, "path": storage.join(output, "parts", entry["path"])})


def _check_rejected(index: PreparedIndex, settings: DataSettings, output: str) -> None:
    """Stops a run with too many rejected rows, or none left, with the table of reasons."""
    total = index.num_rows + index.num_rejected
    too_many = index.num_rejected > settings.max_rejected_share * total
    if index.num_rows and not too_many:
        return
    table = "".join(f"\n  {count:>8}  {reason}" for reason, count in index.reasons.items())
    expected = "at least one good row" if not too_many else f"a share of at most {settings.max_rejected_share}"
    raise InputError(
        "data.max_rejected_share" if too_many else "data.train",
        f"{index.num_rejected} of {total} rows rejected:{table}\n",
        expected,
        f"Each row is listed in {storage.join(output, 'rejected')}.",
    )


def _fingerprint(
    shards: Sequence[Shard],
    settings: DataSettings,
    tokenizer_folder: str,
    mask_token_id: int | None,
    end_ids: frozenset[int],
) -> str:
    """Names what the prepared files depend on: listing, sizes and versions, tokenizer, settings."""
    tokenizer = {}
    for name in TOKENIZER_FILES:
        path = storage.join(tokenizer_folder, name)
        if storage.find_file(path) is not None:
            tokenizer[name] = hashlib.sha256(storage.read_bytes(path)).hexdigest()
    content = {
        "version": PREPARATION_VERSION,
        "shards": [asdict(shard) for shard in shards],
        "settings": settings.model_dump(exclude=SETTINGS_OF_THE_RUN),
        "tokenizer": tokenizer,
        "mask_token_id": mask_token_id,
        "end_ids": sorted(end_ids),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _start_or_continue(output: str, fingerprint: str) -> None:
    """Deletes what another input or other settings left in the folder; keeps what this one did."""
    path = storage.join(output, "fingerprint.json")
    if storage.find_file(path) is not None and json.loads(storage.read_bytes(path)) == fingerprint:
        return
    # `done` goes first: a folder without it is started anew whatever else is still there.
    for name in ("done", "parts", "rejected"):
        storage.delete(storage.join(output, name))
    storage.publish_bytes(path, json.dumps(fingerprint).encode())


def _load_index(output: str, fingerprint: str) -> PreparedIndex | None:
    path = storage.join(output, "index.json")
    if storage.find_file(path) is None:
        return None
    content = json.loads(storage.read_bytes(path))
    if content["fingerprint"] != fingerprint:
        return None
    parts = tuple(_part(output, entry) for entry in content.pop("parts"))
    return PreparedIndex(parts=parts, files=tuple(content.pop("files")), **content)


def _save_index(index: PreparedIndex, output: str) -> None:
    content = asdict(index)
    for entry in content["parts"]:
        entry["path"] = entry["path"].replace("\\", "/").rsplit("/", 1)[-1]  # the folder may move
    storage.publish_bytes(storage.join(output, "index.json"), json.dumps(content, indent=1).encode())


@functools.cache
def _load_tokenizer(folder: str) -> Any:
    from workers.models.folder import load_tokenizer

    return load_tokenizer(folder)
