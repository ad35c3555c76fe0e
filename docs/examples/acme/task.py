"""``mindspeed evaluate --task acme-capitals``: a new benchmark with its own scoring function."""

from mindspeed.evaluation.task import Task


def judge(text, target):
    """Whether the generated ``text`` names the capital, in any case."""
    return target.casefold() in text.casefold()


TASK = Task(
    name="acme-capitals",
    title="capitals of countries",
    files=("*.jsonl",),  # below --task-data-path
    format="jsonl",
    fields={"country": "str", "answer": "str"},
    prompt="The capital of {country} is",
    score="acme.task:judge",
    stop=("\n",),
    max_new_tokens=8,
)
