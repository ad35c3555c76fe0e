"""What every rank of the harness tests has imported: the adaptor first."""

import lm_eval.models.huggingface  # noqa: F401

import mindspeed.evaluation.lm_eval_adapter  # noqa: F401
