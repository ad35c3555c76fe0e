"""Every family against Hugging Face's own class: logits, loss and every gradient, in fp32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.lazy import needs

needs("megatron.core", "transformers")

from mindspeed.models.families import family_of_config
from mindspeed.models.shape import shape_of
from mindspeed.models.stored_weights import pack
from mindspeed.models.table import parameters
from mindspeed.models.weight_shards import joined
from tests.models import model_ranks
from tests.support.tiny import CASES, VOCAB, batch

SETUP = "tests.support.warm"
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    """``oracle(name)``: directory of the tiny model and what Hugging Face computes."""
    known = {}

    def get(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            model = CASES[name].model()
            CASES[name].save(model, folder)
            known[name] = (str(folder), CASES[name].truth(model, tmp_path_factory.mktemp("grad")))
        return known[name]

    return get


def assembled(folder, results, flags):
    """Gradients of the whole model by the names of the files, from all ranks' parts."""
    args = model_ranks.resolved(folder, flags)
    config = json.loads(Path(folder, "config.json").read_text())
    family = family_of_config(config)
    table = parameters(family.rules, shape_of(args))
    whole = {p.name: (torch.zeros(p.shape), p.segments) for p in table}
    for result in results:
        for name, start, data in result["parts"]:
            bounds = zip(start, data.shape, strict=True)
            whole[name][0][tuple(slice(first, first + size) for first, size in bounds)] = data
    return dict(pack(joined(whole.values()), family.stacks, shape_of(args)["experts"]))


def compare(oracle, ranks, name, size, flags):
    folder, truth = oracle(name)
    flags = (*CASES[name].flags, *flags)
    run = model_ranks.loss_and_gradients
    results = ranks(size, run, folder, flags, setup=SETUP, timeout=120)
    losses = [result["loss"] for result in results if result["loss"] is not None]
    for loss in losses:
        torch.testing.assert_close(loss, truth["loss"], **TOLERANCE)
    parts = dict(result["logits"] for result in results if result["logits"] is not None)
    logits = torch.cat([parts[rank] for rank in sorted(parts)], -1)
    assert bool((logits[..., VOCAB:] == float("-inf")).all())
    torch.testing.assert_close(logits[..., :VOCAB], truth["logits"], **TOLERANCE)
    ours = assembled(folder, results, CASES[name].flags)
    theirs = truth["gradients"]
    theirs = {k: v for k, v in theirs.items() if not k.endswith("e_score_correction_bias")}
    ours = {k: v for k, v in ours.items() if not k.endswith("e_score_correction_bias")}
    assert set(ours) == set(theirs)
    for key, gradient in theirs.items():
        where = lambda message, key=key: f"{key}: {message}"  # noqa: E731
        torch.testing.assert_close(ours[key], gradient, msg=where, **TOLERANCE)
        assert gradient.abs().max() > 0, key


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_hugging_face(oracle, ranks, name):
    compare(oracle, ranks, name, 1, ())


TP = ("--tensor-model-parallel-size=2",)
TP_SP = (*TP, "--sequence-parallel")
PP = ("--pipeline-model-parallel-size=2",)
EP = ("--expert-model-parallel-size=2",)
CP = ("--context-parallel-size=2",)
ALGORITHM = "--context-parallel-algo="
RING = (*CP, f"{ALGORITHM}megatron_cp_algo")
CP4 = ("--context-parallel-size=4",)  # more ranks than key heads
HYBRID = (*CP4, f"{ALGORITHM}hybrid_cp_algo", "--ulysses-degree-in-cp=2")
LOCAL = ("--transformer-impl=local",)
GROUPED = ("--moe-grouped-gemm",)


# A row is daily if its family has a kind of parameter or of layer that no other daily row has
# under this kind of parallelism.
DAILY_LAYOUTS = [
    ("llama2-gqa", 2, TP_SP),
    ("llama3.2-tied", 2, PP),
    ("internlm", 2, TP),  # biases
    ("baichuan2-13b", 2, TP_SP),  # ALiBi, q, k and v in one tensor
    ("bloom", 2, TP_SP),
    ("bloom", 2, PP),
    ("mixtral", 2, EP),
    ("qwen3-moe", 2, (*EP, *GROUPED)),
    ("deepseek-v3", 2, EP),
    ("deepseek-v3", 2, TP_SP),
    ("qwen3-next", 2, CP),
    ("llama2-gqa", 1, LOCAL),
    ("internlm", 1, LOCAL),
    ("baichuan2-13b", 2, (*LOCAL, *TP)),
    ("qwen3-moe", 1, LOCAL),
    ("deepseek-v3", 1, LOCAL),
    ("deepseek-v3", 2, (*LOCAL, *TP_SP)),
    ("deepseek-v3", 2, (*PP, "--decoder-first-pipeline-num-layers=1")),
    # A layer pattern is counted over all stages.
    *((name, 2, PP) for name in ("glm4-moe", "smollm3", "gemma3", "qwen3-next", "gpt-oss")),
    # Other tensors of q, k and v, or of the two halves of an MLP; half of a head rotated; norms of
    # heads; norms in other places.
    *((name, 2, TP_SP) for name in ("phi3", "phi4-mini", "internlm2", "seed-oss")),
    *((name, 2, TP_SP) for name in ("qwen3-moe", "glm4", "gemma3", "hunyuan", "minimax-m2")),
    *((name, 2, TP) for name in ("granite", "olmo2", "internlm3", "qwen3.5")),
    *((name, 1, LOCAL) for name in ("gemma3", "olmo3", "minimax-m2", "qwen3.5", "gpt-oss")),
    ("olmo3", 2, (*LOCAL, *TP_SP)),
    # Gated shared experts, a sink, experts in one tensor, gated delta nets.
    ("qwen2-moe", 2, TP_SP),
    ("qwen2-moe", 2, (*EP, *GROUPED)),
    ("gpt-oss", 2, TP_SP),
    ("gpt-oss", 2, EP),
    ("gpt-oss", 1, GROUPED),
    ("llama4", 2, TP_SP),
    ("llama4", 2, (*EP, *GROUPED)),
    ("llama4", 2, (*LOCAL, *EP)),
    ("qwen3-next", 2, TP_SP),
    ("qwen3.5", 2, RING),
    ("qwen3.5", 4, HYBRID),
    ("qwen3.5-moe", 2, (*CP, *EP, *GROUPED)),
]
# With the list above: every family under every kind of parallelism that it can have.
WEEKLY_LAYOUTS = [
    *((name, 2, PP) for name in ("llama2-gqa", "aquila", "internlm", "baichuan-7b", "qwen2.5")),
    *((name, 2, PP) for name in ("qwen3", "mistral-window", "mixtral", "qwen3-moe", "deepseek-v2")),
    *((name, 2, PP) for name in ("qwen2-moe", "phi4-mini", "granite", "glm4", "olmo3", "hunyuan")),
    *((name, 2, PP) for name in ("qwen3.5", "gemma2")),
    *((name, 2, TP) for name in ("aquila", "baichuan-7b", "qwen2.5", "qwen3", "hunyuan")),
    ("mistral-window", 2, TP),
    *((name, 2, TP_SP) for name in ("mixtral", "glm4-moe", "deepseek-v2", "ernie4.5")),
    *((name, 2, TP_SP) for name in ("qwen3-yarn", "olmo3", "gemma2")),
    *((name, 2, (*EP, *GROUPED)) for name in ("glm4-moe", "deepseek-v2", "kimi-k2", "minimax-m2")),
    *((name, 2, (*EP, *GROUPED)) for name in ("qwen3-next", "qwen3.5-moe", "gpt-oss")),
    *((name, 1, LOCAL) for name in ("glm4-moe", "deepseek-v2", "qwen2-moe", "smollm3", "granite")),
    *((name, 1, LOCAL) for name in ("glm4", "olmo2", "phi4-mini", "ernie4.5", "internlm2")),
    ("seed-oss", 1, LOCAL),
    *((name, 2, (*LOCAL, *TP_SP)) for name in ("gemma3", "hunyuan")),
    ("gemma2", 2, (*LOCAL, *TP)),
    ("deepseek-v3", 2, (*LOCAL, *EP)),
    ("qwen3.5", 4, CP4),
    ("qwen3-next", 4, (*CP, *TP_SP)),
    ("llama4", 2, PP),
    *(
        (name, 2, flags)
        for name in ("ernie4.5-moe", "hunyuan-moe", "granite-moe")
        for flags in (TP_SP, PP, (*EP, *GROUPED), (*LOCAL, *EP))
    ),
]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("name", "size", "flags"),
    [*DAILY_LAYOUTS, *(pytest.param(*row, marks=pytest.mark.weekly) for row in WEEKLY_LAYOUTS)],
    ids=lambda value: (
        "+".join(f.strip("-").replace("-parallel-size", "") for f in value)
        if isinstance(value, tuple)
        else str(value)
    ),
)
def test_the_same_in_other_layouts(oracle, ranks, name, size, flags):
    compare(oracle, ranks, name, size, flags)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", CASES)
def test_a_written_config_means_the_same_to_transformers(oracle, name, tmp_path):
    """The model of the file that we write for a model computes the logits of its own file."""
    import transformers

    folder = Path(oracle(name)[0])
    given = json.loads((folder / "config.json").read_text())
    family = family_of_config(given)
    if not family.in_transformers or given["model_type"] != family.model_types[0]:
        pytest.skip("its class is not part of transformers")
    args = model_ranks.resolved(str(folder), CASES[name].flags)
    written = {**family.write(args), "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(written))
    logits, state = [], None
    for where in (folder, tmp_path):
        config = transformers.AutoConfig.from_pretrained(where)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        state = state or {k: v.clone() for k, v in model.state_dict().items()}
        model.load_state_dict(state)
        with torch.no_grad():
            logits.append(model(batch()[0]).logits)
    torch.testing.assert_close(*logits)
