"""Transformer layers of each pipeline stage, where they are not shared evenly.

    [[0,1],[1,1]*4,[1,0]]     one row per pipeline rank, one column per model chunk; *n repeats
    5,6,6,5                   one chunk per rank

Both become Megatron's layout string (``--pipeline-model-parallel-layout``), in which stage c p + r
is chunk c of rank r: ``Ettttt|tttttt|tttttt|tttttL``. The embedding is on the first stage, the
layers of multi-token prediction and the loss on the last.
"""

from __future__ import annotations

import re

Layers = tuple[tuple[int, ...], ...]
"""Layers of each chunk of each pipeline rank: ``layers[rank][chunk]``."""

MOST_RANKS = 100_000
_LIST = re.compile(r"\s*\d{1,6}\s*(,\s*\d{1,6}\s*)*")
_ROW = re.compile(r"\s*\[(\s*\d{1,6}\s*(?:,\s*\d{1,6}\s*)*)\]\s*(?:\*\s*(\d{1,6})\s*)?(,|\Z)")


def parse_list(text: str) -> Layers:
    """``5,6,6,5`` as layers of 4 ranks.

    Raises:
        ValueError: the text is no such list; says what is expected.
    """
    if not _LIST.fullmatch(text):
        raise ValueError(
            f"{text}: whole numbers with commas are expected, one per pipeline rank, as in 5,6,6,5"
        )
    return tuple((int(part),) for part in text.split(","))


def parse_matrix(text: str) -> Layers:
    """``[[0,1],[1,1]*4,[1,0]]`` as layers of 6 ranks with 2 chunks.

    Raises:
        ValueError: the text is no such matrix; says what is expected and where it ends.
    """
    outside = text.strip()
    if not (outside.startswith("[") and outside.endswith("]")):
        raise ValueError(f"{text}: rows in brackets are expected, as in [[0,1],[1,1]*4,[1,0]]")
    inside, at = outside[1:-1].rstrip(), 0
    rows: list[tuple[int, ...]] = []
    while at < len(inside) or not rows:
        row = _ROW.match(inside, at)
        if row is None or (row[3] == "," and row.end() == len(inside)):
            place = inside[at : at + 20].strip() or "the end"
            raise ValueError(
                f"{text}: a row of whole numbers is expected at {place!r}, as in "
                "[[0,1],[1,1]*4,[1,0]]"
            )
        repeats = 1 if row[2] is None else int(row[2])
        if not 1 <= repeats <= MOST_RANKS - len(rows):
            raise ValueError(f"{text}: *{repeats} repeats a row; 1 to {MOST_RANKS} rows can be")
        rows += [tuple(int(number) for number in row[1].split(","))] * repeats
        at = row.end()
    widths = {len(row): index for index, row in reversed(list(enumerate(rows)))}
    if len(widths) > 1:
        wrong = max(widths.values())
        raise ValueError(
            f"{text}: row {wrong} has {len(rows[wrong])} chunks, row 0 has {len(rows[0])}: every "
            "rank has equally many"
        )
    return tuple(rows)


def problem_of(layers: Layers, ranks: int | None, num_layers: int | None) -> str:
    """The error message for a division among other ranks or of another model; empty if it fits."""
    if ranks is not None and len(layers) != ranks:
        return (
            f"has {len(layers)} ranks: --pipeline-model-parallel-size is {ranks}; give one entry "
            "per rank"
        )
    total = sum(map(sum, layers))
    if num_layers is not None and total != num_layers:
        return f"has {total} layers in all: --num-layers is {num_layers}; they must be the same"
    return ""


def layout(layers: Layers, mtp_num_layers: int = 0) -> str:
    """Megatron's layout string."""
    stages = ["t" * count for count in stage_layers(layers)]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * mtp_num_layers + "L"
    return "|".join(stages)


def stage_layers(layers: Layers) -> tuple[int, ...]:
    """Layers of each stage, in the order in which a micro-batch passes them."""
    return tuple(row[chunk] for chunk in range(len(layers[0])) for row in layers)


def stage_counts(layout: str) -> tuple[int, ...]:
    """Transformer layers of each stage of Megatron's layout string, ``Et*2|(tt|)*2,tL``."""
    return tuple(stage.count("t") for stage in spelt_out(layout).split("|"))


def spelt_out(layout: str) -> str:
    """Megatron's layout string without repetitions: ``Et*2|(t|)*2,L`` is ``Ett|t|t|L``."""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda found: found[1] * int(found[2]), layout.replace(",", ""))
    return layout


def evenly(num_layers: int, ranks: int, chunks: int = 1) -> Layers:
    """Divide as evenly as possible: the first stages have one layer more."""
    each, more = divmod(num_layers, ranks * chunks)
    return tuple(
        tuple(each + (chunk * ranks + rank < more) for chunk in range(chunks))
        for rank in range(ranks)
    )


def even_layout(num_layers: int, num_stages: int, mtp_layers: int = 0) -> str:
    """A layout in Megatron's notation: equally many layers in each stage.

    Args:
        num_layers: a multiple of the stages.
        num_stages: of all ranks.
        mtp_layers: layers of multi-token prediction, in the last stage.
    """
    stages = "|".join(["t" * (num_layers // num_stages)] * num_stages)
    return f"E{stages}{'m' * mtp_layers}L"
