"""``GPTModel.from_pretrained`` and ``generate`` against transformers, as users call them."""

from __future__ import annotations

import pytest
import torch

from tests.support.lazy import Lazy, needs

needs("megatron.core", "transformers")


from mindspeed.testing.ranks import RankError
from tests.inference import gpt_model_ranks, tiny_chat

transformers = Lazy("transformers")


SETUP = "tests.support.warm"
TEXTS = ["the cat sat", "user: hello there, how are you", "猫"]
NEW = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Directory, transformers' model and tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_chat.write(folder)
    return folder, model, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def call(ranks, tiny):
    """``call((given, keywords), ...)``: the result of every call, on one rank."""

    def run(*requests, lora=None, layout=(1, 1)):
        size = layout[0] * layout[1]
        arguments = (str(tiny[0]), layout, requests, lora)
        results = ranks(size, gpt_model_ranks.calls, *arguments, setup=SETUP, timeout=120)
        assert results == results[:1] * size
        return results[0]

    return run


def expected_ids(tiny, text, model=None, **options):
    _, own, tokenizer = tiny
    inputs = tokenizer(text, return_tensors="pt")
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 1, **options}
    out = (model or own).generate(**inputs, **options)
    rows = [row[inputs["input_ids"].shape[1] :] for row in out.tolist()]
    return [row[: row.index(0)] if 0 in row else row for row in rows]


def test_every_form_of_prompt(call, tiny):
    _, _, tokenizer = tiny
    ids = [expected_ids(tiny, text)[0] for text in TEXTS]
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    tokenizer.padding_side = "left"
    padded = tokenizer(TEXTS, return_tensors="pt", padding=True)
    limit = {"max_new_tokens": NEW}
    raw = {**limit, "detokenize": False}
    mask = {"attention_mask": padded["attention_mask"]}
    results = call(
        (TEXTS[0], limit),
        (TEXTS, limit),
        (prompts[0], raw),
        (prompts, raw),
        (torch.tensor(prompts[0]), raw),
        (padded["input_ids"], {**raw, **mask}),
        (padded["input_ids"], {**raw, "pad_token_id": tokenizer.pad_token_id}),
        (TEXTS[0], {**limit, "include_input": True}),
        (TEXTS[0], {**limit, "stream": True}),
        (TEXTS[0], {"max_length": len(prompts[0]) + 3, "detokenize": False}),
        ("", {**raw, "bos_token_id": 7}),
        (TEXTS[0], {**limit, "recompute": True}),
        (TEXTS[0], {**raw, "eos_token_id": ids[0][2]}),
    )
    assert results[:2] == [texts[0], texts]
    assert results[2:7] == [ids[0], ids, ids[0], ids, ids]
    assert results[7] == TEXTS[0] + texts[0]
    assert "".join(results[8]) == texts[0] and len(results[8]) > 1
    assert results[9] == ids[0][:3]
    assert len(results[10]) > 0
    assert results[11:] == [texts[0], ids[0][: ids[0].index(ids[0][2])]]


def test_beams_and_samples_come_prompt_by_prompt(call, tiny):
    limit = {"max_new_tokens": NEW, "detokenize": False}
    beams = {"num_beams": 3, "num_return_sequences": 2}
    sampling = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.7, "seed": 3}
    searched, sampled, again, beams_sampled, other = call(
        (TEXTS, {**limit, **beams}),
        (TEXTS, {**limit, **sampling, "num_return_sequences": 2}),
        (TEXTS, {**limit, **sampling, "num_return_sequences": 2}),
        (TEXTS, {**limit, **sampling, **beams}),
        (TEXTS, {**limit, **sampling, "num_return_sequences": 2, "seed": 4}),
    )
    assert searched == [row for text in TEXTS for row in expected_ids(tiny, text, **beams)]
    assert sampled == again != other
    assert len(beams_sampled) == 6 and beams_sampled != searched


def test_log_probabilities_are_the_models_own(call, tiny):
    _, model, tokenizer = tiny
    given = {"max_new_tokens": NEW, "detokenize": False, "return_output_log_probs": True}
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 9, "seed": 3}
    ways: list[dict] = [{}, {"num_beams": 3}, sampling]
    results = call(*((TEXTS[0], {**given, **way}) for way in ways))
    for ids, logprobs in results:
        prompt = tokenizer(TEXTS[0])["input_ids"]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)[range(len(ids)), ids]
        torch.testing.assert_close(torch.tensor(logprobs), wanted, rtol=1e-4, atol=1e-5)


def test_a_stop_string_ends_the_text_before_it(call):
    whole, *_ = call((TEXTS[0], {"max_new_tokens": 24}))
    stop = whole[5:8]
    given = {"max_new_tokens": 24, "stop": [stop, "never this"]}
    results = call(
        (TEXTS[0], given),
        (TEXTS[0], {**given, "stream": True}),
        (TEXTS[0], {**given, "num_beams": 2}),
    )
    assert results[0] == "".join(results[1]) == whole[: whole.index(stop)]
    assert stop not in results[2]


def test_a_peft_adapter_generates_as_in_peft(call, tiny, tmp_path):
    peft = pytest.importorskip("peft")
    folder = tiny[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**options, init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    (ids,) = expected_ids(tiny, TEXTS[0], model=adapted.eval())
    assert ids != expected_ids(tiny, TEXTS[0])[0]
    request = (TEXTS[0], {"max_new_tokens": NEW, "detokenize": False})
    assert call(request, lora=str(tmp_path), layout=(2, 1)) == [ids]


def test_a_script_of_the_original_runs(ranks, tiny):
    _, _, tokenizer = tiny
    script = gpt_model_ranks.seed_style_script
    results = ranks(2, script, str(tiny[0]), setup=SETUP, timeout=120)
    random, text = results[0]
    assert results[1] == results[0]
    assert text == tokenizer.decode(expected_ids(tiny, "the cat")[0], skip_special_tokens=True)
    assert random != text


def test_copies_of_the_model_share_the_prompts_and_draw_the_same(ranks, tiny):
    results = ranks(2, gpt_model_ranks.replicas, str(tiny[0]), setup=SETUP)
    for (shared, alone), first_pass in results:
        assert shared == alone == results[0][0][0]
        assert first_pass == [2]  # of four prompts


def test_a_model_without_tokenizer_continues_ids(ranks, tiny, tmp_path):
    tiny[1].save_pretrained(tmp_path)
    ids, message = ranks(1, gpt_model_ranks.ids_only, str(tmp_path), setup=SETUP)[0]
    assert len(ids[0]) <= 4
    assert "tokenizer" in message


BAD = {
    "num_return_sequences": ({"num_return_sequences": 2}, "--num-return-sequences 2 is more than"),
    "beams": ({"num_beams": 2, "num_return_sequences": 3}, "is more than --num-beams 2"),
    "temperature": ({"do_sample": True, "temperature": 0.0}, "--temperature 0.0"),
    "nan": ({"do_sample": True, "temperature": float("nan")}, "--temperature nan"),
    "both": ({"max_length": 9, "max_new_tokens": 3}, "max_length=9 and max_new_tokens=3"),
    "no room": ({"max_length": 2}, "leaves no room in max_length=2"),
    "min": ({"min_new_tokens": 300, "max_new_tokens": 3}, "--min-new-tokens 300"),
    "penalty": ({"repetition_penalty": 0.0}, "--repetition-penalty 0.0"),
    "stop": ({"stop": [""]}, "--stop ''"),
    "stream": ({"stream": True, "num_beams": 2}, "stream=True continues one prompt"),
    "eos": ({"tokenizer": 3}, "tokenizer is a int"),
}
BAD_PROMPTS = {
    "number": (3, "input_ids is a int"),
    "mixed": ([[1], "a", 2.5], "prompt 2 is neither"),
    "floats": (torch.ones(2, 2), "input_ids is a tensor of shape [2, 2] and dtype torch.float32"),
    "outside": ([[5, 10_000]], "outside the vocabulary"),
    "nothing": ([], "every prompt needs at least one token"),
}


def test_bad_keywords_and_prompts_get_one_message_each(call):
    requests = [("the cat", keywords) for keywords, _ in BAD.values()]
    requests += [(prompt, {"max_new_tokens": 3}) for prompt, _ in BAD_PROMPTS.values()]
    messages = [message for _, message in (*BAD.values(), *BAD_PROMPTS.values())]
    for result, message in zip(call(*requests), messages, strict=True):
        assert result.startswith(("ConfigError: ", "DataError: ")) and message in result


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_others(ranks, tiny):
    with pytest.raises(RankError) as failure:
        ranks(2, gpt_model_ranks.one_rank_fails, str(tiny[0]), setup=SETUP, timeout=120)
    assert failure.value.kind == "died"  # by itself; a rank that waits for ever would have hung
    assert "out of memory, say" in str(failure.value)
