"""What a training run starts from: SFT shards and a model folder, both checked first, both made when the user has none."""

import logging
import os
import tempfile
from dataclasses import dataclass, replace
from typing import Any

from pipelines import model_folders, storage
from pipelines.paths import resolve
from pipelines.quickstart_task import write_quickstart_data
from pipelines.run_folder import RunFolder
from pipelines.sft_source import inspect_shards, iterate_texts, list_sources
from pipelines.tokenizer_training import create_model_folder, train_tokenizer
from workers.chat import check_prompt_format
from workers.config import DataSettings, LoraSettings, ModelSettings
from workers.errors import InputError
from workers.models.folder import (
    MultiTokenSettings,
    inspect_model_folder,
    load_tokenizer,
    read_multi_token_settings,
)
from workers.models.gguf import convert_gguf, describe_gguf, is_gguf
from workers.models.loading import check_flex_attention, check_loadable
from workers.models.lora import check_lora
from workers.models.placeholder import find_placeholder

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartModel:
    """The model folder that a stage begins with."""

    folder: str
    mask_token_id: int
    end_ids: frozenset[int]
    adds_mask_row: bool
    has_trained_placeholder: bool

    def after(self, stage: str, folder: str) -> "StartModel":
        """The model that a finished stage has published."""
        return replace(
            self,
            folder=folder,
            adds_mask_row=False,
            has_trained_placeholder=self.has_trained_placeholder or stage == "mars",
        )


class TrainingInputs:
    """Data and start model of one run."""

    def __init__(
        self, model: ModelSettings, data: DataSettings, seed: int, run: RunFolder, *, lora: LoraSettings | None = None
    ) -> None:
        self._model, self._seed, self._run, self._lora = model, seed, run, lora
        self._is_example = not data.train
        shards = (
            (run.join("example", "train"),)
            if self._is_example
            else tuple(resolve(path, "data.train") for path in data.train)
        )
        held_out = tuple(resolve(path, "data.held_out") for path in data.held_out)
        self._data = data.model_copy(update={"train": shards, "held_out": held_out})

    def check(self) -> None:
        """Looks at shards and model folder without writing anything.

        Raises:
            InputError: names the shard, the column, the setting or the file of the model folder.
        """
        shards = () if self._is_example else inspect_shards(self._data, log_differences=True)
        for path in () if self._is_example else (*self._data.train, *(shard.path for shard in shards)):
            self._run.require_outside("data.train", path)
        if shards:
            list_sources(self._data.train, self._data.weights)
        if self._data.held_out:
            self._check_held_out({storage.real_path(shard.path) for shard in shards})
        if self._model.path is not None:
            self._run.require_outside("model.path", resolve(self._model.path, "model.path"))
            self._check_model(resolve(self._model.path, "model.path"))

    def _check_held_out(self, trained: set[str]) -> None:
        for shard in inspect_shards(self._data, self._data.held_out, "data.held_out"):
            self._run.require_outside("data.held_out", shard.path)
            if storage.real_path(shard.path) in trained:
                raise InputError(
                    "data.held_out", f"{shard.path}, which data.train names too", "shards that are never trained on"
                )

    def materialize(self) -> tuple[StartModel, DataSettings]:
        """The start model and the settings of the data, both in place now."""
        if self._is_example:
            self._write_example()
        path = None if self._model.path is None else resolve(self._model.path, "model.path")
        if path is not None and not is_gguf(path):
            return self._start_model(path), self._data
        folder = self._run.join("initial_model")
        if not model_folders.exists(folder):
            with model_folders.staged(folder) as unpublished:
                self._make_model(path, unpublished)
        return self._start_model(folder), self._data

    def _make_model(self, gguf_path: str | None, folder: str) -> None:
        if gguf_path is not None:
            convert_gguf(model_folders.fetch(gguf_path), folder)
            _logger.info("%s as an ordinary model folder", gguf_path)
            return
        scratch = self._model.from_scratch
        tokenizer = train_tokenizer(
            iterate_texts(self._data), vocab_size=scratch.vocab_size, max_positions=scratch.max_positions
        )
        create_model_folder(scratch, tokenizer, folder, seed=self._seed)
        _logger.info("new model and a tokenizer of %d tokens", len(tokenizer))

    def _write_example(self) -> None:
        folder = self._run.join("example")
        if storage.exists(storage.join(folder, "heldout")):  # written after the training shards
            return
        if not storage.is_s3(folder):
            write_quickstart_data(folder, seed=self._seed)
            return
        with tempfile.TemporaryDirectory(prefix="marsray-example-") as unpublished:
            written = write_quickstart_data(unpublished, seed=self._seed)
            last = [os.path.relpath(path, unpublished) for path in written.heldout_paths]
            storage.publish_folder(unpublished, folder, last=last)

    def _check_model(self, path: str) -> None:
        if not is_gguf(path):
            self._start_model(path)
            return
        with tempfile.TemporaryDirectory(prefix="marsray-gguf-") as parent:
            folder = os.path.join(parent, os.path.basename(path))  # named in what is refused
            describe_gguf(model_folders.fetch(path), folder)
            self._inspect(folder, has_weights=False)

    def _start_model(self, path: str) -> StartModel:
        with model_folders.facts(path) as folder:
            return replace(self._inspect(folder), folder=path)

    def _inspect(self, folder: str, *, has_weights: bool = True) -> StartModel:
        if has_weights:
            check_loadable(folder)
        if self._lora is not None:
            check_lora(self._lora, folder)
        if self._model.attention == "flex":
            check_flex_attention(folder)
        facts = inspect_model_folder(folder)
        tokenizer = load_tokenizer(folder)
        check_prompt_format(tokenizer, self._data.prompt_format, "data.prompt_format")
        if facts.max_positions is not None and self._data.max_length > facts.max_positions:
            raise InputError(
                "data.max_length",
                str(self._data.max_length),
                f"at most {facts.max_positions}, the positions of the model in {folder}",
            )
        earlier = read_multi_token_settings(folder, facts.vocab_size)
        if earlier is not None:
            self._refuse_another_placeholder(earlier, tokenizer, folder)
            return StartModel(folder, earlier.mask_token_id, facts.end_ids, False, earlier.block_size > 1)
        placeholder = find_placeholder(
            tokenizer, facts.vocab_size, mask_token=self._model.mask_token, add_mask_row=self._model.add_mask_row
        )
        return StartModel(folder, placeholder.token_id, facts.end_ids, placeholder.added_row, False)

    def _refuse_another_placeholder(self, earlier: MultiTokenSettings, tokenizer: Any, folder: str) -> None:
        wanted = self._model.mask_token
        if wanted != "auto" and tokenizer.convert_tokens_to_ids(wanted) != earlier.mask_token_id:
            raise InputError(
                "model.mask_token",
                repr(wanted),
                f"id {earlier.mask_token_id} or `auto`: {folder} has been trained with that placeholder",
            )
