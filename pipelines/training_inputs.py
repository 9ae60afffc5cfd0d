"""What a training run starts from: SFT shards and a model folder, both checked first, both made when the user has none."""

import logging
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.paths import resolve
from pipelines.quickstart_task import write_quickstart_data
from pipelines.run_folder import RunFolder
from pipelines.sft_source import inspect_shards, iterate_texts
from pipelines.tokenizer_training import create_model_folder, train_tokenizer
from workers.chat import check_prompt_format
from workers.config import DataSettings, ModelSettings
from workers.errors import InputError
from workers.models.folder import (
    MultiTokenSettings,
    inspect_model_folder,
    load_tokenizer,
    read_multi_token_settings,
)
from workers.models.gguf import convert_gguf, describe_gguf, is_gguf
from workers.models.loading import check_flex_attention, check_loadable
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
        return replace(self, folder=folder, adds_mask_row=False, has_trained_placeholder=stage == "mars")


class TrainingInputs:
    """Data and start model of one run."""

    def __init__(self, model: ModelSettings, data: DataSettings, seed: int, run: RunFolder) -> None:
        self._model, self._seed, self._run = model, seed, run
        self._is_example = not data.train
        shards = (run.join("example", "train"),) if self._is_example else tuple(resolve(path) for path in data.train)
        self._data = data.model_copy(update={"train": shards})

    def check(self) -> None:
        """Looks at shards and model folder without writing anything.

        Raises:
            InputError: names the shard, the column, the setting or the file of the model folder.
        """
        if not self._is_example:
            for shard in inspect_shards(self._data):
                self._run.require_outside("data.train", shard.path)
        if self._model.path is not None:
            self._run.require_outside("model.path", resolve(self._model.path))
            self._check_model(resolve(self._model.path))

    def materialize(self) -> tuple[StartModel, DataSettings]:
        """The start model and the settings of the data, both on disk now."""
        if (
            self._is_example and not Path(self._run.join("example", "heldout")).exists()
        ):  # written after the training shards
            write_quickstart_data(self._run.join("example"), seed=self._seed)
        path = None if self._model.path is None else resolve(self._model.path)
        if path is not None and not is_gguf(path):
            return self._start_model(path), self._data
        folder = self._run.join("initial_model")
        if path is not None and not Path(folder).exists():
            convert_gguf(path, folder)
            _logger.info("%s as an ordinary model folder in %s", path, folder)
        if not Path(folder).exists():
            scratch = self._model.from_scratch
            tokenizer = train_tokenizer(
                iterate_texts(self._data), vocab_size=scratch.vocab_size, max_positions=scratch.max_positions
            )
            create_model_folder(scratch, tokenizer, folder, seed=self._seed)
            _logger.info("new model and a tokenizer of %d tokens in %s", len(tokenizer), folder)
        return self._start_model(folder), self._data

    def _check_model(self, path: str) -> None:
        if not is_gguf(path):
            self._start_model(path)
            return
        with tempfile.TemporaryDirectory(prefix="marsray-gguf-") as parent:
            folder = str(Path(parent) / Path(path).name)  # named in what is refused
            describe_gguf(path, folder)
            self._start_model(folder, has_weights=False)

    def _start_model(self, folder: str, *, has_weights: bool = True) -> StartModel:
        if has_weights:
            check_loadable(folder)
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
