"""A stop signal while the workers of a stage cannot hear of it. Stops that they hear of are in `test_training_kills`."""

import logging
import time

import pytest
import ray

from pipelines import training_stage
from pipelines.stop_board import start_stop_board
from pipelines.training_stage import _ask_to_stop
from workers.errors import Stopped


def test_a_stop_that_nobody_can_be_told_of_says_what_it_waits_for_and_ends(ray_session, caplog, monkeypatch):
    """It was a silent minute, until Ray ended the process."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(training_stage, "_PROMPT_SECONDS", 0.1)
    monkeypatch.setattr(training_stage, "_TOLD_SECONDS", 0.5)
    board = start_stop_board()
    board.__ray_call__.remote(lambda board: time.sleep(60))  # as silent as when Ray's own processes are gone
    with pytest.raises(Stopped, match="stopped by SIGTERM at once: the workers of mars cannot be told"):
        _ask_to_stop(board, "mars", "SIGTERM")
    assert "SIGTERM: waiting up to 0.5 s for the workers of mars to be told" in caplog.text
    ray.kill(board)
