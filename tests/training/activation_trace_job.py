"""Bytes by site of each stage, traced in a process of its own and kept by real ranks."""

from __future__ import annotations

from tests.support.trainer_job import command


def traced(flags, ranks):
    """The stages of :func:`mindspeed.training.activation_trace.trace`."""
    from mindspeed.training.activation_trace import trace
    from mindspeed.training.initialize import prepare

    args = prepare(command(["--dry-run", *flags]), ranks).args
    return [(s.number, _plain(s.chunks), s.bytes) for s in trace(args)]


def kept(flags, ranks):
    """Stage of this rank, and what its chunks keep of a real micro-batch."""
    from megatron.core import parallel_state

    from mindspeed.training import setup
    from mindspeed.training.activation_trace import forward
    from mindspeed.training.configs import transformer_config
    from mindspeed.training.initialize import prepare
    from mindspeed.training.model import build_modules, gpt_model

    args = prepare(command(flags), ranks).args
    setup.initialize(args)
    config = transformer_config(args)
    chunks = [forward(args, config, one) for one in build_modules(args, config, gpt_model)]
    return parallel_state.get_pipeline_model_parallel_rank(), _plain(chunks)


def _plain(chunks):
    return [(dict(chunk.sites), chunk.host, chunk.dropped) for chunk in chunks]


def described(flags):
    """The text of ``--dry-run``."""
    from mindspeed.training.estimate import describe
    from mindspeed.training.initialize import prepare

    return describe(prepare(command(["--dry-run", *flags]), 2))
