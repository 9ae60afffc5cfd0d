"""A model that says what a script tells it and checks that the engine shows it the right tokens; and a byte tokenizer."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

VOCAB_SIZE = 64
MASK_ID = 63
END_ID = 1


class ByteTokenizer:
    """Ids 0..255 are bytes; larger ids are special and leave no text."""

    def decode(self, token_ids, skip_special_tokens: bool = True, clean_up_tokenization_spaces: bool = False) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class Script:
    """What the model says behind `prompt`, whose first token names the script.

    `confidence` is the softmax probability of each token, 1.0 for all that it does not name. Behind `tokens` the model says
    `filler`.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    confidence: tuple[float, ...] = ()
    filler: int = 2

    def token(self, index: int) -> int:
        return self.tokens[index] if index < len(self.tokens) else self.filler

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

    def __init__(self, scripts: list[Script]) -> None:
        super().__init__()
        self.scripts = {script.prompt[0]: script for script in scripts}
        assert len(self.scripts) == len(scripts)
        self.num_calls = 0

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, use_cache: bool, cache=None):
        self.num_calls += 1
        keys, values = input_ids[:, None, :, None].float(), position_ids[:, None, :, None].float()
        if cache is not None:
            keys, values = cache.update(keys, values, 0)
        num_rows, num_queries = input_ids.shape
        mask = attention_mask.expand(num_rows, -1, -1, -1)
        hidden_BQV = torch.zeros(num_rows, num_queries, VOCAB_SIZE)
        for row in range(num_rows):
            for query in range(num_queries):
                position = int(position_ids[row, query])
                visible = mask[row, 0, query]
                seen = keys[row, 0, visible, 0].long().tolist()
                assert sorted(values[row, 0, visible, 0].long().tolist()) == list(range(position + 1))
                if seen[0] in self.scripts:
                    self._say(self.scripts[seen[0]], seen, hidden_BQV[row, query])
        return Outputs(hidden_BQV)

    def _say(self, script: Script, seen: list[int], hidden_V: Tensor) -> None:
        num_clean = seen.index(MASK_ID) if MASK_ID in seen else len(seen)
        assert set(seen[num_clean:]) <= {MASK_ID}
        said = [script.token(index) for index in range(num_clean - len(script.prompt))]
        assert tuple(seen[:num_clean]) == (*script.prompt, *said)[:num_clean]
        index = len(seen) - len(script.prompt)
        if index >= 0:
            hidden_V[script.token(index)] = script.gap(index)
        # The model would love to say [MASK].
        hidden_V[MASK_ID] = 2000.0


@dataclass
class Outputs:
    last_hidden_state: Tensor


class ScriptedModel(nn.Module):
    """Looks like a causal language model of `transformers` as far as the engine looks."""

    def __init__(self, *scripts: Script, max_positions: int = 256) -> None:
        super().__init__()
        self.config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=VOCAB_SIZE,
            max_position_embeddings=max_positions,
            num_hidden_layers=1,
            attn_implementation="sdpa",
        )
        self.base_model = ScriptedBackbone(list(scripts))
        self.embedding = nn.Embedding(VOCAB_SIZE, 1)
        self.head = nn.Identity()
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.eval()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head
