"""Tiny text sets, a RoBERTa-like tokenizer and recipes for the tests of this folder."""

from pathlib import Path
from typing import Any

import numpy as np

from fedflat.core.rng import stream

LAYERS = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
# initial weights large enough that one token is seen in the logits
SIZES = {**LAYERS, "max_position_embeddings": 20, "initializer_range": 0.5}
TINY: dict[str, Any] = {"name": "roberta-base", "pretrained": False, "config": SIZES}
GOOD, BAD = ("fine", "moving", "bright"), ("dull", "flat", "noisy")
WORDS = ("a", "film", "story", "very", *GOOD, *BAD)
MARKS = ("<s>", "<pad>", "</s>", "<unk>")


def write(file: Path, columns: dict[str, list[Any]]) -> None:
    import datasets

    file.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict(columns).to_parquet(str(file))


def reviews(folder: Path, rows: int = 120) -> Path:
    """``sst2``: the label is the kind of its one adjective."""
    draw = stream(0, "reviews")
    labels = draw.integers(0, 2, rows).tolist()
    texts = [f"a very {(BAD, GOOD)[y][draw.integers(3)]} {('film', 'story')[draw.integers(2)]}" for y in labels]
    for split, part in (("train", slice(20, None)), ("validation", slice(0, 20))):
        write(folder / "sst2" / f"{split}.parquet", {"sentence": texts[part], "label": labels[part]})
    return folder / "sst2"


def pairs(folder: Path, rows: int = 60) -> Path:
    """``mrpc``: two sentences of one adjective each; the label says whether it is the same one."""
    draw = stream(0, "pairs")
    first, second = draw.integers(0, 3, rows), draw.integers(0, 3, rows)
    columns: dict[str, list[Any]] = {
        "sentence1": [f"a {GOOD[i]} film" for i in first], "sentence2": [f"a {GOOD[i]} story" for i in second],
        "label": (first == second).astype(np.int64).tolist(),
    }  # fmt: skip
    for split, part in (("train", slice(10, None)), ("validation", slice(0, 10))):
        write(folder / "mrpc" / f"{split}.parquet", {key: values[part] for key, values in columns.items()})
    return folder / "mrpc"


def plays(folder: Path, speakers: int = 6) -> Path:
    """``shakespeare``: everybody says their own two letters in turn."""
    speech = {f"S{i}": ("ab", "cd", "ef")[i % 3] * (170 + 40 * i) for i in range(speakers)}
    write(folder / "shakespeare" / "train.parquet", {"character_id": list(speech), "text": list(speech.values())})
    return folder / "shakespeare"


def tokenizer(folder: Path) -> Path:
    """A word-level tokenizer with RoBERTa's special ids: <s> 0, <pad> 1, </s> 2, <unk> 3, then ``WORDS``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tool = Tokenizer(models.WordLevel({word: i for i, word in enumerate(MARKS + WORDS)}, unk_token="<unk>"))
    tool.pre_tokenizer = pre_tokenizers.Whitespace()
    tool.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tool, cls_token="<s>", sep_token="</s>", **names).save_pretrained(folder)
    return folder


def recipe(dataset: Path, **changes: Any) -> dict[str, Any]:
    """Three noisy rounds of DP-FedAvg with weight decay on six clients."""
    return {
        "rounds": 3, "data": {"dataset": str(dataset), "clients": 6, "max_length": 10}, "model": TINY,
        "algorithm": {"name": "dp-fedavg"}, "local": {"steps": 2, "batch_size": 8, "lr": 0.1, "weight_decay": 0.01},
        "cohort": {"size": 6, "sampling": "fixed"}, "privacy": {"clip": 1.0, "noise_multiplier": 0.5},
        "engine": {"backend": "sequential"}, **changes,
    }  # fmt: skip
