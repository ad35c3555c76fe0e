"""Keep the table of Megatron versions in docs/installation.md: what trains with each of them.

python tools/megatron_versions.py                        write the table from
                                                         docs/megatron_versions.toml
python tools/megatron_versions.py --check                fail where it is out of date
python tools/megatron_versions.py --measure 0.15.3       train with this release of PyPI, keep what
                                                         comes out
python tools/megatron_versions.py --measure main=DIR     the same for a checkout or unpacked wheel
python tools/megatron_versions.py --measure 0.15.3 --only pipeline mla-tensor
python tools/megatron_versions.py --check --measure 0.15.3
                                                         fail where it is not as the table says

Each job trains a tiny model for three steps on CPU ranks that find this Megatron first, in our
trainer with default flags. It is ``equal`` when losses are within 1e-6 and gradient norms within
1e-4, relative, of those of one rank of the same version that started with the same weights.
Anything else is kept in words: what is ``refused`` by name, and what is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import platform
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version as installed
from pathlib import Path

from feature_table import ROOT, update
from megatron_release import Data, load, release, store
from packaging.version import Version

sys.path.insert(0, str(ROOT))

from mindspeed.adaptor.contract import check_contracts
from mindspeed.adaptor.inventory import all_patches
from mindspeed.adaptor.versions import is_tested
from mindspeed.errors import MindSpeedError
from mindspeed.testing import RankError, RankPool
from tests.support.trainer_job import SETUP
from tests.training.instruction_job import flags_for, write_conversations
from tests.training.one_rank import OneRank, assert_same_training
from tests.training.test_layouts import (
    GQA,
    LAYOUTS,
    LOCAL,
    MLA,
    MOE,
    MTP,
    MTP_TIED,
    PP,
    TIED,
    TP,
    UNTIED,
)
from tests.training.test_moe_dispatchers import LAYOUTS as DISPATCHERS

PAGE = ROOT / "docs" / "installation.md"
DATA = ROOT / "docs" / "megatron_versions.toml"
_HEAD = "# What trains with each Megatron; written by tools/megatron_versions.py --measure.\n"
_STACK = {"python": "Python", "torch": "PyTorch", "patches": "patches whose target differs"}
EQUAL = "equal"

SP = f"{TP} --sequence-parallel"
VPP = f"{PP} --num-layers-per-virtual-pipeline-stage 1"
EP = "--expert-model-parallel-size 2"
CP = "--micro-batch-size 2 --context-parallel-size 2 --cp-comm-type"
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SEQUENTIAL = MOE.replace("--moe-grouped-gemm", "")
BALANCED = MOE.replace("type none", "type aux_loss") + (
    " --moe-aux-loss-coeff 1 --moe-z-loss-coeff 0.1 --calculate-per-token-loss"
    " --micro-batch-size 2 --lr 0"
)
"""Micro-batches as in the layouts: the loss is not linear. Gradients alone, without a step of Adam,
which from a gradient of nearly zero has either sign."""


@dataclass(frozen=True)
class Job:
    """A training that must equal that of one rank.

    Attributes:
        shown: in words.
        ranks: number of processes.
        model: flags of the model, also those of the one rank.
        flags: the layout.
        resumed: the third step is done by so many ranks with other flags, from a checkpoint.
        node: so many ranks are a node; 0 for all.
        conversations: samples are conversations, whose answers alone have a loss.
        adapters: the model is frozen, and adapters in its layers are trained.
        rounded: relative tolerance of losses and of gradient norms, where the flags round.
    """

    shown: str
    ranks: int
    model: str
    flags: str
    resumed: tuple[int, str] | None = None
    node: int = 0
    conversations: bool = False
    adapters: bool = False
    rounded: tuple[float, float] = (1e-6, 1e-4)


def _moe(dispatcher: str, model: str = MOE) -> str:
    return model.replace("alltoall", dispatcher)


BASE = {
    "data": Job("data parallel", 2, TIED, ""),
    "tensor": Job("tensor parallel", 2, GQA, TP),
    "sequence": Job("tensor and sequence parallel", 2, TIED, SP),
    "pipeline": Job("pipeline", 2, TIED, PP),
    "virtual-pipeline": Job("virtual pipeline", 2, GQA, VPP),
    "tensor-pipeline": Job("tensor, sequence and virtual pipeline", 4, GQA, f"{SP} {VPP}"),
    "context-p2p": Job("context parallel, ring", 2, GQA, f"{CP} p2p"),
    "context-a2a": Job("context parallel, Ulysses", 2, GQA, f"{CP} a2a"),
    "context-all-gather": Job("context parallel, all-gather", 2, GQA, f"{CP} all_gather"),
    "optimizer": Job("distributed optimizer with overlaps", 2, GQA, OVERLAPS),
    "optimizer-pipeline": Job("the same with a virtual pipeline", 4, GQA, f"{VPP} {OVERLAPS}"),
    "experts-alltoall": Job("expert parallel, all-to-all, grouped GEMM", 2, MOE, EP),
    "experts-allgather": Job("expert parallel, all-gather, grouped GEMM", 2, _moe("allgather"), EP),
    "experts-sequential": Job("experts one by one, all-to-all", 2, SEQUENTIAL, EP),
    "experts-sequential-allgather": Job(
        "experts one by one, all-gather", 2, _moe("allgather", SEQUENTIAL), EP
    ),
    "experts-tensor": Job(
        "experts and tensor parallel", 4, MOE, f"{SP} {EP} --expert-tensor-parallel-size 2"
    ),
    "balanced-sequence": Job(
        "balancing losses, loss per token, tensor and sequence parallel", 2, BALANCED, SP
    ),
    "balanced-context": Job(
        "balancing losses, loss per token, context parallel", 2, BALANCED, f"{CP} p2p"
    ),
    "mla-tensor": Job("latent attention, tensor and sequence parallel", 2, MLA, SP),
    "mla-pipeline": Job("latent attention, pipeline", 2, MLA, PP),
    "mla-context": Job("latent attention, context parallel", 2, MLA, f"{CP} p2p"),
    "local-tensor": Job("local spec, tensor parallel", 2, LOCAL, TP),
    "local-sequence": Job("local spec, sequence parallel", 2, LOCAL, SP),
    "local-pipeline": Job("local spec, pipeline, overlaps", 4, LOCAL, f"{PP} {OVERLAPS}"),
    "local-experts": Job("local spec, experts", 2, f"{MOE} --transformer-impl local", EP),
    "local-mla": Job("local spec, latent attention", 2, f"{MLA} --transformer-impl local", TP),
    "resume-tensor-pipeline": Job(
        "saved by tensor parallel, resumed by a pipeline", 2, UNTIED, TP, (2, PP)
    ),
    "resume-optimizer": Job(
        "saved by the distributed optimizer, resumed on one rank",
        2,
        GQA,
        f"{TP} --use-distributed-optimizer",
        (1, "--use-distributed-optimizer"),
    ),
    "resume-experts": Job("experts saved apart, resumed on one rank", 2, MOE, EP, (1, "")),
}
"""What a version must do to be supported."""

ALGORITHM = "--micro-batch-size 2 --context-parallel-size 2 --context-parallel-algo"
FOLDER = "FOLDER"
"""In flags: where a job may write."""
SHARED = f"{MOE} --moe-shared-expert-intermediate-size 64"
ADAPTERS = "--lora-target-modules q_proj k_proj v_proj o_proj --lora-r 4 --lora-alpha 8 --lr 1e-2"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
FUSED = (
    "--use-flash-attn --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb "
    "--attention-mask-type causal"
)
FEATURES = {
    "fused": Job("fused operators", 2, GQA, f"{SP} {FUSED}"),
    "fused-permute": Job(
        "fused permutation", 2, MOE, f"{EP} --use-fused-moe-token-permute-and-unpermute"
    ),
    "alibi": Job(
        "ALiBi", 2, f"{GQA} --position-embedding-type alibi", f"{ALGORITHM} ulysses_cp_algo"
    ),
    "window": Job(
        "sliding window", 2, f"{GQA} --window-size 20,0 --window-attn-skip-freq 2", f"{CP} p2p"
    ),
    "documents": Job(
        "documents that do not see each other",
        2,
        f"{GQA} --reset-attention-mask --reset-position-ids",
        TP,
    ),
    "hybrid": Job(
        "ring and Ulysses",
        4,
        GQA,
        "--micro-batch-size 2 --context-parallel-size 4 --context-parallel-algo hybrid_cp_algo "
        "--ulysses-degree-in-cp 2",
    ),
    "key-cache": Job(
        "keys of the ring kept",
        2,
        GQA,
        f"{ALGORITHM} megatron_cp_algo --use-fused-ring-attention-update "
        "--context-parallel-kv-cache-policy full --context-parallel-cache-interval 1",
    ),
    "key-gather": Job(
        "keys gathered in groups of heads",
        2,
        GQA,
        f"{ALGORITHM} kvallgather_cp_algo --kvallgather-head-groups 2",
    ),
    "by-layer": Job("an algorithm for each layer", 2, GQA, f"{CP} p2p a2a all_gather p2p"),
    "adaptive": Job("plans by the mask", 2, GQA, f"{ALGORITHM} adaptive_cp_algo"),
    "coc": Job("products in parts", 2, GQA, f"{SP} --use-ascend-coc --coc-parallel-num 2"),
    "mc2": Job("product and collective in one kernel", 2, GQA, f"{SP} --use-ascend-mc2"),
    "halves": Job("layers in two halves", 2, GQA, f"{SP} --half-batch-overlap"),
    "tensor-2d": Job(
        "tensor parallelism on a grid",
        4,
        GQA,
        "--micro-batch-size 2 --tensor-model-parallel-size 4 --tp-2d --tp-x 2 --tp-y 2",
    ),
    "unaligned": Job("sizes that do not divide", *LAYOUTS["unaligned-tensor"]),
    "mlp-fusion": Job("gate and up projection in one", 2, GQA, f"{TP} --mlp-layer-fusion"),
    "recompute": Job("full recomputation", 2, GQA, f"{SP} {RECOMPUTE}"),
    "recompute-communication": Job(
        "recomputation without communication",
        2,
        GQA,
        f"{SP} {RECOMPUTE} --optimize-recomp-communication-level 2",
    ),
    "recompute-parts": Job(
        "norms and activations recomputed",
        2,
        GQA,
        f"{TP} --recompute-norm --recompute-activation-function",
    ),
    "recompute-bubble": Job(
        "recomputation in the bubble",
        2,
        GQA,
        f"{VPP} --recompute-in-bubble",
    ),
    "recompute-advance": Job(
        "recomputation in advance",
        2,
        GQA,
        f"{VPP} --recompute-in-advance --recompute-granularity full --recompute-method block "
        "--recompute-num-layers 1",
    ),
    "plan": Job(
        "a plan for each activation",
        2,
        GQA,
        f"{TP} --activation-plan {ROOT / 'tools' / 'megatron_versions_plan.yaml'}",
    ),
    "adaptive-memory": Job(
        "activations within a memory budget",
        2,
        GQA,
        f"{TP} --adaptive-memory-optimization --adaptive-recompute-profiling-step 1",
    ),
    "swap": Job("activations in host memory", 2, GQA, f"{TP} --swap-attention --swap-min-bytes 0"),
    "uneven": Job("stages with other numbers of layers", 2, GQA, f"{PP} --num-layer-list 1,3"),
    "noop": Job("layers that compute nothing", *LAYOUTS["uneven-virtual-pipeline-noop"]),
    "schedule": Job("schedule by name", 2, GQA, f"{PP} --pipeline-schedule zb-h1"),
    "v-shape": Job("schedule in a V-shape", 2, GQA, f"{PP} --schedules-method dualpipev"),
    "wave": Job("schedule in waves", 2, GQA, f"{VPP} --pipeline-schedule wave"),
    "zb-wave": Job("the same with zero bubble", 2, GQA, f"{VPP} --pipeline-schedule zb-wave"),
    "v-half": Job("half of the activations", 2, GQA, f"{PP} --pipeline-schedule v-half"),
    "v-min": Job("a third of the activations", 2, GQA, f"{PP} --pipeline-schedule v-min"),
    "nanopipe": Job("nano-pipe", 2, GQA, f"{VPP} --use-nanopipe"),
    "fold3d": Job("Fold3D", 4, GQA, f"{VPP} --fold-mode aiao --overlap-grad-reduce"),
    "send-recv": Job("messages of both directions", 2, GQA, f"{PP} --optimize-send-recv-comm"),
    "several-tensors": Job(
        "stages that send several tensors",
        2,
        GQA,
        f"{PP} --use-multiparameter-pipeline-model-parallel",
    ),
    "lengths": Job("micro-batches of other lengths", 2, GQA, f"{PP} --variable-seq-lengths"),
    "sizes": Job(
        "micro-batches of other sizes",
        2,
        GQA,
        f"{PP} --micro-batch-size 2 --optimized-pipeline --manual-mbs 1,3",
    ),
    "automated": Job(
        "automated pipeline",
        2,
        GQA,
        f"{PP} --num-layer-list 3,1 --recompute-module-list 2,1 --recompute-type 0",
    ),
    "whole-experts": Job(
        "whole experts on tensor-parallel ranks", 4, MOE, f"{SP} {EP} --moe-tp-extend-ep"
    ),
    "gather": Job(
        "experts: all-gather hidden",
        2,
        SHARED,
        f"{EP} --moe-token-dispatcher-type allgather --moe-allgather-overlap-comm",
    ),
    "dedup": Job(
        "experts: each token sent once",
        2,
        SHARED,
        f"{EP} --moe-alltoall-exchange dedup --moe-alltoall-overlap-comm",
    ),
    "nodes": Job("experts: by nodes", *DISPATCHERS["hierarchical"], node=2),
    "zero-memory": Job("experts keep next to nothing", 2, MOE, f"{EP} --moe-zero-memory level1"),
    "device-sizes": Job(
        "experts: sizes on the device, steps computed again",
        2,
        MOE,
        f"{EP} --moe-alltoall-overlap-comm --moe-device-bound 1",
    ),
    "fp8-dispatch": Job(
        "experts: tokens in eight bits, losses within 1e-3",
        2,
        f"{MOE} --hidden-size 128",
        f"{EP} --moe-fp8-dispatch both",
        rounded=(1e-3, 3e-2),
    ),
    "log-load": Job("loads of experts in the log", 2, MOE, f"{EP} --moe-log-load {FOLDER}/load"),
    "record-routing": Job(
        "routing recorded", 2, MOE, f"{EP} --moe-record-routing {FOLDER}/routing"
    ),
    "placement": Job(
        "experts in other places",
        2,
        MOE,
        f"{EP} --moe-expert-placement {ROOT / 'tools' / 'megatron_versions_slots.json'}",
    ),
    "exchange": Job("experts exchanged in the run", 2, MOE, f"{EP} --moe-exchange-interval 1"),
    "mtp": Job("multi-token prediction", 2, MTP, TP),
    "mtp-context": Job("multi-token prediction, context parallel", 2, MTP, f"{CP} p2p"),
    "mtp-pipeline": Job("multi-token prediction, pipeline", 2, MTP_TIED, PP),
    "mtp-conversations": Job(
        "multi-token prediction, context parallel, losses of answers, per token",
        2,
        f"{MTP} --calculate-per-token-loss",
        "--context-parallel-size 2 --cp-comm-type p2p",
        conversations=True,
    ),
    "lora-tensor": Job("LoRA, tensor and sequence parallel", 2, GQA, SP, adapters=True),
    "lora-pipeline": Job("LoRA, pipeline", 2, GQA, PP, adapters=True),
    "lora-context": Job("LoRA, context parallel", 2, GQA, f"{CP} p2p", adapters=True),
    "lora-experts": Job("LoRA, expert parallel", 2, MOE, EP, adapters=True),
    "zero-2": Job("ZeRO 2", 2, TIED, "--zero-stage 2"),
    "zero-3": Job("ZeRO 3", 2, TIED, "--zero-stage 3"),
    "zero-3-experts": Job("ZeRO 3 with experts", 4, MOE, f"{EP} --zero-stage 3"),
    "instances": Job("several instances of the optimizer", *LAYOUTS["optimizer-instances-experts"]),
    "host-optimizer": Job(
        "optimizer states in host memory", 2, GQA, "--use-distributed-optimizer --swap-optimizer"
    ),
    "average": Job(
        "Adam with averages of weights",
        2,
        f"{GQA} --optimizer-selection fused_ema_adamw --ema-decay 0.9",
        f"{TP} {OVERLAPS}",
    ),
    "cadam": Job("Cadam", 2, f"{GQA} --optimizer cadam --adam-beta1 0.965", TP),
    "quantized": Job("optimizer states in fp8", 2, f"{GQA} --bf16 --quant-states fp8", PP),
    "reused": Job("weights within the main weights", 2, f"{GQA} --bf16 --reuse-fp32-param", PP),
    "record": Job("tensors recorded", 2, GQA, f"{TP} --record {FOLDER}/tensors"),
    "no-gloo": Job("no Gloo groups", 2, GQA, f"{TP} --disable-gloo-group"),
}
"""What our features do with it."""
JOBS = BASE | FEATURES


def measure(version: str, directory: str, jobs: Mapping[str, Job]) -> dict[str, str]:
    """What each job does with a Megatron, as :func:`megatron_release.release` has it."""
    with release(version, directory) as folder, tempfile.TemporaryDirectory() as scratch:
        findings = check_contracts(all_patches(), folder)
        found = {
            "python": ".".join(platform.python_version_tuple()[:2]),
            "torch": installed("torch").partition("+")[0],
            "patches": str(sum(bool(finding.problem) for finding in findings)),
        }
        sys.path.insert(0, str(folder))  # that of the ranks, too
        found |= verdicts(version, jobs, Path(scratch))
        sys.path.remove(str(folder))
    return found


def verdicts(version: str, jobs: Mapping[str, Job], scratch: Path) -> dict[str, str]:
    """What each job does on ranks that find the packages of this process, printed one by one.

    Args:
        version: for the lines that are printed.
        scratch: folder of checkpoints and records.
    """
    found = {}
    with RankPool({"MINDSPEED_ALLOW_UNTESTED": "1"}) as pool:
        trainings = Trainings(pool, scratch)
        for name, job in jobs.items():
            with contextlib.redirect_stdout(io.StringIO()):  # of the ranks
                found[name] = trainings.verdict(job)
            print(f"{version} {name}: {found[name]}", flush=True)
    return found


class Trainings:
    """Trainings on ranks that find the Megatron in question.

    Args:
        pool: of these ranks.
        scratch: folder of checkpoints and records.
    """

    def __init__(self, pool: RankPool, scratch: Path) -> None:
        self._pool = pool
        self._scratch = scratch
        self._one_ranks: dict[str, OneRank | RankError] = {}

    def verdict(self, job: Job) -> str:
        """``equal``, or what is wrong."""
        try:
            reference = self._one_rank(
                job.model + (self._conversations() if job.conversations else "")
            )
            expected, flags = reference.records, job.flags.replace(FOLDER, str(self._scratch))
            if job.adapters:
                adapters = self._adapters(reference)
                expected, flags = reference.plain(1, adapters), f"{flags} {adapters}"
            if job.resumed is None:
                nodes = {"LOCAL_WORLD_SIZE": str(job.node)} if job.node else None
                found = reference.train(job.ranks, flags, nodes)
            else:
                ranks, later = job.resumed
                found = reference.resumed((job.ranks, ranks), (flags, later))
                expected = expected[2:]
            loss, norm = job.rounded
            assert_same_training(found, expected, loss=loss, norm=norm)
        except RankError as error:
            return reason(error)
        except AssertionError as error:
            return f"differs: {str(error).splitlines()[0]}"
        return EQUAL

    def _conversations(self) -> str:
        """Flags of a data set that is written at the first call."""
        prefix = self._scratch / "conversations"
        if not prefix.exists():
            options = {"setup": SETUP, "backend": None}
            self._pool.run(1, write_conversations, str(prefix), **options)
            prefix.touch()
        return " " + " ".join(flags_for(prefix, "--micro-batch-size 1"))

    def _adapters(self, reference: OneRank) -> str:
        """Flags that load adapters of a model, which one rank trains at the first call."""
        folder = reference.directory / "adapters"
        if not folder.exists():
            reference.train(1, f"{ADAPTERS} --save {folder}")
        return f"--lora-load {folder}"

    def _one_rank(self, model: str) -> OneRank:
        """The run of a model that its layouts are compared with."""
        if model not in self._one_ranks:
            folder = Path(tempfile.mkdtemp(dir=self._scratch))
            try:
                self._one_ranks[model] = OneRank(self._pool.run, folder, model)
            except RankError as error:
                self._one_ranks[model] = error
        found = self._one_ranks[model]
        if isinstance(found, RankError):
            raise found
        return found


def reason(error: RankError) -> str:
    """Why a rank did not train, in one line."""
    original = error.original
    if isinstance(original, MindSpeedError):
        return f"refused: {' '.join(str(original).split())}"
    if original is None:
        return f"failed: {error.kind}"
    places = re.findall(r'File "\S*?((?:megatron|mindspeed)/\S+)", line (\d+)', str(error))
    where = f" in {places[-1][0]}:{places[-1][1]}" if places else ""
    return f"failed: {type(original).__name__}: {' '.join(str(original).split())[:200]}{where}"


def table(data: Data, stack: Mapping[str, str] = _STACK, more: Mapping[str, str] = {}) -> str:
    """One row for each name of the stack, each job and what there is more, one column a version."""
    rows = {name: job.shown for name, job in JOBS.items()} | more
    lines = ["| | " + " | ".join(data) + " |", "|---|" + "---|" * len(data)]
    for name, shown in {**stack, **rows}.items():
        cells = (_cell(name, found) for found in data.values())
        lines.append(f"| {shown} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(name: str, found: Mapping[str, str]) -> str:
    text = found.get(name, "")
    return text.partition(":")[0]


def tested(data: Data) -> list[str]:
    """The versions that do all that is asked for."""
    return [
        version
        for version, found in data.items()
        if all(found.get(name) == EQUAL for name in BASE) and found["patches"] == "0"
    ]


def problems(data: Data) -> list[str]:
    """Releases that the library accepts though they are not tested, and the other way round."""
    accepted = {version for version in data if version[0].isdigit() and is_tested(Version(version))}
    wrong = accepted.symmetric_difference(
        version for version in tested(data) if version[0].isdigit()
    )
    return [f"{version}: the table and TESTED in mindspeed/adaptor differ" for version in wrong]


def main(arguments: list[str] | None = None) -> int:
    """Measure versions, and write or check the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail if needed")
    parser.add_argument("--measure", nargs="+", metavar="VERSION[=DIR]", default=[])
    parser.add_argument("--only", nargs="+", metavar="JOB", choices=JOBS, default=list(JOBS))
    args = parser.parse_args(arguments)
    data, jobs = load(DATA), {name: JOBS[name] for name in args.only}
    wrong = []
    for one in args.measure:
        version, _, directory = one.partition("=")
        found, before = measure(version, directory, jobs), data.get(version, {})
        if args.check:
            wrong += [
                f"{version} {name}: {found[name]}; the table has: {before.get(name, 'nothing')}"
                for name in ("patches", *jobs)
                if found[name] != before.get(name)
            ]
            continue
        data[version] = before | found
        store(DATA, _HEAD, data)
        data = load(DATA)
    for problem in (wrong := wrong + problems(data)):
        print(problem, file=sys.stderr)
    tables = {PAGE: {"megatron-versions": table(data)}}
    outdated = update(tables, "megatron_versions", check=args.check)
    return int(bool(wrong or outdated))


if __name__ == "__main__":
    sys.exit(main())
