"""Data of another tokenizer in an unmodified ``pretrain_gpt.py``: refused before the first step."""

from __future__ import annotations

import pytest

from tests.megatron_lm.launch import pretrain
from tests.support import documents_job

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --position-embedding-type rope --transformer-impl local "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-2 --lr-decay-iters 10 "
    "--split 1,0,0 --tokenizer-type NullTokenizer --vocab-size 8 --eval-iters 0 --log-interval 1 "
    "--eval-interval 1000 --make-vocab-size-divisible-by 1"
)


def test_the_script_names_data_set_document_and_id(rank_pool, tmp_path):
    data = str(tmp_path / "documents")
    setup = "tests.support.warm"
    rank_pool.run(1, documents_job.write_documents, data, setup=setup, backend=None)
    with pytest.raises(AssertionError) as failed:
        pretrain(tmp_path, 1, *FLAGS.split(), "--data-path", data)
    said = str(failed.value)
    assert f"DataError: {data}: document " in said
    assert "give --tokenizer-type and --tokenizer-model of the data" in said
    assert "iteration        1/" not in said
