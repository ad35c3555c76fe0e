"""What every rank of the harness tests has imported: the adaptor first."""

# ruff: noqa: I001, F401
import tests.support.warm
import lm_eval.models.huggingface
import mindspeed.evaluation.lm_eval_adapter
