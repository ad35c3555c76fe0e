"""Benchmarks from local files: read, ask, score, report.

tasks.yaml   what a benchmark is: files, fields, prompt, choices, score, groups
task.py      that description, typed
reading.py   files -> records                        errors before any model is loaded
asking.py    records -> questions: examples, prompt, choices
answers.py   generated text -> answer
respond.py   who answers: a model under TP x PP, or a stand-in
run.py       every question once, by data-parallel ranks, resumable
report.py    scores per subject and group, standard errors, table
execute.py   generated programs in limited child processes
harness.py   the same models in lm-evaluation-harness
"""
