"""Benchmarks from local files: read the data, query the model, score, report.

    tasks.yaml              benchmarks as data: files, fields, prompt, choices, score, groups
    task.py                 that description, typed
    dataset_readers.py      files -> records
    prompts.py              records -> questions: few-shot examples, prompt, choices
    prepared_tasks.py       command line -> questions, all checked before a model is loaded
    model_adapter.py        the model under TP x PP as a function on texts
    run.py                  every question once, over data-parallel replicas
    samples.py              answers on disk, so that an interrupted run can continue
    answer_matching.py      generated text -> right or wrong
    code_execution.py       generated programs in child processes (sandbox.py), isolation
    report.py               scores per subject and group, standard errors, table
    evaluate.py             all of it, from prepared tasks and a model to files

lm-evaluation-harness with the same models, data and sandbox:

    lm_eval_adapter.py      a model as the harness' ``LM`` class; the evaluation
    samples.py              its responses on disk, so that an interrupted run can continue
    lm_eval_tasks.py        its tasks on local data: files -> the splits that a task uses

Nothing is downloaded, and all inputs are checked before a model is loaded.
"""
