"""The query tokens of a step without padding, one row behind the other, and who sees whom.

All layers but attention work on the N query tokens as they stand. For attention they form groups of rows in neighbouring slots, so
that each group reads the cache as a view; a row that has far more query tokens than others is a group of its own.

One rule says who sees whom. A row's query token stands in a lane 0, 1, ... and is written to place `start + lane` of the row's
slot. It sees all places before `start`, the first `limit` lanes, and the lanes from `own` up to itself. For a real token that is
plain causal attention; a placeholder sees the real tokens up to its point of acceptance and the placeholders of its own run. A
layer with a sliding window goes by positions, which repeat between runs.

Shapes: N query tokens of a step, B rows, C numbers of a row, R slots of a group, Q lanes of a group, T places that are read, G
query heads per key head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.decoding.strategies.mars import RowQuery

# A row with more lanes than this, and more than all rows that decode, reads the cache alone.
_LANES_OF_SHORT_ROWS = 16
# A row that reads more places than this, and than four times those of its group, would make all of them read as many.
_PLACES_OF_SHORT_ROWS = 512
Array = np.ndarray[Any, np.dtype[np.int64]]


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


@dataclass(eq=False)
class Group:
    """Rows in neighbouring slots. `index_RQ` names their tokens among the N; padding names any of them. `masks` says for each layer
    type what they see (R, 1, Q, T)."""

    slots: slice
    num_places: int
    index_RQ: Tensor
    masks: Mapping[str, Tensor]
    _folded: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def folded_mask(self, layer_type: str, num_heads: int) -> Tensor:
        """The mask (R, 1, G * Q, T) for queries whose G heads per key head stand one behind the other."""
        key = (layer_type, num_heads)
        if key not in self._folded:
            self._folded[key] = self.masks[layer_type].repeat(1, 1, num_heads, 1)
        return self._folded[key]


@dataclass(frozen=True, eq=False)
class PackedStep:
    """What the model needs of a step.

    Attributes:
        token_N, position_N: the query tokens.
        slot_N, place_N: where their keys and values go.
        groups: for attention.
        output_N: where each token's result stands among those of all groups, (R * Q) behind (R * Q).
        first_B: the place of each row's first token among the N.
    """

    token_N: Tensor
    position_N: Tensor
    slot_N: Tensor
    place_N: Tensor
    groups: list[Group]
    output_N: Tensor
    first_B: Tensor

    def first_of(self, places: Sequence[int]) -> Tensor:
        """`first_B` of some of the rows."""
        if len(places) == len(self.first_B):
            return self.first_B
        return self.first_B[torch.tensor(places, dtype=torch.int64).to(self.first_B.device, non_blocking=True)]


def pack_step(
    rows: Sequence[PlacedQuery], windows: Mapping[str, int | None], *, max_length: int, device: torch.device
) -> PackedStep:
    """Lays the rows of a step, in the order of their slots, behind one another. One transfer to the device.

    Args:
        rows: in ascending order of slots.
        windows: the sliding window of each layer type, None for full attention.
        max_length: positions of a slot; placeholders beyond, which nobody reads, stand at the last.
        device: of the model.
    """
    members = _group_rows(rows)
    lanes = _Lanes.of(rows, members, max_length)
    seats = [_Seats.of(group, lanes) for group in members]
    is_windowed = any(window is not None for window in windows.values())
    arrays = [lanes.token_N, lanes.position_N, lanes.slot_N, lanes.place_N, lanes.output_N, lanes.first_B]
    for group in seats:
        arrays += [group.index_RQ, group.place_RQ, group.limit_RQ, group.own_RQ]
        arrays += [group.position_RQ, group.key_positions()] if is_windowed else []
    sent = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).to(device, non_blocking=True)
    parts = iter(
        [part.view(array.shape) for part, array in zip(sent.split([a.size for a in arrays]), arrays, strict=True)]
    )
    token_N, position_N, slot_N, place_N, output_N, first_B = (next(parts) for _ in range(6))
    groups = []
    for group in seats:
        index_RQ, *rule = (next(parts) for _ in range(4))
        near = (next(parts), next(parts)) if is_windowed else None
        masks = _masks(group, rule, near, windows)
        groups.append(Group(group.slots, group.num_places, index_RQ, masks))
    return PackedStep(token_N, position_N, slot_N, place_N, groups, output_N, first_B)


@dataclass(frozen=True, eq=False)
class _Lanes:
    """The numbers of the visibility rule for each of the N tokens, on the host. `limit_N` and `own_N` are places of the slot."""

    token_N: Array
    position_N: Array
    slot_N: Array
    place_N: Array
    limit_N: Array
    own_N: Array
    output_N: Array
    first_B: Array

    @classmethod
    def of(cls, rows: Sequence[PlacedQuery], groups: Sequence[Sequence[PlacedQuery]], max_length: int) -> "_Lanes":
        num_lanes_B = np.array([row.num_lanes for row in rows])
        first_B = np.cumsum(num_lanes_B) - num_lanes_B
        table_BC = np.array(
            [
                [
                    row.slot,
                    row.start,
                    query.num_real,
                    query.num_drafts,
                    query.has_branches,
                    query.run_length or 1,
                    base,
                    first,
                ]
                for row, base, first in zip(rows, _output_bases(rows, groups), first_B, strict=True)
                for query in [row.query]
            ],
            dtype=np.int64,
        )
        columns = np.repeat(table_BC, num_lanes_B, axis=0).T
        slot_N, start_N, num_real_N, num_drafts_N, has_branches_N, length_N, base_N, first_N = columns
        lane_N = np.arange(len(slot_N)) - first_N
        is_real_N = lane_N < num_real_N
        run_N = (lane_N - num_real_N) // length_N
        # Drafts before the point of acceptance that the run stands behind.
        num_accepted_N = np.where(has_branches_N, run_N, num_drafts_N)
        limit_N = np.where(is_real_N, lane_N + 1, num_real_N - num_drafts_N + num_accepted_N)
        own_N = np.where(is_real_N, lane_N, num_real_N + run_N * length_N)
        position_N = np.minimum(start_N + np.where(is_real_N, lane_N, limit_N + lane_N - own_N), max_length - 1)
        return cls(
            token_N=np.array([token for row in rows for token in row.query.token_ids], dtype=np.int64),
            position_N=position_N,
            slot_N=slot_N,
            place_N=start_N + lane_N,
            limit_N=start_N + limit_N,
            own_N=start_N + own_N,
            output_N=base_N + lane_N,
            first_B=first_B,
        )


@dataclass(frozen=True, eq=False)
class _Seats:
    """The same for the lanes of a group of rows. A lane without a token, and a slot without a row, see the first place: what comes
    out is not read."""

    slots: slice
    num_places: int
    has_branches: bool
    is_token_RQ: np.ndarray[Any, np.dtype[np.bool_]]
    index_RQ: Array
    place_RQ: Array
    limit_RQ: Array
    own_RQ: Array
    position_RQ: Array

    @classmethod
    def of(cls, rows: Sequence[PlacedQuery], lanes: _Lanes) -> "_Seats":
        first_slot, num_slots = rows[0].slot, rows[-1].slot - rows[0].slot + 1
        count_R1 = np.zeros((num_slots, 1), dtype=np.int64)
        first_R1 = np.zeros((num_slots, 1), dtype=np.int64)
        seat_B = [row.slot - first_slot for row in rows]
        count_R1[seat_B, 0] = [row.num_lanes for row in rows]
        begin = int(np.searchsorted(lanes.slot_N, first_slot))
        first_R1[seat_B, 0] = begin + np.cumsum(count_R1[seat_B, 0]) - count_R1[seat_B, 0]
        lane_Q = np.arange(max(row.num_lanes for row in rows))
        is_token_RQ = lane_Q < count_R1
        index_RQ = np.where(is_token_RQ, first_R1 + lane_Q, 0)
        return cls(
            slots=slice(first_slot, first_slot + num_slots),
            num_places=max(row.start + row.num_lanes for row in rows),
            has_branches=any(row.query.has_branches for row in rows),
            is_token_RQ=is_token_RQ,
            index_RQ=index_RQ,
            place_RQ=np.where(is_token_RQ, lanes.place_N[index_RQ], 0),
            limit_RQ=np.where(is_token_RQ, lanes.limit_N[index_RQ], 1),
            own_RQ=np.where(is_token_RQ, lanes.own_N[index_RQ], 0),
            position_RQ=np.where(is_token_RQ, lanes.position_N[index_RQ], 0),
        )

    def key_positions(self) -> Array:
        """The position of the token in each place (R, T): the place itself, but for placeholders in branches."""
        key_RT = np.tile(np.arange(self.num_places), (len(self.index_RQ), 1))
        row_N, lane_N = np.nonzero(self.is_token_RQ)
        key_RT[row_N, self.place_RQ[row_N, lane_N]] = self.position_RQ[row_N, lane_N]
        return key_RT


def _masks(
    seats: _Seats, rule: Sequence[Tensor], near: tuple[Tensor, Tensor] | None, windows: Mapping[str, int | None]
) -> dict[str, Tensor]:
    """For each layer type what the lanes of a group see (R, 1, Q, T).

    Args:
        seats: the group.
        rule: the last place that a lane sees, its limit, and where its own run begins.
        near: positions of lanes (R, Q) and of places (R, T), for sliding windows.
        windows: of the layer types.
    """
    place_RQ1, limit_RQ1, own_RQ1 = (numbers_RQ[..., None] for numbers_RQ in rule)
    place_T = torch.arange(seats.num_places, device=place_RQ1.device)
    visible_RQT = place_T <= place_RQ1
    if seats.has_branches:  # else the own run begins where the limit ends
        visible_RQT = (place_T < limit_RQ1) | (visible_RQT & (place_T >= own_RQ1))
    masks = {}
    for layer_type, window in windows.items():
        seen_RQT = visible_RQT
        if window is not None and near is not None:
            position_RQ, key_RT = near
            seen_RQT = visible_RQT & (key_RT[:, None] > position_RQ[..., None] - window)
        masks[layer_type] = seen_RQT[:, None]
    return masks


def _group_rows(rows: Sequence[PlacedQuery]) -> list[list[PlacedQuery]]:
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


def _output_bases(rows: Sequence[PlacedQuery], groups: Sequence[Sequence[PlacedQuery]]) -> list[int]:
    """Where the results of each row begin when those of all groups stand behind one another."""
    bases, done = {}, 0
    for group in groups:
        num_lanes = max(row.num_lanes for row in group)
        for row in group:
            bases[row.slot] = done + (row.slot - group[0].slot) * num_lanes
        done += (group[-1].slot - group[0].slot + 1) * num_lanes
    return [bases[row.slot] for row in rows]
