"""The window of each row in each step: as the row says, or as the chooser of its mode does."""

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from workers.config import RowDecodingSettings
from workers.decoding.picks import RowPicks
from workers.decoding.request import allowed_window
from workers.decoding.scheduler import Turn
from workers.decoding.strategies.mars import RowQuery
from workers.decoding.window import ONE_TOKEN, Measure, StepCosts, WindowChoice, WindowChooser

logger = logging.getLogger(__name__)


class WindowPolicy:
    """Windows of all rows of an engine.

    Args:
        block_size: B of the checkpoint, the widest automatic window.
        measure: seconds of a step; called when the first automatic window is chosen.
        num_slots: most rows of a step.
        engine_seconds: of a step besides its forward, at present.
    """

    def __init__(self, block_size: int, measure: Measure, num_slots: int, engine_seconds: Callable[[], float]) -> None:
        self._block_size = block_size
        costs = StepCosts(measure, num_slots, most_lanes=block_size**2, engine_seconds=engine_seconds)
        self._choosers = {
            "verified": WindowChooser(block_size, costs, "verified"),
            "tau": WindowChooser(block_size, costs, "tau"),
        }
        self._warned_windows: set[int] = set()

    def window_of(self, decoding: RowDecodingSettings) -> int | Literal["auto"]:
        """W of a row as its settings say; warns, once for each, of one that the model was not trained with."""
        window = allowed_window(decoding, self._block_size)
        if window != "auto" and window > self._block_size and window not in self._warned_windows:
            self._warned_windows.add(window)
            logger.warning(
                "window %d is larger than the block size %d that the model was trained with", window, self._block_size
            )
        return window

    def choose(self, turns: Sequence[Turn]) -> list[WindowChoice]:
        """The window of each row of a step; the automatic ones of rows with the same wishes are the same."""
        num_picking = sum(turn.picks for turn in turns)
        for chooser in self._choosers.values():
            chooser.age()
        chosen: dict[tuple[str, bool | None], WindowChoice] = {}
        choices = []
        for turn in turns:
            window, decoding = turn.row.window, turn.row.request.decoding
            if not turn.picks:
                choices.append(ONE_TOKEN)
                continue
            if window == "auto":
                wishes = (decoding.mode, decoding.draft_branches)
                if wishes not in chosen:
                    chosen[wishes] = self._choosers[decoding.mode].choose(num_picking, decoding.draft_branches)
                choices.append(chosen[wishes])
            else:
                choices.append(WindowChoice(window, decoding.draft_branches is True))
            turn.row.forwards_per_window[choices[-1].name] += 1
        return choices

    def observe(self, turn: Turn, query: RowQuery, picks: RowPicks) -> None:
        """Learns from what became of the drafts of a row with an automatic window."""
        is_tau = turn.row.request.decoding.mode == "tau"
        num_drafts = query.run_length if is_tau else query.num_drafts
        if turn.row.window == "auto" and num_drafts:
            num_right = len(picks.token_ids) - 1 if is_tau else picks.num_accepted
            self._choosers["tau" if is_tau else "verified"].observe(num_drafts, num_right)
