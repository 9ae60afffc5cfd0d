"""A model that says what a script tells it and checks that the engine shows it the right tokens; and a byte tokenizer."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from workers.config import RowDecodingSettings
from workers.decoding.engine import DecodingEngine
from workers.decoding.packed_step import PackedStep
from workers.decoding.request import Request
from workers.decoding.slot_attention import StepContext

VOCAB_SIZE = 64
MASK_ID = 63
END_ID = 1
# What the model says, with certainty, behind a draft that is wrong. Nobody may ever read it.
CONFUSED_ID = 62


class ByteTokenizer:
    """Ids 0..255 are bytes; larger ids are special and leave no text."""

    def decode(self, token_ids, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool = False) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Script:
    """What the model says behind `prompt`, whose first token names the script.

    `confidence` is the softmax probability of each token, 1.0 for all that it does not name. Behind `tokens` the model says
    `filler`. Placeholders draft other tokens than these at the places of `wrong_drafts`.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    confidence: tuple[float, ...] = ()
    filler: int = 2
    wrong_drafts: frozenset[int] = frozenset()

    def token(self, index: int) -> int:
        return self.tokens[index] if index < len(self.tokens) else self.filler

    def draft(self, index: int) -> int:
        """What a placeholder says: at a wrong place a token that never stands in an answer."""
        return CONFUSED_ID - 1 if index in self.wrong_drafts else self.token(index)

    def gap(self, index: int) -> float:
        """How far the token's logit stands above the others."""
        confidence = self.confidence[index] if index < len(self.confidence) else 1.0
        if confidence == 1.0:
            return 1000.0
        # The mask id is no candidate, so the others are the vocabulary without the token and without [MASK].
        return float(torch.logit(torch.tensor(confidence, dtype=torch.float64))) + float(
            torch.log(torch.tensor(VOCAB_SIZE - 2.0))
        )


class ScriptedBackbone(nn.Module):
    """Its keys are token ids and its values positions, so it sees exactly what the engine makes visible."""

    def __init__(self, config: LlamaConfig, scripts: list[Script], last_position: int) -> None:
        super().__init__()
        self.config = config
        self.scripts = {script.prompt[0]: script for script in scripts}
        assert len(self.scripts) == len(scripts)
        self.last_position = last_position
        self.num_calls = 0
        self.most_query_tokens = 0

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        use_cache: bool,
        cache,
        decoding_step: StepContext | None = None,
    ):
        self.num_calls += 1
        states = (ids[:, None, :, None].float() for ids in (input_ids, position_ids))
        token_SHPD, position_SHPD = cache.update(*states, 0)
        num_tokens = input_ids.shape[1]
        hidden_1NV = torch.zeros(1, num_tokens, VOCAB_SIZE)
        # A look at the shapes of the layers, or a measurement: nothing that anybody reads.
        if decoding_step is None or (cache._places[1] == cache.trash_place).all():
            return Outputs(hidden_1NV)
        assert self.config._attn_implementation == "marsray_slots"
        self.most_query_tokens = max(self.most_query_tokens, num_tokens)
        layer_type = decoding_step.layer_type(attention_mask)
        for token, (slot, visible_T) in enumerate(seen_places(decoding_step.step, layer_type)):
            num_places = len(visible_T)
            tokens = token_SHPD[slot, 0, :num_places, 0][visible_T].long().tolist()
            positions = position_SHPD[slot, 0, :num_places, 0][visible_T].long().tolist()
            self._look(tokens, positions, int(position_ids[0, token]), hidden_1NV[0, token])
        return Outputs(hidden_1NV)

    def _look(self, tokens: list[int], positions: list[int], own_position: int, hidden_V: Tensor) -> None:
        in_order = sorted(zip(positions, range(len(tokens)), tokens, strict=True))
        expected = [min(position, self.last_position) for position in range(len(tokens))]
        assert [position for position, _, _ in in_order] == expected, "each position up to its own is seen once"
        assert own_position == expected[-1]
        seen = [token for _, _, token in in_order]
        if seen[0] in self.scripts and len(tokens) <= self.last_position + 1:
            self._say(self.scripts[seen[0]], seen, hidden_V)

    def _say(self, script: Script, seen: list[int], hidden_V: Tensor) -> None:
        num_real = seen.index(MASK_ID) if MASK_ID in seen else len(seen)
        assert set(seen[num_real:]) <= {MASK_ID}
        prompt, said = seen[: len(script.prompt)], seen[len(script.prompt) : num_real]
        assert tuple(prompt) == script.prompt[:num_real]
        # The model would love to say [MASK].
        hidden_V[MASK_ID] = 2000.0
        index = len(seen) - len(script.prompt)
        if index < 0:
            return
        is_right = True
        for place, token in enumerate(said):
            assert token in ((script.token(place), script.draft(place)) if is_right else (script.draft(place),))
            is_right = is_right and token == script.token(place)
        token = script.token(index) if num_real == len(seen) else script.draft(index)
        hidden_V[token if is_right else CONFUSED_ID] = script.gap(index)


def seen_places(step: PackedStep, layer_type: str) -> list[tuple[int, Tensor]]:
    """For each query token its slot and what it sees there (T), found on the way that attention goes."""
    found = []
    for group in step.groups:
        num_rows, num_lanes = group.index_RQ.shape
        for row in range(num_rows):
            for lane in range(num_lanes):
                slot, visible_T = group.slots.start + row, group.masks[layer_type][row, 0, lane]
                found.append((slot, visible_T, int(group.index_RQ[row, lane])))
    seen = []
    for token, place in enumerate(step.output_N.tolist()):
        slot, visible_T, index = found[place]
        assert index == token and slot == step.slot_N[token]
        seen.append((slot, visible_T))
    return seen


@dataclass
class Outputs:
    last_hidden_state: Tensor


class ScriptedModel(nn.Module):
    """Looks like a causal language model of `transformers` as far as the engine looks."""

    def __init__(self, *scripts: Script, last_position: int, max_positions: int = 256) -> None:
        super().__init__()
        self.config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=VOCAB_SIZE,
            max_position_embeddings=max_positions,
            num_hidden_layers=1,
            attn_implementation="sdpa",
        )
        self.base_model = ScriptedBackbone(self.config, list(scripts), last_position)
        self.embedding = nn.Embedding(VOCAB_SIZE, 1)
        self.head = nn.Identity()
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.eval()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def scripted_engine(*scripts: Script, **changes) -> DecodingEngine:
    """An engine whose model follows the scripts: 4 slots of 64 tokens, blocks of 8."""
    options = {"mask_token_id": MASK_ID, "end_ids": {END_ID}, "block_size": 8, "num_slots": 4, "max_length": 64}
    options |= changes
    model = ScriptedModel(*scripts, last_position=(options["max_length"] or 256) - 1)
    return DecodingEngine(model, ByteTokenizer(), **options)


def request_of(script: Script, row_id: str | int = "a", **changes) -> Request:
    """A request for a script's answer; tau 0.95 with the block size as its window, unless it says otherwise."""
    defaults = {} if "mode" in changes else {"mode": "tau"}
    return Request(row_id, script.prompt, RowDecodingSettings(**(defaults | changes)))
