"""Rows of a step that attend together: in neighbouring slots, so that their part of the cache is a view. Plain Python."""

from collections.abc import Sequence
from dataclasses import dataclass

from workers.decoding.strategies.mars import RowQuery

# A row with more lanes than this, and more than all rows that decode, reads the cache alone.
_LANES_OF_SHORT_ROWS = 16
# A row that reads more places than this, and than four times those of its group, would make all of them read as many.
_PLACES_OF_SHORT_ROWS = 512


@dataclass(frozen=True)
class PlacedQuery:
    """A row's query, the slot it stands in, and the place of its first token there."""

    slot: int
    start: int
    query: RowQuery

    @property
    def num_lanes(self) -> int:
        """Query tokens of the row."""
        return len(self.query.token_ids)


def group_rows(rows: Sequence[PlacedQuery]) -> list[list[PlacedQuery]]:
    """Rows of similar numbers of lanes in slots with few gaps between them; each long row alone."""
    shortest = min(row.num_lanes for row in rows)
    short = max(_LANES_OF_SHORT_ROWS, 2 * shortest)
    groups: list[list[PlacedQuery]] = []
    is_open = False
    for row in rows:
        if row.num_lanes > short:
            groups.append([row])
            is_open = False
        elif is_open and _is_dense(groups[-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
            is_open = True
    return groups


def _is_dense(group: Sequence[PlacedQuery], row: PlacedQuery) -> bool:
    """Whether a row is not much longer or shorter than a group, and at most a quarter of the slots up to the row's stand empty."""
    num_slots = row.slot - group[0].slot + 1
    if 4 * (num_slots - len(group) - 1) > num_slots:
        return False
    places = [each.start + each.num_lanes for each in (*group, row)]
    return max(places) <= max(_PLACES_OF_SHORT_ROWS, 4 * min(places))


def output_bases(rows: Sequence[PlacedQuery], groups: Sequence[Sequence[PlacedQuery]]) -> list[int]:
    """Where the results of each row begin when those of all groups stand behind one another."""
    bases, done = {}, 0
    for group in groups:
        num_lanes = max(row.num_lanes for row in group)
        for row in group:
            bases[row.slot] = done + (row.slot - group[0].slot) * num_lanes
        done += (group[-1].slot - group[0].slot + 1) * num_lanes
    return [bases[row.slot] for row in rows]
