"""`hydra/launcher=slurm`, with stand-ins for Slurm's commands that run a submitted script on this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli import read_metrics, read_summary, run, tiny_job

# sbatch runs the tasks of the script one after the other in the background; sacct knows which are over.
COMMANDS = {
    "sbatch": """
cp "$1" {folder}/script.sh
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$1")
export SLURM_JOB_ID=7 SLURM_ARRAY_JOB_ID=7 SLURM_JOB_NODELIST=node SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1
export SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0
(cd /; for task in $(seq 0 "$last"); do
    SLURM_ARRAY_TASK_ID=$task bash "$1"
    echo "7_$task|COMPLETED" >> {folder}/over
done) > {folder}/output 2>&1 < /dev/null &
echo "Submitted batch job 7"
""",
    "srun": """
while [[ "$1" == -* ]]; do case "$1" in --output | --error) shift 2 ;; *) shift ;; esac; done
exec "$@"
""",
    "sacct": """
echo "JobID|State"
for task in 0 1 2; do grep "^7_$task|" {folder}/over || echo "7_$task|RUNNING"; done 2> {folder}/none
""",
}


@pytest.mark.distributed
def test_each_job_of_a_sweep_is_a_slurm_job_with_its_workers(tmp_path: Path) -> None:
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for name, script in COMMANDS.items():
        (bin_folder / name).write_text("#!/bin/bash" + script.format(folder=tmp_path))
        (bin_folder / name).chmod(0o755)
    path = f"{bin_folder}:{Path(sys.executable).parent}:/usr/bin:/bin"
    status, text = run(
        *("-m", *tiny_job(tmp_path), "hydra/launcher=slurm", "hydra.launcher.partition=fast", "nproc=2", "seed=0,1"),
        PATH=path,
    )
    assert status == 0, text + (tmp_path / "output").read_text()

    runs = [path for path in (tmp_path / "runs").iterdir() if path.is_dir() and not path.name.startswith(".")]
    assert len(runs) == 2
    for directory in runs:
        summary = read_summary(directory)
        assert (summary["status"], summary["world_size"]) == ("done", 2)
        assert [row["step"] for row in read_metrics(directory)] == [1, 2, 3, 4, 5, 6]

    options = {line for line in (tmp_path / "script.sh").read_text().splitlines() if line.startswith("#SBATCH")}
    wanted = ("partition=fast", "gpus-per-node=2", "nodes=1", "ntasks-per-node=1", "time=1440", "signal=USR2@300")
    assert {f"#SBATCH --{option}" for option in wanted} <= options
