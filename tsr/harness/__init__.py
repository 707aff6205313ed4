"""What a training job needs around the optimizer. `tsr` itself imports none of it, and it knows no model and no data.

`settings` validates the trainer's keys and names runs, `launch` starts workers, `rundir` is the run directory and
`checkpoint` what lies in it, `loop` trains, `dryrun` counts without training, `mirror` copies the record to W&B.
"""
