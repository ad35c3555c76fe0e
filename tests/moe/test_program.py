"""Programs: their text, the order of several chunks, and its mirror image."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed.moe.costs import StageCosts
from mindspeed.moe.program import Phase, Program, Step
from mindspeed.moe.simulate import ChunkStep, mirrored

NAMES = ("route", "count", "permute", "dispatch", "gather", "experts", "fc1_2", "combine")
TURNED = {Phase.START: Phase.FINISH, Phase.FINISH: Phase.START, Phase.COMPUTE: Phase.COMPUTE}


@st.composite
def programs(draw):
    """Any order in which communications are finished after they are started."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=1))
    kinds = {name: draw(st.booleans()) for name in names}
    steps = []
    for name in names:
        if kinds[name]:
            steps.append(Step(name))
            continue
        start = draw(st.integers(0, len(steps)))
        steps.insert(start, Step(name, Phase.START))
        steps.insert(draw(st.integers(start + 1, len(steps))), Step(name, Phase.FINISH))
    group = draw(st.sampled_from([0, 1, -1]))  # none, parentheses, brackets
    return Program(tuple(replace(step, group=group) for step in steps))


@given(programs())
def test_a_program_is_its_text(program):
    assert Program.parse(str(program)) == program
    assert str(Program.parse(str(program))) == str(program)


@given(st.text("abz_019<>!()[] \n\té", max_size=40))
def test_any_text_is_a_program_or_an_error(text):
    try:
        program = Program.parse(text)
    except ValueError as error:
        assert any(word in str(error) for word in ("step", "must be", "parenthesis"))
    else:
        assert str(Program.parse(str(program))) == str(program)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Route", "'Route' is not a step"),
        ("route<>", "'route<>' is not a step"),
        ("dispatch>", "dispatch must be"),
        ("dispatch< dispatch>", "not dispatch< dispatch>"),
        ("dispatch! dispatch", "dispatch must be"),
        ("experts experts", "must be computed once"),
        ("(route (experts)", "opens a second"),
        ("route experts)", "is not open"),
        ("(route experts]", "is not open"),
        ("[route experts", "is open at the end"),
    ],
)
def test_what_is_no_program_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        Program.parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a> b a< c d> d<", "a>0 a>1 b0 b1 a<0 c0 d>0 a<1 c1 d>1 d<0 d<1"),
        ("(a> b a< c>) d (c< e) f", "a>0 b0 a<0 c>0 a>1 b1 a<1 c>1 d0 d1 c<0 e0 c<1 e1 f0 f1"),
        ("[a> a< b> b< c]", "a>0 a>1 a<0 b>0 a<1 b>1 b<0 c0 b<1 c1"),
        ("a [b> c b<] d", "a0 a1 b>0 b>1 c0 b<0 c1 b<1 d0 d1"),
    ],
)
def test_order_of_two_chunks(text, expected):
    program = Program.parse(text)
    assert " ".join(f"{step}{chunk}" for chunk, step in program.for_chunks(2)) == expected
    assert str(program) == text


@given(programs(), st.integers(1, 5))
def test_every_chunk_runs_every_step_in_order(program, chunks):
    order = list(program.for_chunks(chunks))
    for chunk in range(chunks):
        assert tuple(step for at, step in order if at == chunk) == program.steps
    assert len(order) == chunks * len(program.steps)
    assert chunks > 1 or tuple(step for _, step in order) == program.steps


@given(programs(), st.integers(1, 5))
def test_chunks_reach_every_step_one_after_the_other(program, chunks):
    """So the ranks of a group communicate in one order, and the log reads as the text."""
    order = list(program.for_chunks(chunks))
    for step in program.steps:
        assert [chunk for chunk, one in order if one == step] == list(range(chunks))


@given(programs(), st.integers(1, 4))
def test_backward_is_the_mirror_image(program, chunks):
    """It is a program, too: what was finished last starts first; twice mirrored is forward."""
    actions = [ChunkStep(step, chunk, StageCosts()) for chunk, step in program.for_chunks(chunks)]
    backward = list(mirrored(actions))
    assert [one.step.phase for one in backward] == [
        TURNED[one.step.phase] for one in reversed(actions)
    ]
    for chunk in range(chunks):
        Program(tuple(one.step for one in backward if one.chunk == chunk))._check()
    assert list(mirrored(backward)) == actions


@given(programs(), st.sets(st.sampled_from(NAMES)))
def test_stages_can_be_left_out(program, names):
    rest = program.without(*names)
    assert all(name not in rest for name in names)
    assert rest.steps == tuple(step for step in program.steps if step.name not in names)
    rest._check()
