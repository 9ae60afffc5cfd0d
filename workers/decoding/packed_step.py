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

import torch
from torch import Tensor

from workers.decoding.strategies.mars import RowQuery

# A row with more lanes than this, and more than all rows that decode, reads the cache alone.
_LANES_OF_SHORT_ROWS = 16
# A row that reads more places than this, and than four times those of its group, would make all of them read as many.
_PLACES_OF_SHORT_ROWS = 512
# Numbers of a row in the table that goes to the device.
_SLOT, _START, _NUM_REAL, _NUM_DRAFTS, _HAS_BRANCHES, _RUN_LENGTH, _FIRST, _BASE, _NUM_LANES = range(9)
_NUM_COLUMNS = 9


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
    firsts, num_tokens = [], 0
    for row in rows:
        firsts.append(num_tokens)
        num_tokens += row.num_lanes
    table, token_ids, bases = [], [], _output_bases(rows, members)
    for row, first, base in zip(rows, firsts, bases, strict=True):
        query = row.query
        table += [row.slot, row.start, query.num_real, query.num_drafts, query.has_branches, query.run_length or 1]
        table += [first, base, row.num_lanes]
        token_ids += query.token_ids
    by_slot = {row.slot: (first, row.num_lanes, row.start) for row, first in zip(rows, firsts, strict=True)}
    spans = [range(group[0].slot, group[-1].slot + 1) for group in members]
    seats = [number for span in spans for slot in span for number in by_slot.get(slot, (0, 0, 0))]
    sent = torch.tensor([*table, *token_ids, *seats], dtype=torch.int64).to(device, non_blocking=True)

    table_BC, token_N, seat_R3 = sent.split([len(table), num_tokens, len(seats)])
    table_BC = table_BC.view(len(rows), _NUM_COLUMNS)
    lanes = _Lanes.of(table_BC, num_tokens, max_length)
    groups, done = [], 0
    for group, span in zip(members, spans, strict=True):
        seats_R3 = seat_R3.view(-1, 3)[done : done + len(span)]
        done += len(span)
        num_lanes = max(row.num_lanes for row in group)
        num_places = max(row.start + row.num_lanes for row in group)
        index_RQ, masks = lanes.visible(seats_R3, num_lanes, num_places, windows)
        groups.append(Group(slice(span.start, span.stop), num_places, index_RQ, masks))
    return PackedStep(
        token_N=token_N,
        position_N=lanes.position_N,
        slot_N=lanes.of_rows(_SLOT),
        place_N=lanes.of_rows(_START) + lanes.lane_N,
        groups=groups,
        output_N=lanes.of_rows(_BASE) + lanes.lane_N,
        first_B=table_BC[:, _FIRST],
    )


@dataclass(frozen=True, eq=False)
class _Lanes:
    """The numbers of the visibility rule for each of the N tokens."""

    table_BC: Tensor
    row_N: Tensor
    lane_N: Tensor
    limit_N: Tensor
    own_N: Tensor
    position_N: Tensor

    @classmethod
    def of(cls, table_BC: Tensor, num_tokens: int, max_length: int) -> "_Lanes":
        every_N = torch.arange(num_tokens, device=table_BC.device)
        row_N = torch.repeat_interleave(table_BC[:, _NUM_LANES], output_size=num_tokens)
        _, start_N, num_real_N, num_drafts_N, has_branches_N, length_N, first_N, *_ = table_BC[row_N].unbind(dim=1)
        lane_N = every_N - first_N
        is_real_N = lane_N < num_real_N
        run_N = torch.div(lane_N - num_real_N, length_N, rounding_mode="floor")
        # Drafts before the point of acceptance that the run stands behind.
        num_accepted_N = torch.where(has_branches_N.bool(), run_N, num_drafts_N)
        limit_N = torch.where(is_real_N, lane_N + 1, num_real_N - num_drafts_N + num_accepted_N)
        own_N = torch.where(is_real_N, lane_N, num_real_N + run_N * length_N)
        offset_N = torch.where(is_real_N, lane_N, limit_N + lane_N - own_N)
        position_N = (start_N + offset_N).clamp(max=max_length - 1)
        return cls(table_BC, row_N, lane_N, limit_N, own_N, position_N)

    def of_rows(self, column: int) -> Tensor:
        return self.table_BC[:, column][self.row_N]

    def visible(
        self, seats_R3: Tensor, num_lanes: int, num_places: int, windows: Mapping[str, int | None]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The tokens of a group (R, Q), and for each layer type what they see (R, 1, Q, T).

        A lane without a token, and a slot without a row, see something, the first place at least: what comes out is not read.
        """
        first_R1, count_R1, start_R1 = seats_R3[:, :, None].unbind(dim=1)
        lane_Q = torch.arange(num_lanes, device=seats_R3.device)
        is_token_RQ = lane_Q < count_R1
        index_RQ = torch.where(is_token_RQ, first_R1 + lane_Q, 0)
        offset_R1T = (torch.arange(num_places, device=seats_R3.device) - start_R1)[:, None]
        limit_RQ1, own_RQ1 = self.limit_N[index_RQ][..., None], self.own_N[index_RQ][..., None]
        is_own_RQT = (offset_R1T >= own_RQ1) & (offset_R1T <= lane_Q[:, None])
        visible_RQT = (offset_R1T < limit_RQ1) | is_own_RQT
        masks = {}
        for layer_type, window in windows.items():
            seen_RQT = visible_RQT
            if window is not None:
                position_RQ = self.position_N[index_RQ]
                key_RT = self._key_positions(start_R1, position_RQ, is_token_RQ, num_places)
                # Padding keeps what it sees, so that its row of the softmax is not empty.
                is_near_RQT = key_RT[:, None] > position_RQ[..., None] - window
                seen_RQT = visible_RQT & (is_near_RQT | ~is_token_RQ[..., None])
            masks[layer_type] = seen_RQT[:, None]
        return index_RQ, masks

    def _key_positions(self, start_R1: Tensor, position_RQ: Tensor, is_token_RQ: Tensor, num_places: int) -> Tensor:
        """The position of the token in each place: the place itself, but for placeholders in branches."""
        num_rows, num_lanes = position_RQ.shape
        place_RT = torch.arange(num_places + 1, device=start_R1.device).repeat(num_rows, 1)
        lane_Q = torch.arange(num_lanes, device=start_R1.device)
        place_RQ = torch.where(is_token_RQ, start_R1 + lane_Q, num_places)
        return place_RT.scatter(1, place_RQ, position_RQ)[:, :num_places]


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
