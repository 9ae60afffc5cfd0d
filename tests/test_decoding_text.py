"""Stop strings over tokens that are parts of characters."""

from scripted_model import ByteTokenizer

from workers.decoding.text import decode, find_stop

TOKENIZER = ByteTokenizer()


def test_a_stop_string_of_several_bytes_counts_when_its_last_byte_is_there():
    tokens = list("ab€cd".encode())
    assert find_stop(TOKENIZER, tokens[:4], 4, ("€",)) is None
    match = find_stop(TOKENIZER, tokens, 5, ("€",))
    assert (match.num_tokens, match.text) == (5, "ab")


def test_the_token_that_completes_first_wins_and_the_text_ends_before_the_first_stop_string():
    tokens = list(b"one two three")
    assert find_stop(TOKENIZER, tokens, 13, ("three", "two th", "wo")).num_tokens == 7
    assert find_stop(TOKENIZER, tokens, 13, ("three", "two th", "wo")).text == "one t"
    match = find_stop(TOKENIZER, tokens, 13, ("o t", "ne"))
    assert (match.num_tokens, match.text) == (3, "o")


def test_a_cap_inside_a_character_leaves_text_that_can_be_written():
    text = decode(TOKENIZER, list("a😀".encode())[:3])
    assert text.startswith("a")
    assert text.encode("utf-8")
