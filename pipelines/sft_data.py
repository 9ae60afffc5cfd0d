"""Raw SFT shards to token ids and response spans, once, before training.

The output folder:

- `parts/{file}-{task}-{k}.parquet`: good rows in input order, with `file` (number in the sorted listing) and `row` (number in
that file);
- `rejected/{file}-{task}.parquet`: location, reason and detail of the rows that were left out;
- `done/{file}-{task}.json`: what became of a task's rows, written when all of its files are there;
- `fingerprint.json`: what the files were made of and with; another fingerprint deletes them;
- `index.json`: the whole, written last.

A task is a shard, or a piece of a large one (see `preparation_tasks`). A killed preparation goes on with the tasks that are not
done.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from pipelines import storage
from pipelines.model_folders import fetch_facts
from pipelines.preparation_tasks import Preparation, Task, cut_shards, done_records, load_tokenizer, run_tasks
from pipelines.sft_source import Shard, Source, inspect_shards, list_sources
from workers.chat import check_prompt_format
from workers.config import DataSettings
from workers.errors import InputError
from workers.models.folder import TOKENIZER_FILES

# Raise this when the same input would give other files.
PREPARATION_VERSION = 2
_FILES_OF_TOKENS = (
    *TOKENIZER_FILES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
)
# Settings that do not change what a row becomes.
SETTINGS_OF_THE_RUN = {"train", "weights", "held_out", "max_held_out", "max_rejected_share", "shuffle_window"}


@dataclass(frozen=True)
class PreparedPart:
    """One file of prepared rows of the shard with number `file`; `num_response_tokens` are the tokens inside response spans."""

    path: str
    num_rows: int
    num_tokens: int
    num_response_tokens: int
    file: int = 0


@dataclass(frozen=True)
class PreparedIndex:
    """All prepared rows. `parts` and `files` (the shards' paths, by number) are in the order of the sorted listing.

    `sources` are the entries of the setting that names the shards, with their weights; none means weight 1 for all. They are no
    part of the prepared files.
    """

    parts: tuple[PreparedPart, ...]
    num_rows: int
    num_rejected: int
    reasons: dict[str, int]
    fingerprint: str
    files: tuple[str, ...]
    sources: tuple[Source, ...] = ()


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
    """Prepares all shards with Ray Data, or finds the result of an earlier call with the same input.

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
    sources = _sources(settings, paths, where, shards)
    fingerprint = _fingerprint(shards, settings, tokenizer_folder, mask_token_id, end_ids)
    index = _load_index(output, fingerprint)
    if index is None:
        tokenizer = load_tokenizer(fetch_facts(tokenizer_folder))
        check_prompt_format(tokenizer, settings.prompt_format, "data.prompt_format")
        _start_or_continue(output, fingerprint)
        preparation = Preparation(settings, tokenizer_folder, mask_token_id, end_ids, output)
        tasks = cut_shards(shards)
        index = _merge(_run(preparation, tasks, report), tasks, shards, fingerprint, output)
        _save_index(index, output)
    check_rejected(index, settings, output, where)
    return replace(index, sources=sources)


def _sources(
    settings: DataSettings, paths: Sequence[str] | None, where: str, shards: Sequence[Shard]
) -> tuple[Source, ...]:
    """The entries behind the shards, each with its weight."""
    sources = list_sources(settings.train if paths is None else paths, settings.weights if paths is None else (), where)
    changed = {file for source in sources for file in source.files} ^ {shard.path for shard in shards}
    if changed:
        raise InputError(min(changed), "a shard that came or went just now", "input that stays the same during a run")
    return sources


def _run(
    preparation: Preparation, tasks: Sequence[Task], report: Callable[[int, int], None]
) -> dict[str, dict[str, Any]]:
    """The `done` record of every task, by name; works on those that have none. Counts the shards that are whole."""
    done = done_records(preparation.output)
    missing = Counter(task.file for task in tasks if task.name not in done)
    num_shards = len({task.file for task in tasks})
    report(num_shards - len(missing), num_shards)
    for record in run_tasks(preparation, [task for task in tasks if task.name not in done]):
        done[record["task"]] = record
        missing -= Counter([record["file"]])
        report(num_shards - len(missing), num_shards)
    assert all(task.name in done for task in tasks), "Ray Data lost a task"
    return done


def _merge(
    done: dict[str, dict[str, Any]], tasks: Sequence[Task], shards: Sequence[Shard], fingerprint: str, output: str
) -> PreparedIndex:
    reasons: Counter[str] = Counter()
    parts = []
    for task in tasks:
        reasons.update(done[task.name]["reasons"])
        parts += [_part(output, entry) for entry in done[task.name]["parts"]]
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


def check_rejected(index: PreparedIndex, settings: DataSettings, output: str, where: str) -> None:
    """Stops a run with too many rejected rows, or none left, with the table of reasons.

    Raises:
        InputError: names the setting `where` that names the shards.
    """
    total = index.num_rows + index.num_rejected
    too_many = index.num_rejected > Fraction(str(settings.max_rejected_share)) * total  # 0.29 of 100 rows are 29
    if index.num_rows and not too_many:
        return
    table = "".join(f"\n  {count:>8}  {reason}" for reason, count in index.reasons.items())
    expected = "at least one good row" if not too_many else f"a share of at most {settings.max_rejected_share}"
    raise InputError(
        "data.max_rejected_share" if too_many else where,
        f"{index.num_rejected} of {total} rows of {where} rejected:{table}\n",
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
    for name in _FILES_OF_TOKENS:
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
    del content["sources"]
    for entry in content["parts"]:
        entry["path"] = entry["path"].replace("\\", "/").rsplit("/", 1)[-1]  # the folder may move
    storage.publish_bytes(storage.join(output, "index.json"), json.dumps(content, indent=1).encode())
