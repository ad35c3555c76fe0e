"""Benchmarks from local files: read, ask, score, report.

    tasks.yaml           what a benchmark is: files, fields, prompt, choices, score, groups
    task.py              that description, typed
    reading.py           files -> records
    options.py            records -> questions: examples, prompt, choices
    plan.py              a command line -> questions, all checked before a model is loaded
    respond.py           who answers: a model under TP x PP, or a stand-in
    run.py               every question once, by data-parallel replicas
    samples.py           answers on disk, so that an interrupted run goes on
    answers.py           generated text -> right or wrong
    execute.py           generated programs in limited child processes (isolation.py, limited.py)
    report.py            scores per subject and group, standard errors, table
    evaluate.py          all of it, from a plan and a model to files
    lm_eval_adapter.py   the same models in lm-evaluation-harness
    lm_eval_run.py       its evaluation of them, from our command
    remembered.py        answers on disk, so that its runs can be interrupted
    lm_eval_data.py      its tasks on local files

Nothing is downloaded, and everything that can be wrong is said before a model is loaded.
"""
