"""One import installs, configure attaches, undo restores.

Each test is a process of its own, forked from one that has imported torch; where it matters what a
process has imported, a new one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.adaptor import session_job

PRELUDE = "import os, sys, json, torch\n"


@pytest.fixture
def python(ranks):
    """``python(code, **environment)``: what the code prints, and its traceback."""

    def run(code: str, **env: str) -> tuple[str, str]:
        (answer,) = ranks(1, session_job.run, code, backend=None, env=env, timeout=180)
        return answer

    return run


@pytest.fixture
def result(python):
    """``result(code, **environment)``: the JSON that the code prints last."""

    def run(code: str, **env: str):
        output, error = python(code, **env)
        assert not error, error
        return json.loads(output.strip().splitlines()[-1])

    return run


def in_a_new_process(code: str):
    """The JSON that the code prints last."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env={**os.environ, "MINDSPEED_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_the_process_that_is_forked_has_nothing_to_patch(ranks):
    # A server of its own: that of other tests has loaded what their modules import.
    (names,) = ranks(1, session_job.loaded, setup="mindspeed.testing", backend=None)
    assert "mindspeed.testing" in names
    assert not [name for name in names if name.startswith(("megatron", "mindspeed.adaptor"))]
    assert not {"mindspeed.session", "mindspeed.megatron_adaptor"} & set(names)


@pytest.fixture(scope="module")
def imported():
    """What the import line loads, in a new process: rooms of ours, and all packages."""
    return in_a_new_process(
        "import torch.distributed\n"
        "before = set(sys.modules)\n"
        "import mindspeed.megatron_adaptor\n"
        "new = [m.split('.') for m in set(sys.modules) - before]\n"
        "rooms = sorted({name[1] for name in new if name[0] == 'mindspeed' and name[1:]})\n"
        "print(json.dumps([rooms, sorted({'.'.join(name[:3]) for name in new})]))"
    )


def test_import_installs_without_importing_megatron(imported):
    _, packages = imported
    assert [name for name in packages if name.startswith("megatron.")] == []


def test_import_loads_the_adaptor_and_no_algorithm(imported):
    """What a script pays for the line; algorithms are imported by the features that need them."""
    rooms, costly = imported
    assert not set(costly) & {"sympy", "rich", "torch.distributed.tensor", "torch._dynamo"}, costly
    assert set(rooms) == {
        "adaptor", "device", "errors", "features", "files", "flags", "journal", "megatron_adaptor",
        "optimizer", "original", "plugins", "processes", "ranges", "security", "session", "spmd",
        "te", "tensor_parallel", "unpickle",
    }  # fmt: skip


@pytest.mark.parametrize("enabled", [True, False])
def test_import_does_not_collect_the_garbage_of_torch(result, enabled):
    """A full collection after ``import torch`` takes half as long as the import line."""
    generations, left_enabled = result(
        "import gc\n"
        f"gc.enable() if {enabled} else gc.disable()\n"
        "seen = []\n"
        "gc.callbacks.append(lambda phase, info: seen.append(info['generation']))\n"
        "import mindspeed.megatron_adaptor\n"
        "print(json.dumps([seen, gc.isenabled()]))"
    )
    assert 2 not in generations
    assert len(generations) <= (4 if enabled else 0)  # start and end; once allowed again
    assert left_enabled is enabled


def test_import_after_megatron_is_refused_with_the_right_order(python):
    _, error = python("import megatron.core\nimport mindspeed.megatron_adaptor")
    assert "import mindspeed.megatron_adaptor before megatron.core" in error


def test_at_most_eight_targets_are_patched_with_no_feature_on(result):
    """Repairs of Megatron's defects are not counted: they are always on."""
    owners = result(
        "import mindspeed.megatron_adaptor\n"
        "from mindspeed import session\n"
        "import mindspeed; mindspeed.configure()\n"
        "stacks = session.current().engine.stacks().values()\n"
        "print(json.dumps([[patch.owner for patch in patches] for patches, _ in stacks]))"
    )
    features = [names for names in owners if not all(n.startswith("repair:") for n in names)]
    assert len(features) <= 8 and len(owners) > len(features)


UNDO = """
import importlib, pkgutil, types
import torch.cuda.amp, torch.distributed, torch.distributed.device_mesh, torch.utils.checkpoint

def snapshot():
    import megatron.core.tensor_parallel.random, megatron.core.parallel_state
    roots = [m for n, m in list(sys.modules.items())
             if isinstance(m, types.ModuleType) and n.split('.')[0] in ('torch', 'megatron')]
    holders = {m.__name__: m for m in roots}
    for m in roots:
        for k, v in list(vars(m).items()):
            if isinstance(v, type) and getattr(v, '__module__', '').split('.')[0] in holders:
                holders.setdefault(f'{v.__module__}.{v.__qualname__}', v)
    holders['torch.Tensor'] = torch.Tensor
    # Numbers: whoever holds a function itself would be refused as one that cannot be patched.
    return {(h, k): id(v) for h, o in holders.items() for k, v in list(vars(o).items())}

def changed(before, after):
    ignore = {'__warningregistry__', '__annotations_cache__', '__annotate_func__'}
    return sorted(f'{h}.{k}' for (h, k), v in before.items()
                  if k not in ignore and after.get((h, k), None) != v)
"""


def test_undo_restores_every_object_of_torch_and_megatron(result):
    """Megatron is imported before, natively, so that the adaptor patches and restores it."""
    report = result(
        UNDO + "before = snapshot()\n"
        "from mindspeed import session, te\n"
        "te.choose = lambda device: ('native', 'Megatron is loaded already')\n"
        "session.install()\n"
        "patched = changed(before, snapshot())\n"
        "import mindspeed; mindspeed.undo()\n"
        "print(json.dumps([patched, changed(before, snapshot())]))"
    )
    patched, left = report
    assert "megatron.core.parallel_state.destroy_model_parallel" in patched
    assert any(name.startswith("torch.cuda.") for name in patched)
    assert left == []


def test_install_undo_install_again_works_in_one_process(result):
    report = result(
        "from mindspeed import session\n"
        "import mindspeed\n"
        "first = session.install(); n = len(first.journal)\n"
        "assert session.install() is first\n"
        "mindspeed.undo(); assert session.current() is None\n"
        "again = session.install()\n"
        "print(json.dumps([n, len(again.journal)]))"
    )
    assert report[0] == report[1] > 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("mindspeed.configure(profil_level='level1')", "unknown option 'profil_level'; closest: "),
        ("mindspeed.configure(profile_level='level9')", "--profile-level 'level9': choose one of"),
    ],
)
def test_wrong_options_are_refused_in_one_line(python, call, message):
    _, error = python(f"import mindspeed\n{call}")
    assert message in error


def test_options_come_from_a_file_below_explicit_values(result, tmp_path):
    config = tmp_path / "options.yaml"
    config.write_text("profile-level: level2\nprofile-with-cpu: true\n")
    values = result(
        "import mindspeed\n"
        "c = mindspeed.configure(profile_level='level1')\n"
        "print(json.dumps(c.changed_values()))",
        MINDSPEED_CONFIG=str(config),
    )
    assert values == {"profile_level": "level1", "profile_with_cpu": True}


def test_options_do_not_depend_on_the_command_line(result):
    values = result(
        "sys.argv += ['--profile-level', 'level2']\n"
        "import mindspeed\nprint(json.dumps(mindspeed.configure().changed_values()))"
    )
    assert values == {}


RECONFIGURE = """
import mindspeed.megatron_adaptor as adaptor, mindspeed
from mindspeed.errors import ConfigError
os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='0', RANK='0', WORLD_SIZE='1')
store = torch.distributed.HashStore()
torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)
from megatron.core import parallel_state
mindspeed.configure(optimization_level=2)
mindspeed.configure(optimization_level=1)
parallel_state.initialize_model_parallel()
mindspeed.configure(optimization_level=1)
try:
    mindspeed.configure(optimization_level=0)
    error = ''
except ConfigError as e:
    error = str(e)
level = adaptor.repatch({'optimization_level': 0, 'hidden_size': 8}).level
print(json.dumps([error, level]))
"""


def test_options_are_frozen_once_the_groups_exist_until_repatch(result):
    error, level = result(RECONFIGURE)
    assert "--optimization-level" in error
    assert level == 0


def test_old_name_is_the_same_module_with_one_deprecation_warning(result):
    same, warned = result(
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import ascendspeed.megatron_adaptor as old\n"
        "import mindspeed.megatron_adaptor as new\n"
        "print(json.dumps([old is new, [str(w.message) for w in caught "
        "if w.category is DeprecationWarning and 'ascendspeed' in str(w.message)]]))"
    )
    assert same is True
    assert len(warned) == 1


SUBCLASSED = """
import copy, dataclasses
import mindspeed
import mindspeed.megatron_adaptor as adaptor
store = torch.distributed.HashStore()
torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

@dataclasses.dataclass
class FrameworkConfig(TransformerConfig):
    framework_field: int = 7

def parameters(**options):
    adaptor.repatch(options)
    config = FrameworkConfig(num_layers=4, hidden_size=8, num_attention_heads=2)
    config = copy.deepcopy(config)
    assert config.framework_field == 7
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=16, max_sequence_length=4)
    return sum(p.numel() for p in model.parameters())

parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
counts = [parameters(), parameters(noop_layers=(1,)), parameters(noop_layers=(0, 3)), parameters()]
print(json.dumps(counts))
"""


def test_features_survive_subclassed_and_copied_configs_and_apply_again(result):
    all_layers, three, two, again = result(SUBCLASSED)
    layer = all_layers - three
    assert layer > 0
    assert all_layers - two == 2 * layer
    assert again == all_layers


def test_mla_rope_fusion_is_switched_off_where_its_kernels_cannot_run(result):
    values = result(
        "from mindspeed import session\n"
        "from argparse import Namespace\n"
        "args = Namespace(multi_latent_attention=True, apply_rope_fusion=True)\n"
        "gpt = Namespace(multi_latent_attention=False, apply_rope_fusion=True)\n"
        "session.install().configure(args); session.current().configure(gpt)\n"
        "print(json.dumps([args.apply_rope_fusion, gpt.apply_rope_fusion]))"
    )
    assert values == [False, True]


READ_ONLY = """
import json
from argparse import Namespace
from types import MappingProxyType
import mindspeed.megatron_adaptor as adaptor

given = {
    "context_parallel_size": 2, "cp_comm_type": None, "seq_length": 64, "num_layers": 2,
    "num_attention_heads": 4, "tensor_model_parallel_size": 1, "apply_rope_fusion": True,
    "multi_latent_attention": True,
}
before = dict(given)
corrected = adaptor.repatch(MappingProxyType(given)).corrections
assert adaptor.repatch(given).corrections == corrected and given == before, given
args = Namespace(**before)
adaptor.repatch(args)
assert vars(args) == before | dict(corrected)
print(json.dumps(dict(corrected)))
"""


def test_a_mapping_is_only_read_and_a_namespace_is_corrected(result):
    corrected = result(READ_ONLY)
    assert corrected["cp_comm_type"] == ["a2a"] and corrected["apply_rope_fusion"] is False


def test_options_among_the_fields_of_a_config_are_those_that_are_chosen(result):
    code = """
import inspect
import mindspeed.megatron_adaptor as adaptor
from mindspeed.errors import ConfigError
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
sizes = {'num_layers': 2, 'hidden_size': 8, 'num_attention_heads': 2}

def made(config, **own):
    try:
        return vars(config(**own, **sizes)).get('use_fused_rmsnorm')
    except (ConfigError, TypeError) as error:
        return str(error)

found = [made(TransformerConfig, use_fused_rmsnorm=True)]
adaptor.repatch({'hidden_size': 8, 'normalization': 'RMSNorm', 'use_fused_rmsnorm': True})
for config in (TransformerConfig, MLATransformerConfig):
    assert 'hidden_size' in inspect.signature(config).parameters
    found += [made(config, use_fused_rmsnorm=True), made(config, use_fused_rmsnorm=False)]
    found += [made(config), made(config, no_such_option=1)]
print(json.dumps(found))
"""
    found = result(PRELUDE + code)
    assert "use_fused_rmsnorm=True, an option of mindspeed, before any were chosen" in found[0]
    for of_config in (found[1:5], found[5:]):
        chosen, other, without, unknown = of_config
        assert chosen is True
        assert "got use_fused_rmsnorm=False, but mindspeed runs with True" in other
        assert without is None
        assert "unexpected keyword argument 'no_such_option'" in unknown
