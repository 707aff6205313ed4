"""Turn run directories into tables and figures.

Three parts, each usable alone:

* `sweep.runs` reads run directories into two pandas tables: `runs` has one row a run, `curves` one row a run and step;
* `sweep.report` is the command `python -m sweep.report RUNS_DIR… --out DIR`, and makes the tables;
* `sweep.figures` draws.

Notation. A *run* is one directory with `config.yaml`, `metrics.jsonl` and `summary.json`; columns keep the keys of
those files (`eval/loss`, `comm/total_bytes`), and a configuration key `a.b` is the column `config/a.b`. A *method* is
the `optimizer.name` of a run. Runs that differ in nothing but their seeds are a *group*: one row of the table, one
label of the figure. Bytes are the payload of one worker, M = 1e6, G = 1e9; a key that starts with `paper/` follows the
accounting of the paper.
"""
