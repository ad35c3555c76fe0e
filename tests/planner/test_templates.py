"""Words of layers, templates of blocks and their splice, on invented steps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.lazy import Lazy

holding = Lazy("mindspeed.planner.compose.held")
recording = Lazy("mindspeed.planner.count.recording")
splicing = Lazy("mindspeed.planner.compose.splice")
surroundings = Lazy("mindspeed.planner.compose.surroundings")
templates = Lazy("mindspeed.planner.compose.templates")
words = Lazy("mindspeed.planner.compose.words")


def word(text: str) -> tuple:
    """A layer for each letter; capitals are recomputed alone."""
    return tuple(words.Layer(one, 0, 1 if one.isupper() else 0) for one in text)


@pytest.mark.parametrize(
    ("long", "short", "units"),
    [
        ("a" * 32, "aaa", {"a": 29}),
        ("aa", "aa", {}),
        ("aaaabbbbbb", "aaabbb", {"a": 1, "b": 3}),
        ("ababababab", "abab", {"ab": 3}),
        ("AAAAAaaaaap", "AAAaaap", {"A": 2, "a": 2}),
    ],
)
def test_a_word_is_shortened_by_what_it_repeats(long, short, units):
    found = words.shortened(word(long), 1)
    assert found.word == word(short)
    assert found.units == {word(unit): times for unit, times in units.items()}
    for unit, longer in found.longer.items():
        assert Counter(longer) - Counter(found.word) == Counter(unit)


def test_a_stage_without_layers_has_no_last_one():
    names = [[part.name for part, _ in words.parts_of(op, ())] for op in "FB"]
    assert names == [["PRE"], ["BACK_POST"]]


@pytest.mark.parametrize("reach", [1, 2])
def test_a_shorter_word_has_the_neighbourhoods_of_the_longer_one(reach):
    chance = random.Random(3)
    for _ in range(100):
        long = word("".join(chance.choice("abA") * chance.randint(1, 6) for _ in range(4)))
        found = words.shortened(long, reach)
        assert words.windows(found.word, reach) == words.windows(long, reach)
        left_out = sum(len(unit) * times for unit, times in found.units.items())
        assert len(found.word) + left_out == len(long)


def test_backward_computes_a_group_again_before_its_layers():
    group = tuple(words.Layer("a", i, 2) for i in range(2)) + word("b")
    names = [(part.name, layer) for part, layer in words.parts_of("B", group)]
    again = [("AGAIN", 0), ("AGAIN", 1), ("BACK", 1), ("BACK", 0)]
    assert names == [("BACK_POST", 0), ("BACK", 2), *again, ("BACK_PRE", 0)]


PAIRED = [
    ("aaa", "bb", ["BOTH 0", "BOTH 1", "LAYER 2"]),
    ("aa", "bbbb", ["BOTH 0", "BOTH 1", "BACK 1", "BACK 0"]),
    ("", "b", ["BACK 0"]),
]


@pytest.mark.parametrize(("ahead", "behind", "layers"), PAIRED)
def test_layers_of_a_pair_that_have_no_partner_run_alone(ahead, behind, layers):
    found = words.parts_of_pair(word(ahead), word(behind))
    assert [f"{part.name} {layer}" for part, layer in found] == ["PRE 0", *layers, "POST 0"]


def test_shorter_chunks_have_the_same_layers_side_by_side():
    def beside(ahead, behind):
        near = [[words.window(x, at, 1) for at in range(len(x))] for x in (ahead, behind)]
        return {*zip(near[0], reversed(near[1]), strict=False)}

    chance, shorter = random.Random(5), 0
    for _ in range(100):
        chunks = [
            word("d" * chance.choice([0, 0, 2]) + "a" * chance.randint(1, 9)) for _ in range(2)
        ]
        found = [one.word for one in words.shortened_alike(chunks, 1, [(0, 1), (1, 0)])]
        assert len({len(a) - len(b) for a, b in zip(chunks, found, strict=True)}) == 1
        assert beside(*found) >= beside(*chunks)
        assert beside(*reversed(found)) >= beside(*reversed(chunks))
        shorter += found != chunks
    assert shorter > 20


@pytest.mark.parametrize(
    ("behind", "layers"), [("bba", ["", "aa", "bb", "b", ""]), ("a", ["", "aa", "b", ""])]
)
def test_layers_of_a_pair_depend_on_those_of_both_chunks(behind, layers):
    place = recording.Place
    row = [place("F", 0, 0), place("F", 1, 0), place("F", 0, 1), place("B", 1, 0, True)]
    chunks = [word("ab"), word(behind)]
    found = templates.Templates({}, surroundings.place_in_row, 0)
    keys = [key for action, key in found.keys(row, chunks) if action == 3 and key.op]
    assert ["".join(one.kind for one in key.layers) for key in keys] == layers
    assert {key.ahead for key in keys} == {(0, surroundings.turns_of(row)[2])}


LAYER, GRADIENT, HIDDEN = 100, 40, 10


def step(layers: int, batches: int, odd: int = 0, left: int = 0):
    """A step without a pipeline: layers keep bytes until backward.

    Args:
        layers: layers of the model.
        batches: micro-batches.
        odd: added to what the second layer of the second micro-batch keeps.
        left: bytes that a micro-batch keeps until the end of the step.
    """
    Part = recording.Part
    row = tuple(recording.Place(op, 0, n) for n in range(batches) for op in "FB")
    blocks = []
    for action, part, layer in words.blocks_of(row, [word("a" * layers)]):
        number = row[action].micro_batch if action >= 0 else -1
        extra = odd if (layer, number) == (1, 1) else 0
        deltas = {
            Part.LAYER: [LAYER + extra, HIDDEN, -HIDDEN],
            Part.BACK: [GRADIENT, -LAYER - extra, -GRADIENT],
            Part.PRE: [HIDDEN],
            Part.BACK_PRE: [-HIDDEN],
            Part.POST: [left] if left else [],
            Part.END: [layers, -layers] + ([-left * batches] if left else []),
            Part.BACK_POST: [1] * layers + [-1] * layers,
        }.get(part, [])
        kinds = ["activations"] * len(deltas)
        flops = 7 if part is Part.LAYER else 0
        blocks.append(recording.Block(action, part, layer, deltas, kinds, flops))
    total = Counter[str]()
    return recording.Recording(row, tuple(blocks), (layers,), total, 0, 0, 0, total)


def peak_of(one) -> int:
    """Most bytes alive."""
    return recording.top_of(delta for block in one.blocks for delta in block.deltas)


def templates_of(one, layers: int):
    """Templates of an invented step."""
    return templates.Templates.of(one, [word("a" * layers)], surroundings.messages_near, 1)


def spliced(layers: int, batches: int, **given: int):
    """A step spliced from one of three layers and three micro-batches, and one of four layers."""
    small, longer = (templates_of(step(n, 3, **given), n) for n in (3, 4))
    growth = templates.Growth(small, longer, (layers - 3,), 1)
    row = step(1, batches).row
    return splicing.splice(small.grown([growth]), row, [word("a" * layers)], 3)


@pytest.mark.parametrize("left", [0, 5])
@pytest.mark.parametrize(("layers", "batches"), [(3, 3), (7, 3), (9, 6)])
def test_spliced_steps_are_whole_ones(layers, batches, left):
    found, whole = spliced(layers, batches, left=left), step(layers, batches, left=left)
    assert found.peak == peak_of(whole)
    assert found.at_peak.total() == found.peak
    assert found.flops == sum(block.flops for block in whole.blocks)
    assert found.net == left * (batches - 3)
    assert [kinds.total() for kinds in found.kinds_after()] == found.after
    assert len(found.after) == len(found.tops) == len(found.row)


def timed(layers: int, waits: float = 0.0):
    """A step that takes 1 s in each layer, 2 s after them and 5 s for each layer before it begins.

    Args:
        layers: layers of the model.
        waits: seconds for which the device waits for the host in the last micro-batch.
    """
    Part = recording.Part
    seconds = {Part.LAYER: 1.0, Part.BACK: 1.0, Part.POST: 2.0, Part.HEAD: 5.0 * layers}
    one = step(layers, 3)
    for block in one.blocks:
        late = waits if block.action == 4 and (block.part, block.layer) != (Part.LAYER, 0) else 0.0
        block.seconds = seconds.get(block.part, 0.0) + (late if block.seconds or late else 0.0)
    return one


@pytest.mark.parametrize("layers", [4, 9])
def test_what_a_short_step_waits_for_the_host_does_not_grow(layers):
    small, longer = templates_of(timed(3, waits=0.5), 3), templates_of(timed(4), 4)
    grown = small.grown([templates.Growth(small, longer, (layers - 3,), 1)])
    whole = timed(layers)
    found = splicing.splice(grown, whole.row, [word("a" * layers)], 3)
    of_forward = sum(x.seconds for x in whole.blocks if x.part.value in ("pre", "layer", "post"))
    assert found.closing_seconds == pytest.approx(5 * layers)
    assert found.seconds["F", 0] == pytest.approx(of_forward / 3)


def test_repetitions_that_differ_are_refused_with_both():
    with pytest.raises(
        templates.NotSpliceable, match=r"layer of F.*a-a-a: \+103 .*\+100 .*actions 2 and 4"
    ):
        templates_of(step(3, 5, odd=3), 3)


def test_steps_that_are_not_those_of_their_layers_are_refused():
    with pytest.raises(templates.NotSpliceable, match=r"post 0 in action 0 .* layer 3 in action 0"):
        templates_of(step(3, 3), 4)


def test_a_block_that_does_not_grow_by_repetition_is_refused():
    small, longer = (templates_of(step(n, 3), n) for n in (3, 4))
    key = next(key for key in longer.found if key.part is recording.Part.PRE)
    one = longer.found[key]
    longer.found[key] = type(one)((), (), 0, 0, 0, 0)
    with pytest.raises(templates.NotSpliceable, match=r"pre of F.*\+10 bytes become no"):
        small.grown([templates.Growth(small, longer, (2,), 1)])


def test_a_block_that_was_not_recorded_is_refused():
    row = [recording.Place(op, 0, n) for op in "FB" for n in range(3)]
    with pytest.raises(templates.NotSpliceable, match="not in the small run"):
        splicing.splice(templates_of(step(3, 3), 3), row, [word("aaa")], 3)


def test_bytes_that_a_step_leaves_are_refused():
    found = templates_of(step(3, 3), 3)
    key = next(key for key in found.found if key.part is recording.Part.END)
    one = found.found[key]
    found.found[key] = type(one)((1,), ("activations",), 1, 1, 0, 0)
    with pytest.raises(templates.NotSpliceable, match=r"\+1 bytes are left"):
        splicing.splice(found, step(3, 3).row, [word("aaa")], 3)


def test_parts_of_the_step_are_those_of_the_whole_rank():
    found, part = templates_of(step(3, 3), 3), recording.Part.UPDATE
    found.replace_steps([recording.Block(-1, part, 0, [500, -500], ["temporary"] * 2)])
    assert splicing.splice(found, step(3, 3).row, [word("aaa")], 3).peak == 500


def test_what_replicas_divide_is_interpolated():
    from mindspeed.planner.compose.rank import with_replicas

    def of(shard: int):
        update = recording.Block(-1, recording.Part.UPDATE, 0, [shard, -shard], ["temporary"] * 2)
        one = step(3, 3)
        blocks = [update if block.part is update.part else block for block in one.blocks]
        return replace(one, blocks=tuple(blocks), static=Counter(weights=5, optimizer=shard))

    few, more = of(96), of(48)
    more = replace(more, blocks=tuple(x for x in more.blocks if x.part is recording.Part.UPDATE))
    found = with_replicas(few, few, more, (1 / 4 - 1) / (1 / 2 - 1))  # four times as many
    assert (found.static, found.blocks) == (of(24).static, of(24).blocks)


def test_what_a_middle_rank_has_alone_grows_as_what_equals_it():
    found = templates_of(step(3, 3), 3)
    longer = templates_of(step(4, 3), 4)
    growth = templates.Growth(found, longer, (2,), 1)
    key = next(key for key in found.found if key.part is recording.Part.BACK_POST)
    other = key._replace(around=(None,))
    assert growth.pair(other, found.found[key]) == (found.found[key], longer.found[key])
    changed = replace(found.found[key], deltas=(7,))
    with pytest.raises(templates.NotSpliceable, match="how it grows with the layers"):
        growth.pair(other, changed)


def test_recordings_survive_json():
    import json

    one = step(2, 2, left=3)
    one.blocks[1].sent[recording.Message("DATA_PARALLEL_GROUP", 4, "all_reduce")] = (
        recording.Traffic(1, 8, 12, 0.5)
    )
    again = recording.recording_of(json.loads(json.dumps(recording.json_of(one))))
    assert again == one and again.shared == one.shared


def rows_of(ranks: int, count: int) -> Sequence:
    """1F1B rows."""
    from mindspeed.pipeline.schedule.schedules import ScheduleRequest
    from mindspeed.planner.count.recording import row_of

    return [row_of(ScheduleRequest(), ranks, 1, count, rank) for rank in range(ranks)]


def test_few_ranks_cover_the_rows_of_many():
    from types import SimpleNamespace

    from mindspeed.pipeline.schedule.placement import Placement
    from mindspeed.pipeline.schedule.schedules import ScheduleRequest
    from mindspeed.planner.compose import short_rows

    shape = SimpleNamespace(
        request=ScheduleRequest(), ranks=16, chunks=1, placement=Placement.loop(16)
    )
    for rank, row in enumerate(rows_of(16, 64)):
        wanted = short_rows.seen_in_1f1b(row)
        size = short_rows.fewest(shape, wanted, short_rows.seen_in_1f1b, rank == 0, rank == 15)
        ranks, small, count = size
        assert ranks <= 5 and count <= 8
        assert short_rows.seen_in_1f1b(row) <= short_rows.seen_in_1f1b(rows_of(ranks, count)[small])
        assert (small == 0, small == ranks - 1) == (rank == 0, rank == 15)


def template(deltas: tuple, messages: tuple = ()):
    kinds = ("activations",) * len(deltas)
    one = templates.Template(deltas, kinds, sum(deltas), 0, 0, 0, messages=messages)
    return replace(one, top=recording.top_of(deltas))


def test_layers_free_the_messages_of_their_row():
    one, both = template((9, -5, -7, 2), (1,)), ((-5, "activations"), (-6, "temporary"))
    found = templates.freeing(one, both, None)
    assert (found.deltas, found.messages) == ((9, -5, -6, -7, 2), (1, 2))
    assert (found.kinds[2], found.net, found.top) == ("temporary", -7, 9)
    assert templates.freeing(one, (), None).deltas == (9, -7, 2)
    other = template((9, -7, 2))  # frees none; where it would is known from another action
    assert templates.freeing(other, both[:1], one).deltas == one.deltas
    assert templates.freeing(other, both, None) == other  # another block of the action does


@pytest.mark.parametrize("example", [(8, -5, 2), (9, 1, -5)])
def test_messages_that_may_be_freed_anywhere_are_refused(example):
    known = template(example, (example.index(-5),))
    with pytest.raises(templates.NotSpliceable, match="was not recorded"):
        templates.freeing(template((9, -7, 2)), ((-5, "activations"),), known)


def grown(one, longer, times: int):
    """A template of a layer that a longer chunk has as well, grown so many times."""
    key = templates.Key(recording.Part.LAYER, "F")
    small, large = (
        templates.Templates({key: x}, surroundings.messages_near, 1) for x in (one, longer)
    )
    return small.grown([templates.Growth(small, large, (times,), 1)]).found[key]


def test_layers_that_grow_free_the_same_message():
    one, longer = template((9, -5, 2), (1,)), template((9, -3, -5, 2), (2,))
    found = grown(one, longer, 2)
    assert (found.deltas, found.messages) == ((9, -3, -3, -5, 2), (3,))
    with pytest.raises(templates.NotSpliceable, match="frees more messages"):
        grown(one, replace(longer, messages=(1, 2)), 2)


def bare_and_real(real: tuple):
    """Recordings of an action and a gap, with a byte for what real layers hold."""
    part, row = recording.Part, (recording.Place("F", 0, 0), recording.Place("B", 0, 0))

    def of(deltas: tuple, kinds: tuple):
        gap = recording.Block(0, part.GAP, 0, list(deltas), list(kinds), messages=[1])
        return recording.Recording(row, (gap,), (1,), Counter(held=2), 0, 0, 0, Counter())

    bare = of((-1, -4), ("held", "activations"))
    return bare, of((*real, -4), ("activations",) * (len(real) + 1))


def test_bytes_of_bare_layers_stand_for_what_real_ones_hold():
    bare, real = bare_and_real((-8, -16))
    held = holding.held_by(real, bare)
    assert held == ((8, "activations"), (16, "activations"))
    found = holding.revealed(bare, held)
    assert (found.blocks[0].deltas, found.blocks[0].messages) == ([-8, -16, -4], [2])
    assert found.static == Counter(activations=48)


def test_layers_that_keep_something_else_are_refused():
    bare, real = bare_and_real((-8, -16))
    real.blocks[0].deltas[-1] = -5
    with pytest.raises(templates.NotSpliceable, match="gap after action 0"):
        holding.held_by(real, bare)


@pytest.mark.parametrize("ranks", [8, 16])
def test_few_interleaved_ranks_cover_the_rows_of_many(ranks):
    from mindspeed.pipeline.schedule.schedules import ScheduleRequest

    def row(ranks: int, count: int, rank: int):
        request = ScheduleRequest("interleaved", group_size=ranks)
        return recording.row_of(request, ranks, 2, count, rank)

    seen = surroundings.seen_near
    for rank in (ranks // 2, ranks - 1):
        small = [
            (few, at)
            for few in range(4, 9)
            for at in ([few - 1] if rank == ranks - 1 else range(1, few - 1))
            if seen(row(ranks, 8 * ranks, rank)) <= seen(row(few, 4 * few, at))
        ]
        assert small
