"""Recipes by name: one for every model, each resolves and says what its YAML says."""

from __future__ import annotations

import pytest

from mindspeed import recipes
from mindspeed.models.presets import presets
from tests.recipes.recipe_jobs import (
    SETUP,
    gib_of,
    layers_of_stages,
    parameters_of,
    resolve_advice,
    resolve_recipes,
)

# Millions of parameters that the publishers state, without norms and biases in the first digits.
PUBLISHED = {
    "llama-7b": 6738,
    "llama-65b": 65286,
    "llama2-70b": 68977,
    "bloom-176b": 176247,
    "baichuan2-13b": 13897,
    "llama3.2-1b": 1236,
    "qwen2.5-0.5b": 494,
    "qwen3-30b-a3b": 30532,
    "mixtral-8x7b": 46703,
    "deepseek-v3": 671026,
}


@pytest.fixture(scope="module")
def resolved(rank_pool):
    """What a dry run knows of each recipe, by its name; all are resolved in one process."""
    options = {"setup": SETUP, "backend": None, "timeout": 240}
    (answers,) = rank_pool.run(1, resolve_recipes, list(recipes.table()), **options)
    return answers


# Nobody has counted a layout for 64 GB yet: `mindspeed plan` searches one.
WITHOUT = {"kimi-k2", "glm-4.5", "glm-4.5-air", "minimax-m2", "qwen3-next-80b-a3b", "deepseek-v2"}
WITHOUT |= {"llama4-scout", "llama4-maverick", "ernie4.5-300b-a47b", "hunyuan-a13b", "glm4-32b"}
WITHOUT |= {"qwen2-57b-a14b", "gpt-oss-120b"}


def test_every_model_has_a_recipe_of_its_name_or_is_known_to_lack_one():
    assert set(presets()) - set(recipes.table()) == WITHOUT


@pytest.mark.timeout(900)  # the first one waits for all recipes
@pytest.mark.parametrize("name", recipes.table())
def test_a_recipe_resolves_for_its_devices(name, resolved):
    assert resolved[name]["error"] is None
    assert resolved[name]["values"]["world_size"] == recipes.table()[name]["devices"]
    assert resolved[name]["same as its text"]


WITH_A_LAYOUT = (
    "deepseek-v3",
    "deepseek-v3-dualpipev",
    "deepseek-v3-lora",
)  # of stages: not composed of small runs
COUNTED = "llama2-7b"  # by `make test`; the others, a minute each, by `make test-weekly`


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.weekly] * (name != COUNTED))
        for name in recipes.table()
        if name not in WITH_A_LAYOUT
    ],
)
def test_a_recipe_fits_into_64_gb(name, rank_pool):
    (gib,) = rank_pool.run(1, gib_of, name, setup=SETUP, backend=None, timeout=600)
    assert 1 < gib < 60


EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3")


def test_what_recipes_of_experts_advise_is_accepted(rank_pool):
    (answers,) = rank_pool.run(1, resolve_advice, EXPERTS, setup=SETUP, backend=None, timeout=240)
    for name, tried in answers.items():
        assert tried, name
        for flags, error in tried:
            assert error is None, f"{name} {flags}: {error}"
            assert flags.startswith("--moe-")


def test_advice_is_shown_with_the_recipe():
    assert recipes.advice("deepseek-v3")[0].startswith("try: --moe-alltoall-overlap-comm   (")
    assert recipes.advice("llama2-7b") == recipes.advice("no-such-recipe") == []


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameter_count_is_the_published_one(name, rank_pool):
    (found,) = rank_pool.run(1, parameters_of, name, setup=SETUP, backend=None, timeout=240)
    assert found / 1e6 == pytest.approx(PUBLISHED[name], rel=0.005)


@pytest.mark.weekly
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in recipes.table() if name not in PUBLISHED])
def test_the_model_of_a_recipe_is_built(name, rank_pool):
    """With adapters it is that of the recipe without, or of one of its size."""
    (found,) = rank_pool.run(1, parameters_of, name, setup=SETUP, backend=None, timeout=240)
    assert found > 1e8


def test_values_of_the_original_scripts(resolved):
    seven = resolved["llama-7b"]["values"]
    assert (seven["lr"], seven["micro_batch_size"], seven["global_batch_size"]) == (1e-6, 2, 64)
    assert (seven["adam_beta1"], seven["adam_beta2"], seven["weight_decay"]) == (0.9, 0.95, 0.01)
    layouts = {
        name: (values["tensor_model_parallel_size"], values["pipeline_model_parallel_size"])
        for name, values in ((name, resolved[name]["values"]) for name in recipes.table())
    }
    assert layouts["llama-33b"] == (4, 4)
    assert layouts["llama-65b"] == layouts["internlm-65b"] == (8, 4)
    assert (layouts["llama2-34b"], layouts["llama2-70b"]) == ((8, 2), (8, 8))
    bloom = resolved["bloom-176b"]["values"]
    assert layouts["bloom-176b"] == (8, 12)
    assert bloom["rampup_batch_size"] == [192, 16, 9765625]
    assert bloom["lr"] == 6e-5


def test_bloom_176b_has_five_layers_at_its_ends_and_six_between(ranks):
    layout = recipes.table()["bloom-176b"]["pipeline_model_parallel_layout"]
    (counts,) = ranks(1, layers_of_stages, layout, 12, setup=SETUP, backend=None)
    assert counts == [5, *[6] * 10, 5]
