"""``--record`` in an unmodified ``pretrain_gpt.py`` plus the import line."""

from __future__ import annotations

import os
import shlex

import pytest

from tests.megatron_lm.launch import pretrain
from tests.support.tiny import CASES, LENGTH, VOCAB
from tests.support.trainer_job import SETUP, TINY, train

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

SCRIPT_ONLY = shlex.split(
    "--max-position-embeddings 64 --eval-iters 0 --eval-interval 10 --distributed-backend gloo "
    "--group-query-attention --num-workers 0"
)
STEPS = shlex.split("--train-iters 2")
JOB = shlex.split(
    f"--seq-length {LENGTH} --micro-batch-size 2 --global-batch-size 4 --mock-data --train-iters 1 "
    f"--tokenizer-type NullTokenizer --vocab-size {VOCAB} --lr-decay-style constant --finetune "
    "--make-vocab-size-divisible-by 64 --hidden-dropout 0 --attention-dropout 0 --log-interval 1 "
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion "
    "--no-load-optim --no-load-rng"
)
SCRIPT = shlex.split(
    "--eval-iters 0 --eval-interval 10 --distributed-backend gloo --num-workers 0 "
    "--ckpt-format torch_dist"
)
OF_TRAINER = (
    *("--model-family", "--mask-padded-vocab", "--no-mask-padded-vocab"),
    *("--no-group-query-attention", "--no-add-qkv-bias", "--no-add-dense-bias"),
    *(
        "--no-moe-router-pre-softmax",
        "--add-bias-linear",
        "--no-untie-embeddings-and-output-weights",
    ),
)
"""Of a family's flags those that the script has not, and does not need."""
OF_OURS = (
    *("internlm", "baichuan-7b", "baichuan-13b", "baichuan2-7b", "baichuan2-13b", "bloom"),
    *("deepseek-v3", "deepseek-v2", "phi4-mini", "qwen3-yarn", "granite", "glm4", "gemma3"),
    *("olmo2", "olmo3", "hunyuan", "minimax-m2", "gpt-oss", "gemma2", "llama4", "ernie4.5-moe"),
    *("hunyuan-moe", "granite-moe"),
)
"""Families that need a flag of our trainer, which the script refuses."""
OF_ENGINE = ("qwen3-next", "qwen3.5", "qwen3.5-moe")
"""Megatron has their layers with Transformer Engine only, whose states our checkpoint has not."""
THEIRS = [name for name in CASES if name not in (*OF_OURS, *OF_ENGINE)]
DAILY = ("qwen3-moe",)


def test_the_script_and_our_trainer_record_the_same_tensors(tmp_path, ranks):
    from mindspeed.compare.recording import read
    from mindspeed.compare.walk import compare

    theirs, ours = tmp_path / "script", tmp_path / "trainer"
    pretrain(tmp_path, 2, *TINY, *SCRIPT_ONLY, *STEPS, "--record", str(theirs))
    flags = [*STEPS, "--group-query-attention", "--record", str(ours)]
    assert ranks(2, train, flags, setup=SETUP, backend=None)[0]["error"] is None
    result = compare(read(theirs), read(ours))
    assert result.equal, result.first
    assert not result.before and not result.only
    assert len(result.rows) > 550


def train_family(flags: list[str]) -> list[str]:
    """Train with our trainer on this rank; returns the words that say what the model is."""
    from mindspeed.cli.pretrain import _prepare
    from mindspeed.models.presets import model_flags
    from mindspeed.training.arguments import build_parser
    from mindspeed.training.pretrain import pretrain
    from mindspeed.training.recipe import flag_words

    pretrain(_prepare(flags, int(os.environ["WORLD_SIZE"])))
    model = flags[flags.index("--model") + 1]
    words = flag_words(model_flags(model), build_parser())
    words = [word for word in words if word.partition("=")[0] not in OF_TRAINER]
    return [word.replace(" ", "") for word in words]  # of lists


@pytest.fixture
def trained(tmp_path, rank_pool, forked_scripts):
    """``trained(case)``: trains the model of a case with our trainer, then with the script.

    The weights come from Hugging Face's files, and go to the script in a checkpoint.
    """

    def run(name: str) -> None:
        model, weights = tmp_path / "model", tmp_path / "weights"
        CASES[name].save(CASES[name].model(), model)
        case = [*JOB, *CASES[name].flags]

        def ours(*more: str) -> list[str]:
            given = ["--model", str(model), *case, "--no-mask-padded-vocab", *more]
            return rank_pool.run(1, train_family, given, setup=SETUP, backend=None)[0]

        words = ours("--load", f"hf:{model}", "--lr", "0", "--save", str(weights))
        loaded = ("--load", str(weights), "--lr", "1e-3", "--record")
        ours(*loaded, str(tmp_path / "trainer"))
        pretrain(tmp_path, 1, *words, *case, *SCRIPT, *loaded, str(tmp_path / "script"))

    return run


@pytest.mark.weekly_cases(*(name for name in THEIRS if name not in DAILY))
@pytest.mark.parametrize("name", THEIRS)
def test_a_family_is_trained_alike_by_the_script(tmp_path, trained, name):
    from mindspeed.compare.recording import read
    from mindspeed.compare.walk import compare

    trained(name)
    result = compare(read(tmp_path / "script"), read(tmp_path / "trainer"))
    assert result.equal, result.first
    assert not result.before and not result.only
    assert len(result.rows) > 100


@pytest.mark.weekly
@pytest.mark.parametrize("name", OF_OURS)
def test_a_family_with_flags_of_our_trainer_is_refused_by_the_script(trained, name):
    with pytest.raises(AssertionError, match="unrecognized arguments"):
        trained(name)
