"""Our adapter against the harness' own Hugging Face backend: same tasks, same files, same model."""

from __future__ import annotations

import pytest

from tests.support.lazy import needs

needs("megatron.core", "lm_eval")

from tests.support import lm_eval_ranks
from tests.support.lm_eval_ranks import QUESTIONS, TASKS

SETUP = "tests.support.lm_eval_preload"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("harness")
    lm_eval_ranks.make_model(root / "model")
    lm_eval_ranks.make_data(root / "data")
    return str(root / "model"), str(root / "data")


@pytest.fixture(scope="module")
def truth(folders, rank_pool):
    return rank_pool.run(1, lm_eval_ranks.by_the_harness, *folders, setup=SETUP, timeout=200)[0]


@pytest.mark.weekly_cases("2-1-1", "1-1-2")
@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_scores_and_log_probabilities_equal_those_of_the_harness(ranks, folders, truth, tp, pp, dp):
    results = ranks(tp * pp * dp, lm_eval_ranks.by_us, *folders, tp, pp, setup=SETUP, timeout=200)
    ours = results[0]
    assert set(ours["answers"]) == set(TASKS)
    assert all(len(ours["answers"][name]) == QUESTIONS for name in TASKS[:3])
    # The harness draws examples at random, rank by rank: other replicas, other prompts.
    same_prompts = TASKS if dp == 1 else ["boolq", "mmlu_anatomy", "wiki"]
    for name in same_prompts:
        expected = flat(truth["answers"][name])
        assert flat(ours["answers"][name]) == pytest.approx(expected, rel=1e-6, abs=1e-4), name
        assert ours["scores"][name] == pytest.approx(truth["scores"][name], rel=1e-4), name
    if "gsm8k" in same_prompts:
        assert ours["answers"]["gsm8k"] == truth["answers"]["gsm8k"]  # the very same text
    greedy = [[pair[0][1] for pair in row] for row in ours["answers"]["boolq"]]
    assert greedy == [[pair[0][1] for pair in row] for row in truth["answers"]["boolq"]]


def flat(answers):
    """All numbers in the answers."""
    if isinstance(answers, list | tuple):
        return [number for item in answers for number in flat(item)]
    return [float(answers)] if isinstance(answers, int | float) else []


@pytest.mark.slow
def test_our_own_evaluation_has_the_harness_log_probabilities(ranks, folders, truth):
    outcomes = ranks(2, lm_eval_ranks.builtin_scores, *folders, 2, 1, setup=SETUP, timeout=200)[0]
    expected = [[pair[0][0] for pair in row] for row in truth["answers"]["mmlu_anatomy"]]
    found = [outcome["logprobs"] for outcome in outcomes]
    assert found == [pytest.approx(row, abs=1e-4) for row in expected]
    accuracy = sum(outcome["correct"] for outcome in outcomes) / len(outcomes)
    assert accuracy == pytest.approx(truth["scores"]["mmlu_anatomy"]["acc,none"])


def test_the_harness_finds_the_model_by_name_and_its_replicas(ranks, folders):
    first, second = ranks(2, lm_eval_ranks.the_rest, folders[0], setup=SETUP, timeout=200)
    assert first["class"] == "MindSpeedLM"
    assert (first["place"], second["place"]) == ((0, 2), (1, 2))
    assert first["lengths"] == (100, 8)
    assert first["chat"] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert "chatml" in first["tokenizer"] and "/" not in first["tokenizer"]
    assert first["gathered"] == second["gathered"] == [5, 6]
    assert first["objects"] == ["rank 0", "rank 1"] and second["objects"] is None
    assert first["empty"] == []


def test_a_whole_text_is_scored_after_one_bos(ranks, folders):
    texts = ["It is 7. yes", "no"]
    [(ours, right)] = ranks(1, lm_eval_ranks.rolling, folders[0], texts, setup=SETUP, timeout=200)
    assert ours == pytest.approx(right, abs=1e-3)


def test_more_new_tokens_than_the_model_has_positions_are_refused(ranks, folders):
    message = ranks(1, lm_eval_ranks.too_long, folders[0], setup=SETUP, timeout=200)[0]
    assert "a task generates 100 tokens, the model has 100 positions" in message


def test_the_harness_reads_the_same_scores_from_our_server(ranks, folders):
    pytest.importorskip("fastapi")
    (found,) = ranks(1, lm_eval_ranks.over_http, folders[0], setup=SETUP, timeout=200)
    for (ours, greedy), (theirs, theirs_greedy) in zip(found["ours"], found["theirs"], strict=True):
        assert theirs == pytest.approx(ours, abs=1e-4)
        assert theirs_greedy == greedy
    assert [greedy for _, greedy in found["ours"]][:2] == [True, True]


@pytest.mark.slow
def test_an_interrupted_run_repeats_no_request(ranks, folders, tmp_path):
    answers = str(tmp_path / "answers")
    (seen,) = ranks(1, lm_eval_ranks.interrupted, *folders, answers, setup=SETUP, timeout=200)
    first, second, rest, again, everything = seen["asked"]
    assert all((first, second, rest)) and again == []
    together = [*first, *second, *rest]
    assert len(set(together)) == len(together)
    assert set(together) == set(everything)
    continued, repeated, fresh = seen["results"]
    assert continued == repeated
    for name, expected in fresh["answers"].items():
        assert flat(continued["answers"][name]) == pytest.approx(flat(expected), abs=1e-4)
    assert continued["answers"]["gsm8k"] == fresh["answers"]["gsm8k"]
    assert "holds another run, which differs in model" in seen["other model"]


def killed_while_adding(folder: str) -> None:
    import os
    import signal
    from pathlib import Path

    from mindspeed.evaluation.samples import ResponseCache

    cache = ResponseCache(Path(folder), {"model": "a"})
    cache.add({"one": [1.5, True], "two": "text"})
    os.kill(os.getpid(), signal.SIGKILL)


def test_answers_survive_a_killed_process(tmp_path):
    import multiprocessing

    from mindspeed.evaluation.samples import ResponseCache

    folder = tmp_path / "answers"
    child = multiprocessing.get_context("fork").Process(
        target=killed_while_adding, args=(str(folder),)
    )
    child.start()
    child.join(120)
    assert child.exitcode == -9
    cache = ResponseCache(folder, {"model": "a"})
    assert cache.entries == {"one": [1.5, True], "two": "text"}
    cache.add({"one": "other", "three": 3})
    lines = (folder / "samples-0.jsonl").read_text().splitlines()
    assert [line for line in lines if "other" in line] == [] and len(lines) == 1
