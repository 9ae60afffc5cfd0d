"""What of a job is done: one small file per finished unit, and the settings that all of them share.

Layout of an output folder, in the order in which things appear:

    _manifest/job.json          the fingerprint: input, model and settings
    part-UNIT.parquet           the answers of a unit
    _errors/part-UNIT.parquet   its rows that could not be done
    _manifest/unit-UNIT.json    the commit point: the unit is done, and these are its counts
    _report.html, _report.json, _SUCCESS    the job is done

Every file appears as a whole, and a part's name is a function of its unit. So whatever is killed, a unit without its entry
runs again and replaces its own files: each row is there once.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any, Self

from pipelines import storage, top_rows
from pipelines.comparison import Comparison
from pipelines.prompt_rows import PromptFile
from pipelines.top_rows import RowFigures
from workers.config import DecodingSettings, PromptSettings
from workers.errors import InputError

_MANIFEST, _JOB, _UNIT, _SUCCESS, REPORT = "_manifest", "job.json", "unit-", "_SUCCESS", "_report.json"
PAGE = "_report.html"
_OWN_NAMES = ("part-", "_errors/part-", f"{_MANIFEST}/", _SUCCESS, "_report.")
# The number of slots changes the speed and not the text, so a job that ran out of memory can go on with fewer.
_FREE_DECODING_FIELDS = {"num_slots", "prefill_chunk"}
_SAMPLE_BYTES, _NUM_SAMPLES = 64 << 10, 64


@dataclass(frozen=True)
class UnitEntry:
    """The counts of one finished unit; what its manifest entry holds."""

    unit: str
    num_rows: int
    num_results: int
    errors: dict[str, int]
    num_prompt_tokens: int
    num_generated_tokens: int
    num_forwards: int
    num_query_tokens: int = 0
    kept_per_forward: dict[str, int] = dataclass_field(default_factory=dict)
    forwards_per_window: dict[str, int] = dataclass_field(default_factory=dict)
    slowest_rows: list[RowFigures] = dataclass_field(default_factory=list)
    longest_rows: list[RowFigures] = dataclass_field(default_factory=list)
    comparison: Comparison = dataclass_field(default_factory=Comparison)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """The entry of a file."""
        values = json.loads(data)
        rows = {name: top_rows.from_json(values[name]) for name in ("slowest_rows", "longest_rows")}
        return cls(**{**values, **rows, "comparison": Comparison(**values["comparison"])})


@dataclass
class Totals:
    """Sums over units."""

    num_units: int = 0
    num_rows: int = 0
    num_results: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_forwards: int = 0
    num_query_tokens: int = 0

    def __post_init__(self) -> None:
        self.errors: Counter[str] = Counter()
        self.kept_per_forward: Counter[str] = Counter()
        self.forwards_per_window: Counter[str] = Counter()
        self.slowest_rows: list[RowFigures] = []
        self.longest_rows: list[RowFigures] = []
        self.comparison = Comparison()

    def add(self, entry: UnitEntry) -> None:
        """Counts one finished unit."""
        self.num_units += 1
        self.num_rows += entry.num_rows
        self.num_results += entry.num_results
        self.num_prompt_tokens += entry.num_prompt_tokens
        self.num_generated_tokens += entry.num_generated_tokens
        self.num_forwards += entry.num_forwards
        self.num_query_tokens += entry.num_query_tokens
        self.errors.update(entry.errors)
        self.kept_per_forward.update(entry.kept_per_forward)
        self.forwards_per_window.update(entry.forwards_per_window)
        self.comparison.add(entry.comparison)
        self.slowest_rows = top_rows.slowest([*self.slowest_rows, *entry.slowest_rows])
        self.longest_rows = top_rows.longest([*self.longest_rows, *entry.longest_rows])


class Manifest:
    """The state of one output folder."""

    def __init__(self, output: str, fingerprint: Mapping[str, Any]) -> None:
        self.output, self._fingerprint = output, dict(fingerprint)

    def check(self, *, overwrite: bool) -> bool:
        """Looks at the output folder and writes nothing.

        Returns:
            Whether the job is finished already, so that nothing is left to do.

        Raises:
            InputError: the folder holds files of somebody else, or a job with other input, model or settings; names the first
                field that differs.
        """
        if storage.find_file(self.output.rstrip("/")) is not None:
            raise InputError("output", f"{self.output}, a file", "a folder")
        job = storage.join(self.output, _MANIFEST, _JOB)
        is_ours = storage.find_file(job) is not None
        self._require_no_foreign_parts(is_ours, overwrite)
        if overwrite or not is_ours:
            return False
        before = json.loads(storage.read_bytes(job))
        for field in sorted(before.keys() | self._fingerprint.keys()):
            old, new = before.get(field), self._fingerprint.get(field)
            if old != new:
                if field == "prompts.paths":
                    old, new = _only_in(old, new), _only_in(new, old)
                raise InputError(
                    field,
                    _short(new),
                    f"{_short(old)}, as in the job that {self.output} holds",
                    "Repeat those settings to resume it, name another output, or set overwrite=true.",
                )
        return storage.find_file(storage.join(self.output, _SUCCESS)) is not None

    def start(self, *, overwrite: bool) -> None:
        """Takes the folder for this job, after the files of an earlier one are deleted if so asked."""
        if overwrite:
            # First what says that rows are done: a kill in between must not make deleted rows look finished.
            storage.delete(storage.join(self.output, _SUCCESS))
            with ThreadPoolExecutor(storage.NUM_TRANSFER_THREADS) as threads:
                list(threads.map(storage.delete, self._entry_paths()))
            storage.delete(self.output)
        self._remove_half_written()
        path = storage.join(self.output, _MANIFEST, _JOB)
        storage.publish_bytes(path, (json.dumps(self._fingerprint, indent=1) + "\n").encode())

    def finished_units(self) -> dict[str, UnitEntry]:
        """The units that are done, by name."""
        paths = self._entry_paths()
        with ThreadPoolExecutor(storage.NUM_TRANSFER_THREADS) as threads:  # each is a request of its own on S3
            entries = [UnitEntry.from_json(data) for data in threads.map(storage.read_bytes, paths)]
        return {entry.unit: entry for entry in entries}

    def _entry_paths(self) -> list[str]:
        found = storage.list_folder(storage.join(self.output, _MANIFEST))
        return [info.path for info in found if Path(info.path).name.startswith(_UNIT)]

    def finish(self, report: Mapping[str, Any], page: str) -> None:
        """Publishes the report and its page, then the mark of success."""
        storage.publish_bytes(storage.join(self.output, PAGE), page.encode(errors="backslashreplace"))
        storage.publish_bytes(storage.join(self.output, REPORT), (json.dumps(report, indent=1) + "\n").encode())
        storage.publish_bytes(storage.join(self.output, _SUCCESS), b"")

    def report(self) -> dict[str, Any]:
        """The report of a finished job."""
        report: dict[str, Any] = json.loads(storage.read_bytes(storage.join(self.output, REPORT)))
        return report

    def _remove_half_written(self) -> None:
        """Killed writers on a local disk leave hidden temporary files, which nobody reads; S3 has none."""
        if not storage.is_s3(self.output):
            for folder in ("", "_errors", _MANIFEST):
                for path in Path(self.output, folder).glob(".*.tmp"):
                    path.unlink(missing_ok=True)

    def _require_no_foreign_parts(self, is_ours: bool, overwrite: bool) -> None:
        """Other files may lie in the folder as long as nobody could take them for results, or would delete them."""
        start = len(self.output.rstrip("/")) + 1
        for info in storage.list_folder(self.output):
            is_own = info.path[start:].startswith(_OWN_NAMES)
            if (is_own and not is_ours) or (overwrite and not is_own):
                found = f"{info.path}, which no job of this kind has written"
                raise InputError("output", found, "a new folder, or the output of an earlier job", "Name another one.")


def publish_entry(output: str, entry: UnitEntry) -> None:
    """Marks a unit as done, after its files are published."""
    path = storage.join(output, _MANIFEST, f"{_UNIT}{entry.unit}.json")
    storage.publish_bytes(path, json.dumps(asdict(entry)).encode())


def fingerprint(
    files: tuple[PromptFile, ...], model: str, prompts: PromptSettings, decoding: DecodingSettings, uses_gpu: bool
) -> dict[str, Any]:
    """Everything that a row's answer depends on, as flat fields that a resumed job must have in common with its beginning."""
    return {
        "format": 3,
        "prompts.paths": [[file.path, file.size, file.version] for file in files],
        **{f"prompts.{name}": value for name, value in _plain(prompts).items() if name != "paths"},
        "model": identify_model(model),
        **{f"decoding.{name}": value for name, value in _plain(decoding).items() if name not in _FREE_DECODING_FIELDS},
        "actors.num_gpus": "some" if uses_gpu else "none",  # the floats differ
    }


def identify_model(folder: str) -> str:
    """A digest of a model folder: small files whole, of large ones the size and evenly spread samples; on S3, the versions.

    Checkpoints of one training run have the same sizes, so sizes alone do not tell them apart; reading them whole takes minutes.
    """
    digest = hashlib.sha256()
    for info in storage.list_folder(folder):
        name = Path(info.path).name
        if not name.endswith((".json", ".safetensors", ".bin", ".model", ".jinja", ".txt")):
            continue
        digest.update(f"{name}:{info.size}\n".encode())
        if storage.is_s3(folder):
            digest.update(info.version.encode())  # made from the content
            continue
        with storage.open_read(info.path) as file:
            for start in _sample_starts(info.size):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _sample_starts(size: int) -> list[int]:
    if size <= _SAMPLE_BYTES * _NUM_SAMPLES:
        return list(range(0, size, _SAMPLE_BYTES))
    return [(size - _SAMPLE_BYTES) * index // (_NUM_SAMPLES - 1) for index in range(_NUM_SAMPLES)]


def _plain(settings: PromptSettings | DecodingSettings) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(settings.model_dump_json())
    return values


def _only_in(files: list[Any] | None, others: list[Any] | None) -> list[Any]:
    """What one listing of the input has and another does not, so that a message names the files that differ."""
    known = {tuple(file) for file in others or ()}
    return [file for file in files or () if tuple(file) not in known]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]} ... ({len(text)} characters)"
