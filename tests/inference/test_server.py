"""The server: OpenAI's formats, streams, limits, keys; no request can stop it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tests.support.lazy import Lazy, needs

needs("megatron.core", "fastapi")


from mindspeed.cli.main import main
from tests.inference import server_ranks, tiny_chat

transformers = Lazy("transformers")


SETUP = "tests.support.warm"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny_chat.write(folder), transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def ask(ranks, tiny):
    def run(*requests):
        return ranks(1, server_ranks.ask, str(tiny[0]), requests, setup=SETUP)[0]

    return run


def completion(**body):
    return ("POST", "/v1/completions", {"json": body})


def chat(**body):
    return ("POST", "/v1/chat/completions", {"json": body})


def events(text):
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def greedy_text(tiny, prompt, tokens):
    _, model, tokenizer = tiny
    inputs = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=1)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
SPECIAL = ("<|endoftext|>", "<|padding|>")
TOOLS_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{{ m.reasoning_content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}{% if m.role == 'tool' %}!{% endif %}\n{% endfor %}"
    "{{ 'quiet ' if quiet is defined and quiet }}assistant: "
)
CHAT_TEXT = "system: be brief\nuser: hello\nassistant: "


def test_completions_and_chats_return_the_text_of_the_model(ask, tiny):
    _, _, tokenizer = tiny
    ids = tokenizer("the cat")["input_ids"]
    base = {"temperature": 0, "max_tokens": 8, "model": "tiny"}
    parts = [MESSAGES[0], {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    answers = ask(
        completion(prompt="the cat", **base),
        completion(prompt=["the cat", "hello"], echo=True, **base),
        completion(prompt=ids, **base),
        completion(prompt=[ids, ids], **base),
        chat(messages=MESSAGES, **base),
        chat(messages=parts, **base),
        ("GET", "/v1/models", {}),
        ("GET", "/v1/models/tiny", {}),
        ("GET", "/health", {}),
    )
    assert [status for status, *_ in answers] == [200] * 9
    contents = [content for _, content, _ in answers]
    cat, hello = greedy_text(tiny, "the cat", 8), greedy_text(tiny, "hello", 8)
    assert [[c["text"] for c in content["choices"]] for content in contents[:4]] == [
        [cat],
        ["the cat" + cat, "hello" + hello],
        [cat],
        [cat, cat],
    ]
    assert contents[0]["object"] == "text_completion" and contents[0]["model"] == "tiny"
    usage = contents[0]["usage"]
    assert usage["prompt_tokens"] == len(ids) and 0 < usage["completion_tokens"] <= 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for content in contents[4:6]:
        (choice,) = content["choices"]
        wanted = greedy_text(tiny, CHAT_TEXT, 8)
        assert choice["message"] == {"role": "assistant", "content": wanted}
        assert choice["finish_reason"] == "length"
    assert contents[6]["data"][0]["id"] == contents[7]["id"] == "tiny"
    assert contents[8] == {"status": "ok", "waiting": 0}


def test_streams_give_the_same_text(ask, tiny):
    base = {"temperature": 0, "max_tokens": 10, "stream": True}
    with_usage = {"stream_options": {"include_usage": True}}
    answers = ask(
        completion(prompt="the cat", **base),
        chat(messages=MESSAGES, **base, **with_usage),
        completion(prompt="the cat", n=2, **{**base, "temperature": 0.9, "seed": 3}),
        completion(prompt="the cat", n=2, temperature=0.9, seed=3, max_tokens=10),
    )
    assert answers[0][2]["content-type"].startswith("text/event-stream")
    pieces = events(answers[0][1])
    text = "".join(piece["choices"][0]["text"] for piece in pieces)
    assert text == greedy_text(tiny, "the cat", 10) and len(pieces) > 3
    assert [piece["choices"][0]["finish_reason"] for piece in pieces][-1] == "length"
    first, *middle, usage = events(answers[1][1])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in middle)
    assert text == greedy_text(tiny, CHAT_TEXT, 10)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 10
    assert first["object"] == "chat.completion.chunk" and first["id"] == usage["id"]
    texts = ["", ""]
    for piece in events(answers[2][1]):
        texts[piece["choices"][0]["index"]] += piece["choices"][0]["text"]
    assert texts == [choice["text"] for choice in answers[3][1]["choices"]]
    assert texts[0] != texts[1]


def test_choices_without_draws_are_equal_and_run_once(ask, tiny):
    base = {"prompt": ["the cat", "hello"], "n": 2, "temperature": 0, "max_tokens": 6}
    whole, stream = ask(
        completion(**base, best_of=2, logprobs=1), completion(**base, stream=True, logprobs=1)
    )
    cat, hello = greedy_text(tiny, "the cat", 6), greedy_text(tiny, "hello", 6)
    choices = whole[1]["choices"]
    assert [choice["text"] for choice in choices] == [cat, cat, hello, hello]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert choices[0]["logprobs"] == choices[1]["logprobs"] != choices[2]["logprobs"]
    tokens = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
    assert whole[1]["usage"]["completion_tokens"] == tokens
    texts = [""] * 4
    for piece in events(stream[1]):
        texts[piece["choices"][0]["index"]] += piece["choices"][0]["text"]
    assert texts == [cat, cat, hello, hello]


def test_usage_says_what_was_not_computed_again(ask, tiny):
    _, _, tokenizer = tiny
    base = {"temperature": 0, "max_tokens": 8}
    user = {"role": "user", "content": "hello there, how are you today?"}
    answer = greedy_text(tiny, "user: hello there, how are you today?\nassistant: ", 8)
    longer = [user, {"role": "assistant", "content": answer}, user]
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    found = ask(
        chat(messages=[user], **base),
        chat(messages=longer, **base),
        chat(messages=longer, **base, **stream),
        completion(prompt=tokenizer("the cat " * 9)["input_ids"], echo=True, logprobs=0, **base),
        completion(prompt=["the cat " * 9] * 2, n=2, **base),
    )
    usages = [events(a[1])[-1]["usage"] if i == 2 else a[1]["usage"] for i, a in enumerate(found)]
    prompts = [usage["prompt_tokens"] for usage in usages]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    whole = [(size - 1) // 16 * 16 for size in prompts]
    assert prompts[0] >= 16  # a system prompt or an earlier turn is found again
    shared = prompts[0] + 8 - 1
    assert cached[:3] == [0, shared // 16 * 16, whole[2]]
    # All tokens of a prompt are computed where they are scored; then they are there for the next.
    assert cached[3] == 0 and cached[4] == 2 * ((prompts[3] - 1) // 16 * 16) > 0


def test_log_probabilities_have_openais_form(ask, tiny):
    base = {"temperature": 0, "max_tokens": 4}
    (_, whole, _), (_, talk, _), (_, stream, _) = ask(
        completion(prompt="the cat", logprobs=2, **base),
        chat(messages=MESSAGES, logprobs=True, top_logprobs=2, **base),
        chat(messages=MESSAGES, logprobs=True, stream=True, **base),
    )
    found = whole["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == 4
    assert found["token_logprobs"][0] == pytest.approx(max(found["top_logprobs"][0].values()))
    _, model, tokenizer = tiny
    ids = torch.tensor([tokenizer("the cat")["input_ids"]])
    best = model(ids).logits[0, -1].log_softmax(-1).max().item()
    assert found["token_logprobs"][0] == pytest.approx(best, abs=1e-4)
    content = talk["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [2] * 4
    assert content[0]["logprob"] == content[0]["top_logprobs"][0]["logprob"]
    streamed = [
        token["logprob"]
        for piece in events(stream)
        for token in (piece["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == pytest.approx([token["logprob"] for token in content])


def test_offsets_and_bytes_where_a_character_is_several_tokens(ask, tiny):
    _, model, tokenizer = tiny
    smile = tokenizer("\U0001f601")["input_ids"]  # not in the corpus: parts of a character
    size = len(smile)
    assert size > 2
    base = {"temperature": 0, "max_tokens": 4, "logprobs": 5}
    whole, stream, echo, scored, nothing = ask(
        completion(prompt="the cat", **base),
        completion(prompt="the cat", stream=True, **base),
        completion(prompt=smile, echo=True, **base),
        completion(prompt=smile, echo=True, **{**base, "max_tokens": 0}),
        completion(prompt=smile, echo=True, stream=True, **{**base, "max_tokens": 0}),
    )
    found = [answer[1]["choices"][0]["logprobs"] for answer in (whole, echo, scored)]
    pieces = [piece["choices"][0]["logprobs"] for piece in events(stream[1])]
    assert [o for p in pieces if p for o in p["text_offset"]] == found[0]["text_offset"]
    assert found[0]["text_offset"][0] == 0 and found[1]["text_offset"][: size + 1] == [0] * size + [
        1
    ]
    # max_tokens 0: the prompt and its scores, no more
    assert scored[1]["choices"][0]["text"] == "\U0001f601"
    assert found[2] == {name: values[:size] for name, values in found[1].items()}
    assert scored[1]["usage"]["completion_tokens"] == 0
    assert "".join(piece["choices"][0]["text"] for piece in events(nothing[1])) == "\U0001f601"

    [(_, talk, _)] = ask(
        chat(messages=MESSAGES, logprobs=True, top_logprobs=20, temperature=0, max_tokens=1)
    )
    prompt = torch.tensor([tokenizer(CHAT_TEXT)["input_ids"]])
    best = model(prompt).logits[0, -1].topk(20).indices.tolist()
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()}
    pieces = [tokenizer.convert_ids_to_tokens(token) for token in best]
    expected = [[alphabet[c] for c in p] if p not in SPECIAL else [] for p in pieces]
    top = talk["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["bytes"] for entry in top] == expected
    assert any(max(b, default=0) > 127 for b in expected)


def test_fields_of_the_history_are_rendered_or_refused(ask, ranks, tiny, tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    called = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    result = {"role": "tool", "tool_call_id": "1", "content": "sat"}
    thought = {"role": "assistant", "content": "hello", "reasoning_content": "the cat"}
    user = MESSAGES[1]
    requests = [
        chat(messages=[user, called, result], max_tokens=1),
        chat(messages=[user, thought, user], max_tokens=1),
    ]
    answers = ask(*requests, chat(messages=[user, {"role": "assistant", "content": None}]))
    said = [answer[1]["error"]["message"] for answer in answers]
    assert [answer[0] for answer in answers] == [400] * 3
    assert "does not render tool_calls" in said[0] and "reasoning_content" in said[1]
    assert "content is null" in said[2]

    folder = tmp_path / "tools"
    shutil.copytree(tiny[0], folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = TOOLS_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    set_by_request = chat(messages=[user], max_tokens=1, chat_template_kwargs={"quiet": True})
    refused = chat(messages=[user], chat_template_kwargs={"loud": True})
    more = [*requests, set_by_request, refused]
    ((*answers, error),) = ranks(1, server_ranks.ask, str(folder), more, setup=SETUP)
    assert error[0] == 400 and "has no variable 'loud'" in error[1]["error"]["message"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    call = {**call, "function": {"name": "f", "arguments": {"a": 1}}}  # as templates expect it
    for answer, history, variables in zip(
        answers,
        ([user, {**called, "tool_calls": [call]}, result], [user, thought, user], [user]),
        ({}, {}, {"quiet": True}),
        strict=True,
    ):
        right = tokenizer.apply_chat_template(
            history, add_generation_prompt=True, tokenize=False, **variables
        )
        assert answer[1]["usage"]["prompt_tokens"] == len(tokenizer(right)["input_ids"])


def test_concurrent_requests_share_forward_passes_and_get_unbatched_text(ranks, tiny):
    prompts = ["the cat", "hello there, how are you", "a", "mat and looked at"]
    (seen,) = ranks(1, server_ranks.at_once, str(tiny[0]), prompts, 3, setup=SETUP, timeout=120)
    assert seen["at once"] == seen["alone"]
    assert seen["alone"] == [greedy_text(tiny, p, 6 + n) for n, p in enumerate(prompts)]
    assert max(seen["sizes"]) == 3  # the fourth waits until the batch has room
    # One prefill per step, then the decode pass of that step. The first ends after six tokens.
    assert seen["sizes"][:6] == [1, 1, 1, 2, 1, 3]
    assert sum(seen["sizes"]) == sum(6 + n for n in range(4))
    assert len(seen["sizes"]) < 20


def test_a_prompt_is_scored_with_its_echo(ranks, tiny):
    _, model, tokenizer = tiny
    (found,) = ranks(1, server_ranks.echoed, str(tiny[0]), "the cat sat", setup=SETUP)
    whole, ended, stream = found
    ids = tokenizer("the cat sat")["input_ids"]
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    for choice, new in ((whole, 2), (ended, 1)):  # the end token is scored, but no text
        scores = choice["logprobs"]
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        assert scores["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-4)
        assert {len(scores[name]) for name in scores} == {len(ids) + new}
        assert scores["token_logprobs"][len(ids)] == pytest.approx(
            logprobs[-1].max().item(), abs=1e-4
        )
        best = [max(top.values()) for top in scores["top_logprobs"][1 : len(ids)]]
        assert best == pytest.approx(logprobs[:-1].max(-1).values.tolist(), abs=1e-4)
    assert "".join(whole["logprobs"]["tokens"]) == whole["text"]
    assert whole["logprobs"]["text_offset"][1] == len(whole["logprobs"]["tokens"][0])
    assert (ended["text"], ended["finish_reason"]) == ("the cat sat", "stop")
    streamed = [
        score
        for piece in events(stream)
        for score in (piece["choices"][0]["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    ]
    assert streamed == whole["logprobs"]["token_logprobs"]


def test_stop_strings_and_seeds(ask, tiny):
    text = greedy_text(tiny, "the cat", 20)
    stop = text[4:7]
    sampled = {"prompt": "the cat", "max_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 5}
    (_, whole, _), (_, one, _), (_, two, _) = ask(
        completion(prompt="the cat", temperature=0, max_tokens=20, stop=["never", stop]),
        completion(**sampled, top_k=30),
        completion(**sampled, top_k=30),
    )
    (choice,) = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")
    assert one["choices"] == two["choices"]


LARGE = {"content": b" " * 5000, "headers": {"Content-Type": "application/json"}}
PLAIN = {"content": b"{}", "headers": {"Content-Type": "text/plain"}}
BROKEN = {"content": b"{'", "headers": {"Content-Type": "application/json"}}
DEEP = {"content": b"[" * 3900, "headers": {"Content-Type": "application/json"}}
CAT = {"prompt": "the cat"}


def escaped(path, **body):
    """JSON in ASCII, with escapes."""
    content = json.dumps(body).encode()
    return ("POST", path, {"content": content, "headers": {"Content-Type": "application/json"}})


HALF = "the lone surrogate '\\ud83d' is not a complete character"

REFUSED = {
    "no prompt": (completion(), 400, "prompt"),
    "wrong type": (completion(prompt={"a": 1}), 400, "prompt"),
    "empty list": (completion(prompt=[]), 400, "at least one token"),
    "foreign ids": (completion(prompt=[5, 99999]), 400, "outside the vocabulary"),
    "negative ids": (completion(prompt=[-1]), 400, "outside the vocabulary"),
    "temperature": (completion(**CAT, temperature=-1), 400, "temperature"),
    "top_p": (completion(**CAT, top_p=0), 400, "top_p"),
    "n": (completion(**CAT, n=9), 400, "this server allows 4"),
    "best of": (completion(**CAT, n=2, best_of=3), 400, "best_of=3: answers are not ranked"),
    "tokens": (completion(**CAT, max_tokens=65), 400, "this server allows 64"),
    "min": (completion(**CAT, max_tokens=4, min_tokens=5), 400, "min_tokens=5 is more"),
    "context": (completion(prompt="cat " * 200), 400, "the model has 128 positions"),
    "model": (completion(**CAT, model="gpt-9"), 404, "gpt-9 does not exist"),
    "penalty": (completion(**CAT, presence_penalty=3), 400, "presence_penalty"),
    "bias": (completion(**CAT, logit_bias={"100000": 1}), 400, "300 entries has no 100000"),
    "large bias": (completion(**CAT, logit_bias={"1": 101}), 400, "logit_bias"),
    "unknown": (completion(**CAT, heat=1), 400, "the field heat is unknown"),
    "no tokens": (completion(**CAT, max_tokens=0), 400, "without echo: true"),
    "no answer": (chat(messages=MESSAGES, max_tokens=0), 400, "needs at least 1"),
    "stop": (completion(**CAT, stop=[""]), 400, "--stop ''"),
    "role": (chat(messages=[{"role": "robot", "content": "x"}]), 400, "messages.0.role"),
    "no messages": (chat(messages=[]), 400, "messages"),
    "late system": (chat(messages=MESSAGES[::-1], tools=[{}]), 400, "has no name"),
    "large": (("POST", "/v1/completions", LARGE), 413, "4,000 bytes"),
    "plain": (("POST", "/v1/completions", PLAIN), 415, "Content-Type: application/json"),
    "broken": (("POST", "/v1/completions", BROKEN), 400, "JSON"),
    "deep": (("POST", "/v1/completions", DEEP), 400, ""),
    "half": (escaped("/v1/completions", prompt="cat \ud83d"), 400, HALF),
    "half stop": (escaped("/v1/completions", **CAT, stop=["\ud83d"]), 400, HALF),
    "half name": (escaped("/v1/completions", **CAT, **{"\ud83d": 1}), 400, HALF),
    "half model": (escaped("/v1/completions", **CAT, model="\ud83d"), 400, HALF),
    "half talk": (
        escaped("/v1/chat/completions", messages=[{"role": "user", "content": "\ud83d"}]),
        400,
        HALF,
    ),
    "path": (("GET", "/v2/nothing", {}), 404, "/v2/nothing"),
    "method": (("DELETE", "/v1/completions", {}), 405, "DELETE"),
    "host": (("GET", "/v1/models", {"headers": {"Host": "evil.example"}}), 403, "localhost"),
}


def test_every_refusal_is_an_error_in_openais_form_and_the_server_goes_on(ask):
    *answers, last = ask(*(request for request, _, _ in REFUSED.values()), completion(**CAT))
    for name, answer, (_, status, message) in zip(REFUSED, answers, REFUSED.values(), strict=True):
        assert answer[0] == status, (name, answer)
        assert set(answer[1]["error"]) == {"message", "type", "param", "code"}, name
        assert message in answer[1]["error"]["message"], (name, answer)
    assert last[0] == 200


def test_an_api_key_grants_access(ranks, tiny):
    key = server_ranks.KEY
    headers = [
        {"Authorization": f"Bearer {key}"},
        {"Authorization": f"bearer {key}", "Host": "anywhere.example"},
        {},
        {"Authorization": f"Bearer {key}x"},
        {"Authorization": f"Basic {key}"},
        {"Authorization": ""},
    ]
    (statuses,) = ranks(1, server_ranks.with_key, str(tiny[0]), headers, setup=SETUP)
    assert statuses == [200, 200, 401, 401, 401, 401, 200]  # the last one is /health


def test_a_failing_model_a_full_queue_and_a_deadline_are_answers(ranks, tiny):
    (seen,) = ranks(1, server_ranks.failures, str(tiny[0]), setup=SETUP, timeout=120)
    statuses = {name: value[0] for name, value in seen.items() if name != "closed"}
    assert statuses == {
        "failed": 500,
        "failed stream": 500,
        "after": 200,
        "busy": 429,
        "too slow": 504,
        "end": 200,
    }
    assert "secret" not in json.dumps(seen["failed"][1])
    assert seen["after"][1]["choices"] == seen["end"][1]["choices"]
    assert seen["closed"] is False


def test_a_disconnected_client_ends_its_request(ranks, tiny):
    (passes,) = ranks(1, server_ranks.leaving, str(tiny[0]), setup=SETUP)
    assert passes == 2  # of sixty


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "is reachable from other machines: set a key in MINDSPEED_API_KEY"),
        (["--port", "70000"], "--port 70000"),
        (["--max-waiting", "0"], "--max-waiting 0"),
        (["--request-timeout", "nan"], "--request-timeout nan"),
        (["--max-connections-per-address", "-1"], "--max-connections-per-address -1"),
        (["--max-connections", "99999999"], "raise the limit (ulimit -n)"),
        (["--api-key-file", "/no/such"], "--api-key-file /no/such: there is no such file"),
        (["--prompt-type", "alpaca", "--hf-chat-template"], "give either it or --hf-chat-template"),
    ],
)
def test_wrong_flags_are_refused_before_the_model_is_loaded(words, message, capsys, monkeypatch):
    monkeypatch.delenv("MINDSPEED_API_KEY", raising=False)
    assert main(["serve", "--load", "nowhere", *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_server_on_two_ranks_answers_and_ends_well(ranks, tiny):
    words = ["serve", f"--load=hf:{tiny[0]}", "--tp=2", "--port=0", "--model-name=tiny"]
    body = {"prompt": "the cat", "temperature": 0, "max_tokens": 6}
    given = words, [body] * 2, "k"
    found = ranks(1, server_ranks.launched, *given, setup=SETUP, backend=None, timeout=200)
    ((texts, status, log),) = found
    assert texts == [greedy_text(tiny, "the cat", 6)] * 2
    assert status == 0, log
    assert "Traceback" not in log
