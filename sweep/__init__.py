"""Collecting, comparing and drawing runs, and the paper's tables recomputed.

Notation. A *run* is one job's directory, or its row in a CSV of results; columns keep the keys of its files (such as
`eval/loss`), and a configuration key `a.b` is the column `config/a.b`. A *method* is the `optimizer.name` of a
run; its *settings* are the configuration in which it differs from the other runs of its method and model. Runs that
differ in nothing but their seeds are a *group* of n: one row of the table, one label of a figure. Bytes are the payload
of one worker, M = 1e6, G = 1e9; a key that starts with `paper/` follows the accounting of the paper.

Each module knows only those before it:

    runs                    run directories and results as pandas tables
    results                 the CSV that jobs add themselves to
    compare                 what may be compared, is the best, and counts as lower
    tables, page            a table as Markdown, LaTeX and HTML; one self-contained page
    style, curves, totals   how figures look; loss against a cost; final loss and the split of the bytes
    ablations               groups of runs that differ in one setting
    figures, report         `python -m sweep.figures`, `python -m sweep.report`
    fits, cells, paper      the paper's tables beside dry runs: `python -m sweep.paper`

`published.yaml` holds what the paper prints, `results/` what experiments gave.
"""
