"""Flags and recipes: same names, same checks, the command line wins; errors say what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed.errors import ConfigError
from tests.support.trainer_job import SETUP, TINY, command
from tests.training.command_line import parse_all


def _without_batch() -> list[str]:
    at = TINY.index("--global-batch-size")
    return [*TINY[:at], *TINY[at + 2 :]]


MODEL = """
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, swiglu: true}
optimizer: {lr: 0.001}
data: {seq_length: 32, mock_data: true, tokenizer_type: NullTokenizer, vocab_size: 100}
training: {train_iters: 10, micro_batch_size: 2}
"""

WRONG = {
    "two ways to capture graphs": (
        [*TINY, "--enable-cuda-graph", "--cuda-graph-impl", "transformer_engine"],
        "--enable-cuda-graph is --cuda-graph-impl local, and --cuda-graph-impl transformer_engine "
        "is given, too: remove one of them",
    ),
    "an old switch against its default": (
        [*TINY, "--enable-cuda-graph", "--cuda-graph-impl", "none"],
        "--enable-cuda-graph is --cuda-graph-impl local, and --cuda-graph-impl none is given, too",
    ),
    "unknown flag": (
        [*TINY, "--num-layer", "2"],
        "unknown flag --num-layer; did you mean --num-layers",
    ),
    "unknown flag that begins as another": (
        ["--lora-rank", "8"],
        "unknown flag --lora-rank; did you mean --lora-r,",
    ),
    "word without flag": ([*TINY, "stray"], "unexpected argument 'stray'"),
    "not a choice": ([*TINY, "--normalization", "BatchNorm"], "invalid choice: 'BatchNorm'"),
    "attention that is not built": (
        [*TINY, "--experimental-attention-variant", "dsa"],
        "--experimental-attention-variant dsa: this trainer builds the attention",
    ),
    "not a number": ([*TINY, "--num-layers", "many"], "--num-layers 'many' is not a whole number"),
    "code in a pattern": (
        [*TINY, "--moe-layer-freq", "__import__('os')"],
        "neither a number nor a pattern",
    ),
    "no duration": ([w for w in TINY if w not in ("--train-iters", "6")], "--train-iters"),
    "two durations": ([*TINY, "--train-samples", "10"], "give one of --train-iters and --train-"),
    "world size": ([*TINY, "--tensor-model-parallel-size", "2"], "a multiple of 2 processes", 3),
    "batch": ([*TINY, "--global-batch-size", "7"], "7 is not divisible by --micro-batch-size 2"),
    "layers": ([*TINY, "--pipeline-model-parallel-size", "3"], "4 layers cannot be divided", 3),
    "heads": ([*TINY, "--tensor-model-parallel-size", "16"], "--num-attention-heads 8", 16),
    "groups": (
        [*TINY, "--num-query-groups", "3"],
        "--num-attention-heads 8 is not divisible by --num-query-groups 3",
    ),
    "head size": ([*TINY, "--hidden-size", "60"], "--hidden-size 60 is not divisible by"),
    "precision": ([*TINY, "--fp16", "--bf16"], "--fp16 and --bf16 exclude each other"),
    "two data sources": ([*TINY, "--data-path", "x"], "not --mock-data and --data-path"),
    "ramp-up": ([*TINY, "--rampup-batch-size", "2", "2", "9"], "needs --train-samples instead"),
    "no order": (
        [*TINY, "--no-shuffle", "--dataloader-type", "cyclic"],
        "--no-shuffle needs --dataloader-type single",
    ),
    "resume from nowhere": ([*TINY, "--auto-resume"], "--auto-resume needs --save"),
    "gathering": ([*TINY, "--overlap-param-gather"], "needs --use-distributed-optimizer"),
    "warm-up": (
        [*TINY, "--lr-warmup-iters", "6"],
        "--lr-warmup-iters 6 must be less than --train-iters 6, the length of the learning rate",
    ),
    "warm-up of a decay": (
        [*TINY, "--lr-warmup-iters", "4", "--lr-decay-iters", "3"],
        "--lr-warmup-iters 4 must be less than --lr-decay-iters 3,",
    ),
    "warm-up in samples": (
        command(["--train-samples", "64", "--lr-warmup-samples", "64"]),
        "--lr-warmup-samples 64 must be less than --train-samples 64,",
    ),
    "warm-up fraction": (
        [*TINY, "--lr-warmup-fraction", "1"],
        "--lr-warmup-fraction 1.0 must be at least 0 and less than 1",
    ),
    "start of warm-up": ([*TINY, "--lr-warmup-init", "1"], "is larger than --lr 0.001"),
    "no decay": ([*TINY, "--lr-decay-iters", "0"], "--lr-decay-iters 0 must be at least 1"),
    "last phase": ([*TINY, "--lr-decay-style", "WSD"], "WSD needs --lr-wsd-decay-iters"),
    "long last phase": (
        [*TINY, "--lr-decay-style", "WSD", "--lr-wsd-decay-iters", "7"],
        "--lr-wsd-decay-iters 7 is more than --train-iters 6",
    ),
    "experts": ([*TINY, "--expert-model-parallel-size", "2"], "needs --num-experts", 2),
    "optimizer": ([*TINY, "--optimizer", "lamb"], "--optimizer lamb: choose one of adam, sgd"),
    "wrong layers of stages": (
        [*TINY, "--pipeline-model-parallel-size", "2", "--manual-layers", "1,2"],
        "--manual-layers: 1,2 has 3 layers in all: --num-layers is 4",
        2,
    ),
    "wrong accumulation": (
        [*TINY, "--gradient-accumulation-steps", "3"],
        "--global-batch-size 8 is not --micro-batch-size 2 x data-parallel size 1 x --gradient-acc",
    ),
    "name of a recipe": (
        ["--config", "llama2-7"],
        "no recipe of that name; closest: llama2-7b, llama2-70b",
    ),
    "experts and tensor parallelism": (
        [*TINY, "--num-experts", "4", "--tensor-model-parallel-size", "2"],
        "--num-experts 4 with --tensor-model-parallel-size 2 needs --sequence-parallel",
        2,
    ),
}
WRONG_RECIPES = {
    "section": ("modell: {num_layers: 2}", "unknown section 'modell'"),
    "key": ("model: {num_layer: 2}", "model.num_layer: unknown key; did you mean num_layers"),
    "place": ("training: {swiglu: true}", "training.swiglu: this key belongs in section 'model'"),
    "key as section": ("lr: 0.1", "'lr' is a key of section 'optimizer'"),
    "kind": ("model: {num_layers: true}", "model.num_layers: a value is expected, not true"),
    "switch": ("model: {swiglu: 1}", "model.swiglu: true or false is expected, not 1"),
    "mapping": ("model: {num_layers: {a: 1}}", "model.num_layers: a value is expected, not a map"),
    "gap": ("lora: {lora_target_modules: [q, null]}", "a value is expected, not nothing"),
    "flag as a value": ("data: {data_path: [x, --save]}", "'--save' would be a separate flag"),
    "section of a list": ("model: [1, 2]", "model: keys with values are expected, not a list"),
    "section of a text": ("model: x", "model: keys with values are expected, not 'x'"),
    "key twice": ("model: {num_layers: 2, num_layers: 4}", "line 1: num_layers is given twice"),
    "octal": ("model: {num_layers: 010}", "010 may be read as a number of octal"),
    "base 60": ("training: {train_iters: 1:30}", "1:30 may be read as a number of base 60"),
    "deep": ("model: " + "[" * 3000, "is nested too deep"),
    "out of range": ("optimizer: {adam_beta1: 2}", "--adam-beta1 2.0 must be at least 0 and less"),
    "no number": ("optimizer: {loss_scale: .nan}", "--loss-scale nan must be at least 0"),
    "syntax": ("model: {", "is no valid YAML"),
    "file of a list": ("[1, 2]", "sections are expected"),
}
GOOD = {
    "recipe": ([], MODEL),
    "command line wins": (["--num-layers", "4", "--no-swiglu"], MODEL),
    "groups imply grouped queries": (TINY,),
    "old names": (
        [*TINY, "--layernorm-epsilon", "1e-6", "--DDP-impl", "local", "--checkpoint-activations"],
    ),
    "old switch": ([*TINY, "--enable-cuda-graph"],),
    "big numbers": ([*TINY, "--rotary-base", "1e6"],),
    "longest warm-up": ([*TINY, "--lr-warmup-iters", "5"],),
    "warm-up, stable, decay": (
        command(
            ["--train-samples", "64", "--lr-decay-style", "WSD", "--lr-wsd-decay-samples", "64"]
        ),
    ),
    "experts, tensor and sequence parallelism": (
        [
            *TINY,
            *["--num-experts", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ],
        None,
        2,
    ),
    "seed's names": (
        [
            *TINY,
            *["--no-add-gate", "--optimizer", "fused_adam", "--encoder-num-layers", "2"],
            *["--no-untie-embeddings-and-output-weights", "--use-rotary-position-embeddings"],
        ],
    ),
    "layers of stages": (
        [*TINY, "--pipeline-model-parallel-size", "2", "--manual-layers", "1,3"],
        None,
        2,
    ),
    "recomputation of blocks": (
        [*TINY, "--checkpoint-policy", "block", "--checkpoint-block-layer", "3"],
    ),
    "recomputation of attention": (
        [*TINY, "--checkpoint-activations", "--checkpoint-policy", "custom"],
    ),
    "recomputation of all": ([*TINY, "--checkpoint-policy", "full"],),
    "accumulation": ([*_without_batch(), "--gradient-accumulation-steps", "3"], None, 2),
    "relative tokenizer": ([*TINY, "--tokenizer-model", "docs"],),
    "named tokenizer": ([*TINY, "--tokenizer-model", "no-directory"],),
    "pattern": ([*TINY, "--num-experts", "4", "--moe-layer-freq", "([1]*1+[0]*1)*2"],),
    "virtual stages": (
        [
            *TINY,
            *[
                "--pipeline-model-parallel-size",
                "2",
                "--num-layers-per-virtual-pipeline-stage",
                "1",
            ],
        ],
        None,
        2,
    ),
}


@pytest.fixture(scope="module")
def results(rank_pool):
    cases = [(flags, None, *rest) for flags, _, *rest in WRONG.values()]
    cases += [([], recipe) for recipe, _ in WRONG_RECIPES.values()]
    cases += list(GOOD.values())
    (answers,) = rank_pool.run(1, parse_all, cases, setup=SETUP, backend=None, timeout=240)
    return dict(zip([*WRONG, *WRONG_RECIPES, *GOOD], answers, strict=True))


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_command_line_says_what_to_change(case, results):
    assert WRONG[case][1] in (results[case]["error"] or "no error")


@pytest.mark.parametrize("case", WRONG_RECIPES)
def test_a_wrong_recipe_says_where_the_key_belongs(case, results):
    assert WRONG_RECIPES[case][1] in (results[case]["error"] or "no error")


@pytest.mark.parametrize("case", GOOD)
def test_a_good_command_line_has_no_error(case, results):
    assert results[case]["error"] is None


def test_a_recipe_sets_values_and_the_command_line_wins(results):
    plain, changed = results["recipe"]["values"], results["command line wins"]["values"]
    assert (plain["num_layers"], plain["swiglu"], plain["lr"]) == (2, True, 0.001)
    assert (changed["num_layers"], changed["swiglu"]) == (4, False)


def test_sizes_that_follow_from_others_are_megatron_lms(results):
    values = results["recipe"]["values"]
    assert values["ffn_hidden_size"] == 128  # 4 h 2/3, down to a multiple of 64
    assert values["kv_channels"] == 16
    assert (values["data_parallel_size"], values["global_batch_size"]) == (1, 2)
    assert values["start_weight_decay"] == values["end_weight_decay"] == 0.01
    assert results["groups imply grouped queries"]["values"]["group_query_attention"] is True
    assert results["virtual stages"]["values"]["virtual_pipeline_model_parallel_size"] == 2
    assert results["pattern"]["values"]["moe_layer_freq"] == [1, 0, 1, 0]
    assert results["big numbers"]["values"]["rotary_base"] == 1_000_000


def test_a_checkpoint_finds_its_tokenizer_from_any_directory(results):
    """Names that are no path stay as they are."""
    assert results["relative tokenizer"]["values"]["tokenizer_model"] == str(Path("docs").resolve())
    assert results["named tokenizer"]["values"]["tokenizer_model"] == "no-directory"


def test_old_names_mean_what_they_meant(results):
    values = results["old names"]["values"]
    assert values["layernorm_epsilon"] == 1e-6
    assert (values["recompute_granularity"], values["recompute_num_layers"]) == ("full", 1)
    assert values["ignored_flags"] == ["--DDP-impl"]
    assert set(values["given_flags"]) <= values.keys()  # a flag without effect sets no name
    switched = results["old switch"]["values"]
    assert (switched["cuda_graph_impl"], switched["enable_cuda_graph"]) == ("local", False)


def test_names_of_the_original_suite_are_accepted(results):
    values = results["seed's names"]["values"]
    assert values["swiglu"] is False
    assert values["optimizer"] == "adam"
    assert values["num_layers"] == 2
    assert values["untie_embeddings_and_output_weights"] is False
    assert values["position_embedding_type"] == "rope"
    layout = results["layers of stages"]["values"]["pipeline_model_parallel_layout"]
    assert layout == "Et|tttL"
    assert results["accumulation"]["values"]["global_batch_size"] == 12


def test_policies_of_recomputation_are_megatrons(results):
    found = {
        name: tuple(
            results[f"recomputation of {name}"]["values"][f"recompute_{key}"]
            for key in ("granularity", "method", "num_layers")
        )
        for name in ("blocks", "attention", "all")
    }
    assert found["blocks"] == ("full", "block", 3)
    assert found["attention"][0] == "selective"
    assert found["all"] == ("full", "uniform", 1)


def test_flags_without_effect_are_reported_with_reasons():
    from mindspeed.training.megatron_flags import IGNORED, WHY, without_effect

    assert set(WHY) == set(IGNORED)
    given = ["--no-position-embedding", "--DDP-impl", "--data-impl", "--DDP-impl", "ZeRO stage 9"]
    lines = list(without_effect(given))
    assert lines[0].startswith("without effect: --no-position-embedding (positions are what")
    assert lines[1] == "without effect: --DDP-impl --data-impl (it is the only way here)"
    assert lines[2] == "without effect: ZeRO stage 9"


def test_a_dumped_recipe_repeats_the_run(results, ranks):
    names = [
        name for name in GOOD if name not in ("old names", "seed's names") and len(GOOD[name]) < 3
    ]
    cases = [([], results[name]["recipe"]) for name in names]
    (again,) = ranks(1, parse_all, cases, setup=SETUP, backend=None, timeout=240)
    for name, second in zip(names, again, strict=True):
        assert second["error"] is None
        first = dict(results[name]["values"], config=None, given_flags=None)
        assert dict(second["values"], config=None, given_flags=None) == first


def test_a_default_that_is_given_is_part_of_the_recipe_and_wins_over_the_model(ranks):
    words = ["--model", "llama3-8b", *_without_batch(), "--hidden-dropout", "0.1"]
    ((first,),) = ranks(1, parse_all, [(words,)], setup=SETUP, backend=None, timeout=240)
    ((again,),) = ranks(
        1, parse_all, [([], first["recipe"])], setup=SETUP, backend=None, timeout=240
    )
    assert first["error"] is again["error"] is None
    for found in (first, again):
        assert found["values"]["model"] == "llama3-8b"  # which says 0
        assert found["values"]["hidden_dropout"] == 0.1
        assert "hidden_dropout" in found["values"]["given_flags"]
        assert "init_method_std" not in found["values"]["given_flags"]


def test_switches_that_other_flags_reverse_are_reported(capsys):
    from mindspeed.training.initialize import prepare

    words = ["--sequence-parallel", "--add-bias-linear", "--no-add-qkv-bias", "--swiglu"]
    prepare([*TINY, *words], 1, training=False)
    said = [line.strip() for line in capsys.readouterr().err.splitlines() if "without" in line]
    assert sorted(said) == [
        "without effect: --no-add-qkv-bias (other flags make it True)",
        "without effect: --sequence-parallel (other flags make it False)",
    ]


def test_too_many_ranks_on_one_machine_are_refused(monkeypatch):
    from mindspeed.device import host_memory
    from mindspeed.training.resolve_parallel import check_fits_here

    monkeypatch.setattr(host_memory, "total", lambda: 16 << 30)
    check_fits_here(64)
    with pytest.raises(ConfigError, match="65 ranks do not fit on this machine"):
        check_fits_here(65)
