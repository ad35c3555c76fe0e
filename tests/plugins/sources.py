"""Source code of the packages that the tests install."""

FEATURE = """
from mindspeed.features.feature import Feature
from mindspeed.flags import flag


class Gain(Feature, name="acme-gain", level=2, seams=("log",)):
    '''A gain.'''

    acme_gain: float = flag(1.0, "gain", aliases=("--acme-amplification",))

    def attach(self, seams, megatron):
        seams.{seam}.add(lambda *args: None, owner="acme-gain")
"""

FAMILY = """
from mindspeed.models.families import FAMILIES
from dataclasses import replace

FAMILY = replace(FAMILIES["llama"], name="acme", model_types=("{kind}",), {more})
"""

TASK = """
from mindspeed.evaluation.task import Task

TASK = Task(
    name="acme-sums",
    title="sums",
    files=("*.jsonl",),
    format="jsonl",
    fields={"question": "str", "answer": "str"},
    prompt="{question}",
    score="acme_task:judge",
    prepare="acme_task:prepare",
    max_new_tokens=4,
)


def prepare(record):
    return {"target": record["answer"][::-1]}


def judge(text, target):
    return sum(map(int, text.split("+"))) == int(target)
"""

DEVICE = """
from types import SimpleNamespace

from mindspeed.device import Accelerator

LOG = []


class Acme(Accelerator):
    name = "xpu"  # a kind of torch.device
    backend = "gloo"
    _capabilities = frozenset({"streams"})
    _core_counts = ("engines",)

    def __init__(self):
        super().__init__(
            SimpleNamespace(
                current_device=lambda: 1,
                device_count=lambda: 2,
                mem_get_info=lambda: (40, 50),
                memory_allocated=lambda: 10,
                max_memory_allocated=lambda: 20,
                memory_reserved=lambda: 30,
                get_device_properties=lambda index: SimpleNamespace(
                    name=f"Acme {index}", total_memory=50, engines=7
                ),
            )
        )

    def install(self, journal):
        LOG.append("installed")
"""
