"""Characters and words to ids."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedflat.core.checks import InputError
from fedflat.data.decoding import CHARACTERS, encode, pretrained, ready_windows, tokenize, windows


def spell(ids: torch.Tensor) -> str:
    return "".join("?"[:0] + (CHARACTERS[i - 1] if i else "\0") for i in ids.tolist())


def test_characters_round_trip_and_strangers_are_zero() -> None:
    assert len(set(CHARACTERS)) == len(CHARACTERS) == 80
    assert encode(CHARACTERS).tolist() == list(range(1, 81))
    assert encode("a$é\U0001f600b").tolist() == [encode("a")[0], 0, 0, 0, encode("b")[0]]
    assert encode("").shape == (0,)


@given(st.lists(st.tuples(st.text("ab \n$é", max_size=40), st.sampled_from("XYZ")), max_size=12), st.integers(1, 9))
@settings(deadline=None, max_examples=100)
def test_windows_tile_what_each_owner_says(speeches: list[tuple[str, str]], length: int) -> None:
    x, y, owners = windows([text for text, _ in speeches], [who for _, who in speeches], length)
    assert x.shape == y.shape == (len(owners), length) and x.dtype == y.dtype == torch.int64
    for owner in "XYZ":
        own = encode("\n".join(text for text, who in speeches if who == owner))
        mine = np.flatnonzero(owners == owner)
        assert len(mine) == max(len(own) - 1, 0) // length
        assert np.array_equal(x[mine].reshape(-1).numpy(), own[: len(mine) * length]), "no overlap, no gap"
        assert np.array_equal(y[mine].reshape(-1).numpy(), own[1 : len(mine) * length + 1]), "the next character"


def test_ready_windows_are_shifted_by_one() -> None:
    x, y = ready_windows(["abc", "def"], ["d", "g"])
    assert [spell(row) for row in x] == ["abc", "def"] and [spell(row) for row in y] == ["bcd", "efg"]
    with pytest.raises(InputError, match="of one length"):
        ready_windows(["abc", "de"], ["d", "g"])


def test_tokens_are_a_public_function_of_the_words() -> None:
    ids = tokenize(["The cat, the hat", "the", ""], length=6, vocabulary=1000)
    assert ids.shape == (3, 6) and ids.dtype == torch.int64
    the, cat, comma = ids[0, 0], ids[0, 1], ids[0, 2]
    assert the == ids[0, 3] == ids[1, 0] and len({int(the), int(cat), int(comma)}) == 3
    assert int(the) == 2 + 0x3C456DE6 % 998  # CRC-32 of "the", a published constant
    assert (ids[1, 1:] == 0).all() and (ids[2] == 0).all() and (ids[0, :5] >= 2).all()
    assert ids.max() < 1000


def test_pairs_are_separated_and_long_texts_cut() -> None:
    ids = tokenize([("a b", "c"), ("a", "b c")], length=4)
    assert ids[0, 2] == 1 and ids[1, 1] == 1 and not torch.equal(ids[0], ids[1])
    assert torch.equal(tokenize(["w " * 50], 4), tokenize(["w w w w"], 4))


def test_pretrained_tokenizer_from_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "sat"]))
    transformers.BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    ids, vocabulary, padding = pretrained([("the cat",), ("sat",)], str(tmp_path), 6)
    assert vocabulary == 8 and padding == 0
    assert ids.tolist() == [[2, 5, 6, 3, 0, 0], [2, 7, 3, 0, 0, 0]]
    assert pretrained([("the", "cat")], str(tmp_path), 6)[0].tolist() == [[2, 5, 3, 6, 3, 0]]


def test_missing_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InputError) as error:
        pretrained(["a"], str(tmp_path / "nothing"), 4)
    assert "data.tokenizer" in str(error.value) and "\n" not in str(error.value)
