"""The answers of docs/faq.md, each checked against what is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.file_baton import FileBaton

from tests.docs import faq_ranks
from tests.support.lazy import Lazy, needs

needs("megatron.core")

helpers = Lazy("megatron.core.datasets.helpers")


def sample_index(sizes: list[int], length: int, epochs: int) -> list[list[int]]:
    """Where each sample starts: position in the list of documents, and offset in the document.

    Arithmetic in Python integers, which do not overflow; a sample shares its last token with the
    next one.
    """
    rows, document, offset = [[0, 0]], 0, 0
    for _ in range((epochs * sum(sizes) - 1) // length):
        missing = length
        while offset + missing >= sizes[document % len(sizes)]:
            missing -= sizes[document % len(sizes)] - offset
            document, offset = document + 1, 0
        offset += missing
        rows.append([document, offset])
    return rows


class TestDataHelpers:
    """The index of the samples used to overflow 32 bits."""

    def test_an_index_over_more_than_2_to_the_32_tokens_is_exact(self) -> None:
        sizes = [1_900_000_000, 7, 1_500_000_001, 2_100_000_000]
        epochs, length = 3, 999_999_937
        built = helpers.build_sample_idx(
            np.array(sizes, dtype=np.int32),
            np.tile(np.arange(len(sizes), dtype=np.int32), epochs),
            length,
            epochs,
            sum(sizes),
        )
        assert epochs * sum(sizes) > 2**33
        assert built.tolist() == sample_index(sizes, length, epochs)

    def test_the_64_bit_index_equals_the_32_bit_one(self) -> None:
        sizes = np.array([5, 1, 9, 30, 2], dtype=np.int32)
        documents = np.tile(np.arange(5, dtype=np.int32), 4)
        arguments = (sizes, documents, 6, 4, int(sizes.sum()), True, 1)
        narrow = helpers.build_sample_idx_int32(*arguments)
        wide = helpers.build_sample_idx_int64(*arguments)
        assert wide.dtype == np.int64
        assert wide.tolist() == narrow.tolist() == sample_index(sizes.tolist(), 6, 4)


class TestTorchExtensions:
    """A lock left behind by a killed process makes torch wait for ever."""

    def test_the_lock_of_a_killed_compilation_remains(self, tmp_path: Path) -> None:
        lock = tmp_path / "lock"
        program = (
            "import os, signal; from torch.utils.file_baton import FileBaton; "
            f"FileBaton({str(lock)!r}).try_acquire(); os.kill(os.getpid(), signal.SIGKILL)"
        )
        subprocess.run([sys.executable, "-c", program], check=False)
        assert lock.exists()
        assert not FileBaton(str(lock)).try_acquire()
        lock.unlink()
        assert FileBaton(str(lock)).try_acquire()

    @pytest.mark.slow
    def test_neither_the_adaptor_nor_megatron_core_loads_an_extension(self, tmp_path: Path) -> None:
        """With every extension locked, the model of a training script still builds and runs."""
        program = """
import torch.utils.cpp_extension as extension
def refuse(*args, **kwargs):
    raise AssertionError("a torch extension is compiled")
extension.load = extension.load_inline = extension._jit_compile = refuse
import mindspeed.megatron_adaptor
from megatron.core.models.gpt import GPTModel
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.optimizer import get_megatron_optimizer
print("imported")
"""
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "MINDSPEED_DEVICE": "cpu", "TORCH_EXTENSIONS_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.endswith("imported\n"), done.stderr
        assert list(tmp_path.iterdir()) == []


class Tokenizer:
    """Pads with the token that ends a document, as many Hugging Face tokenizers are set up."""

    vocab_size = 50
    eod = pad = 9
    unique_identifiers = {"class": "Tokenizer"}  # noqa: RUF012


class TestPaddingEqualsEnd:
    """``--append-eod`` with a tokenizer whose padding token is its end token: grad norm nan."""

    def sample(self, tmp_path: Path, ambiguous: bool) -> dict[str, torch.Tensor]:
        from megatron.core.datasets import gpt_dataset, indexed_dataset
        from megatron.core.datasets.utils import Split

        prefix = str(tmp_path / "corpus")
        builder = indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for document in ([1, 2, 3, 9], [4, 5, 9], [6, 7, 8, 1, 9]):
            builder.add_document(torch.tensor(document), [len(document)])
        builder.finalize(f"{prefix}.idx")
        config = gpt_dataset.GPTDatasetConfig(
            random_seed=1,
            sequence_length=11,
            blend=([prefix], None),
            split="1",
            tokenizer=Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            path_to_cache=str(tmp_path),
            allow_ambiguous_pad_tokens=ambiguous,
        )
        data = gpt_dataset.GPTDataset(
            indexed_dataset.IndexedDataset(prefix), prefix, np.arange(3), 1, Split.train, config
        )
        return data[0]

    def test_megatron_core_keeps_the_loss_of_the_end_tokens(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="pad token id .* collides"):
            sample = self.sample(tmp_path, ambiguous=False)
        assert (sample["labels"] == 9).sum() >= 2
        assert bool(sample["loss_mask"].all())

    def test_the_opt_in_masks_end_tokens_and_replaces_them_by_token_0(self, tmp_path: Path) -> None:
        with pytest.warns(UserWarning, match="will break|instability"):
            sample = self.sample(tmp_path, ambiguous=True)
        assert not (sample["labels"] == 9).any()
        assert torch.equal(sample["loss_mask"] == 0, sample["labels"] == 0)
        assert (sample["tokens"] == 0).any()


class TestGloo:
    """Many groups of many ranks: ``Gloo connectFullMesh failed``."""

    @pytest.mark.slow
    def test_lazy_groups_open_no_connection_before_they_are_used(self, ranks) -> None:
        groups = 6
        eager = ranks(4, faq_ranks.sockets_after_groups, groups, env={"TORCH_GLOO_LAZY_INIT": "0"})
        lazy = ranks(4, faq_ranks.sockets_after_groups, groups, env={"TORCH_GLOO_LAZY_INIT": "1"})
        # A group listens on one socket; an eager one also holds one to each of its 3 peers. Wide
        # bounds: other sockets of the process come and go.
        assert min(eager) >= groups * 3
        assert max(lazy) < groups * 2

    @pytest.mark.slow
    def test_the_adaptor_makes_gloo_lazy_unless_configured_otherwise(self) -> None:
        program = "import os, mindspeed.megatron_adaptor; print(os.environ['TORCH_GLOO_LAZY_INIT'])"
        for given, expected in ((None, "1"), ("0", "0")):
            env = {key: value for key, value in os.environ.items() if key != "TORCH_GLOO_LAZY_INIT"}
            env |= {"MINDSPEED_DEVICE": "cpu"} | ({"TORCH_GLOO_LAZY_INIT": given} if given else {})
            done = subprocess.run(
                [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
            )
            assert done.stdout.strip() == expected
