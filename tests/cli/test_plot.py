"""``mindspeed plot``: reading metrics files and drawing them."""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np
import pytest

from mindspeed.cli import plot
from mindspeed.errors import ConfigError, DataError


def write_run(directory, count=50, offset=0.0):
    directory.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "iteration": i,
            "lm_loss": 7.6 - 0.05 * i + offset,
            "learning_rate": 1e-3,
            "grad_norm": 1.0 + 1 / i,
            "tokens_per_second": 9000.0 + i,
            "memory_gb": 0.3,
            "expert_load": 1.5,
            "expert_rank_load": 1.2,
        }
        for i in range(1, count + 1)
    ]
    lines.append({"iteration": count, "validation_loss": 5.5 + offset})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text)
    return directory


def run_plot(*argv):
    parser = argparse.ArgumentParser()
    plot.add_arguments(parser)
    return plot.run(parser.parse_args([str(word) for word in argv]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "magic"), [("loss.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")]
)
def test_a_run_becomes_a_picture_in_every_format(tmp_path, capsys, name, magic):
    pytest.importorskip("matplotlib")
    directory = write_run(tmp_path / "run")
    assert run_plot(directory, "-o", tmp_path / name) == 0
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert str(tmp_path / name) in capsys.readouterr().out


def test_the_picture_is_next_to_the_metrics_by_default(tmp_path):
    pytest.importorskip("matplotlib")
    run_plot(write_run(tmp_path / "run") / "metrics.jsonl")
    assert (tmp_path / "run" / "loss.png").exists()


def drawn_figure(monkeypatch, runs, tmp_path):
    """The figure that draw() saved."""
    figure_class = pytest.importorskip("matplotlib.figure").Figure
    saved = []
    save = figure_class.savefig
    monkeypatch.setattr(
        figure_class, "savefig", lambda self, *a, **k: (saved.append(self), save(self, *a, **k))
    )
    plot.draw(runs, tmp_path / "x.png")
    return saved[0]


def test_two_runs_are_named_in_the_legend_with_their_last_losses(monkeypatch, tmp_path):
    files = [write_run(tmp_path / "a"), write_run(tmp_path / "b", offset=1.0)]
    runs = plot.read_runs([file / "metrics.jsonl" for file in files])
    figure = drawn_figure(monkeypatch, runs, tmp_path)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels[1::2] == ["a: validation 5.50", "b: validation 6.50"]
    assert labels[0].startswith("a: training 5.1")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["loss", "loss, difference to a [%]", *plot.PANELS]


@pytest.mark.slow
def test_the_relative_error_to_the_first_run_is_drawn_and_printed(monkeypatch, tmp_path, capsys):
    a, b = write_run(tmp_path / "a"), tmp_path / "b"
    b.mkdir()
    lines = [json.loads(line) for line in (a / "metrics.jsonl").read_text().splitlines()]
    for line in lines[:20]:  # the second run was killed early
        line["lm_loss"] *= 1.01 if line["iteration"] == 7 else 0.998
    text = "".join(json.dumps(line) + "\n" for line in lines[:20]) + '{"iteration": 21, "lm_'
    (b / "metrics.jsonl").write_text(text)
    assert run_plot(a, b) == 0
    assert (a / "compare.png").exists() and not (a / "loss.png").exists()
    printed = capsys.readouterr().out
    mean = (19 * 0.002 + 0.01) / 20
    assert "b: loss 7.535 -> 6.587 at iteration 20, 1 unreadable lines were skipped" in printed
    assert f"relative error of the loss {mean:.3%} on average over 20 iterations" in printed
    assert "at most 1.000% at iteration 7" in printed
    runs = plot.read_runs([a / "metrics.jsonl", b / "metrics.jsonl"])
    figure = drawn_figure(monkeypatch, runs, tmp_path)
    thin = figure.axes[1].get_lines()[1]
    assert list(thin.get_xdata()) == list(range(1, 21))
    expected = [1.0 if i == 7 else -0.2 for i in range(1, 21)]
    np.testing.assert_allclose(thin.get_ydata(), expected, atol=1e-9)


def test_runs_without_a_common_iteration_are_drawn_without_errors(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name, iteration in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        record = {"iteration": iteration, "lm_loss": 2.0}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert run_plot(tmp_path / "a", tmp_path / "b") == 0
    assert "b: no iteration in common with a" in capsys.readouterr().out


def test_nan_losses_are_gaps(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"iteration": 1, "lm_loss": NaN}\n{"iteration": 2, "lm_loss": null}\n'
        '{"iteration": 3, "lm_loss": 2.0, "grad_norm": Infinity}\n\x00\x00\x00'
    )
    run = plot.read_run(file, "a")
    assert run.curves == {"iteration": {1: 1, 2: 2, 3: 3}, "lm_loss": {3: 2.0}}
    file.write_text('{"iteration": 1, "lm_loss": NaN}\n')
    with pytest.raises(DataError, match="no line with 'iteration' and a finite 'lm_loss'"):
        plot.read_run(file, "a")


def test_panels_without_data_are_left_out(monkeypatch, tmp_path):
    curves = {"lm_loss": {1: 2.0, 2: 1.0}, "learning_rate": {1: 0.1, 2: 0.2}}
    figure = drawn_figure(monkeypatch, [plot.RunCurves("a", curves)], tmp_path)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["loss", "learning rate"]


def test_after_a_resume_the_later_line_of_an_iteration_counts(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text(
        '{"iteration": 1, "lm_loss": 3.0}\n{"iteration": 2, "lm_loss": 9.0}\n{"iteration": 3, "lo\n'
        '{"iteration": 2, "lm_loss": 2.0}\n[]\n'
    )
    run = plot.read_run(file, "a")
    assert run.curve("lm_loss") == {1: 3.0, 2: 2.0}
    assert run.unreadable_lines == 2


def test_the_moving_average_keeps_a_straight_line_and_skips_gaps():
    line = np.linspace(8, 4, 101)
    average = plot.smoothed(line, 3.0)
    np.testing.assert_allclose(average[10:-10], line[10:-10], atol=1e-12)
    line[50] = np.nan
    np.testing.assert_allclose(plot.smoothed(line, 3.0)[50], 6.0, atol=1e-12)
    np.testing.assert_array_equal(plot.smoothed([1.0, 5.0], 0.0), [1.0, 5.0])


def test_runs_in_directories_of_equal_name_get_distinct_labels(tmp_path):
    files = [write_run(tmp_path / p / "run") / "metrics.jsonl" for p in ("x", "y")]
    names = [run.name for run in plot.read_runs(files)]
    assert names == [str(tmp_path / "x" / "run"), str(tmp_path / "y" / "run")]


def test_a_path_without_metrics_is_named_with_a_hint(tmp_path):
    write_run(tmp_path / "below")
    with pytest.raises(DataError, match=r"has no metrics\.jsonl; there is .*below"):
        plot.metrics_file(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="no line with 'iteration' and a finite 'lm_loss'"):
        plot.read_run(tmp_path / "metrics.jsonl", "a")


def test_an_unknown_ending_is_refused(tmp_path):
    runs = plot.read_runs([write_run(tmp_path / "a") / "metrics.jsonl"])
    with pytest.raises(ConfigError, match=r"must end in \.png, \.svg, \.pdf"):
        plot.draw(runs, tmp_path / "x.gif")


def test_without_matplotlib_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    runs = plot.read_runs([write_run(tmp_path / "a") / "metrics.jsonl"])
    with pytest.raises(ConfigError, match=r"pip install 'mindspeed\[plot\]'"):
        plot.draw(runs, tmp_path / "x.png")
